from rooftrace.reporting.figures import parity as parity, style as style
from rooftrace.reporting.figures.folder import (
    write_figures as write_figures,
)
from rooftrace.reporting.figures.notebooks import (
    figure_of as figure_of,
)
from rooftrace.reporting.figures.timeline import (
    write_timeline as write_timeline,
    write_timelines as write_timelines,
)
