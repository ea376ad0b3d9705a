from rooftrace.reporting.text.folding import (
    factor_columns as factor_columns,
    factor_rows as factor_rows,
    factor_sentence as factor_sentence,
)
from rooftrace.reporting.text.inventories import list_of as list_of
from rooftrace.reporting.text.moduletrees import comparisons_view as comparisons_view
from rooftrace.reporting.text.results import (
    as_markdown as as_markdown,
    file_of as file_of,
    latex_tables as latex_tables,
    shown as shown,
)
