from rooftrace.reporting.figures.ofsizes.elasticplot import (
    elasticity_plot as elasticity_plot,
)
from rooftrace.reporting.figures.ofsizes.exploreplot import (
    exploration_plot as exploration_plot,
)
from rooftrace.reporting.figures.ofsizes.frontplot import (
    front_plot as front_plot,
)
from rooftrace.reporting.figures.ofsizes.sizeroof import (
    sweep_roofline as sweep_roofline,
)
from rooftrace.reporting.figures.ofsizes.sweepplot import (
    sweep_plot as sweep_plot,
)
from rooftrace.reporting.figures.ofsizes.tornadoes import (
    tornado as tornado,
)
