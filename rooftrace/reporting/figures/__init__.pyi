from rooftrace.reporting.figures import (
    breakdown as breakdown,
    memoryplot as memoryplot,
    parity as parity,
    printing as printing,
    roofline as roofline,
    style as style,
    timeline as timeline,
)
from rooftrace.reporting.figures.chakra import save_chakra as save_chakra
from rooftrace.reporting.figures.inline import figure_of as figure_of
from rooftrace.reporting.figures.roofline import roofs as roofs
from rooftrace.reporting.figures.sweepplot import (
    draw_answer as draw_answer,
    draw_sweep as draw_sweep,
    elasticity_plot as elasticity_plot,
    exploration_plot as exploration_plot,
    sweep_roofline as sweep_roofline,
    tornado as tornado,
)
