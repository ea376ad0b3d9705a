from rooftrace.reporting.text.comparisons import (
    comparisons_view as comparisons_view,
)
from rooftrace.reporting.text.lists import list_of as list_of
from rooftrace.reporting.text.results import (
    as_markdown as as_markdown,
    file_of as file_of,
    latex_tables as latex_tables,
    shown as shown,
)
