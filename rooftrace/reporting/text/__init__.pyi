from rooftrace.reporting.text.comparisons import (
    comparisons_view as comparisons_view,
)
from rooftrace.reporting.text.lists import list_of as list_of
from rooftrace.reporting.text.results import (
    as_markdown as as_markdown,
    as_text as as_text,
    renderable as renderable,
    shown as shown,
)
