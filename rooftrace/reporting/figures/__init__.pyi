from rooftrace.reporting.figures import (
    folder as folder,
    parity as parity,
    style as style,
    timeline as timeline,
)
from rooftrace.reporting.figures.chakra import save_chakra as save_chakra
from rooftrace.reporting.figures.folder import (
    draw_answer as draw_answer,
    draw_sweep as draw_sweep,
    figure_of as figure_of,
)
from rooftrace.reporting.figures.roofline import roofs as roofs
from rooftrace.reporting.figures.sweepplot import (
    elasticity_plot as elasticity_plot,
    exploration_plot as exploration_plot,
    sweep_roofline as sweep_roofline,
    tornado as tornado,
)
