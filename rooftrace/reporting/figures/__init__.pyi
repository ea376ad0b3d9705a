from rooftrace.reporting.figures import (
    folder as folder,
    ofsizes as ofsizes,
    parity as parity,
    style as style,
    timeline as timeline,
)
from rooftrace.reporting.figures.notebooks import (
    figure_of as figure_of,
)
