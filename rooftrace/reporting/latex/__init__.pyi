from rooftrace.reporting.latex.document import (
    as_latex as as_latex,
    table_files as table_files,
)
