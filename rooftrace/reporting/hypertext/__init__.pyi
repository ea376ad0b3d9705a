from rooftrace.reporting.hypertext.cells import as_cell as as_cell
from rooftrace.reporting.hypertext.document import (
    report_page as report_page,
    result_page as result_page,
)
