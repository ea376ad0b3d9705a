from rooftrace.reporting.views.folding import (
    factor_columns as factor_columns,
    factor_rows as factor_rows,
    factor_sentence as factor_sentence,
)
from rooftrace.reporting.views.inventories import list_of as list_of
from rooftrace.reporting.views.moduletrees import comparisons_view as comparisons_view
from rooftrace.reporting.views.results import (
    as_markdown as as_markdown,
    file_of as file_of,
    latex_tables as latex_tables,
    shown as shown,
)
