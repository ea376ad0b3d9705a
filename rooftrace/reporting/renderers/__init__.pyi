from rooftrace.reporting.renderers import units as units, view as view, words as words
from rooftrace.reporting.renderers.latex import as_latex as as_latex, table_files as table_files
from rooftrace.reporting.renderers.markdown import as_page as as_page
from rooftrace.reporting.renderers.terminal import as_screen as as_screen
from rooftrace.reporting.renderers.units import runs as runs
