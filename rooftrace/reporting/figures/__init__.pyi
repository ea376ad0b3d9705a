from rooftrace.reporting.figures import (
    ofsizes as ofsizes,
    parity as parity,
    style as style,
    timeline as timeline,
)
from rooftrace.reporting.figures.folder import (
    write_figures as write_figures,
)
from rooftrace.reporting.figures.notebooks import (
    figure_of as figure_of,
)
