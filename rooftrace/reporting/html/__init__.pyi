from rooftrace.reporting.html.document import (
    as_cell as as_cell,
    report_page as report_page,
    result_page as result_page,
)
