from rooftrace.reporting.text.chips import (
    chip_list as chip_list,
)
from rooftrace.reporting.text.comparisons import (
    comparisons_view as comparisons_view,
)
from rooftrace.reporting.text.results import (
    as_markdown as as_markdown,
    as_text as as_text,
    renderable as renderable,
    shown as shown,
)
