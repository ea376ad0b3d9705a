from rooftrace.reporting.figures.ofmeshes.scalingplot import (
    scaling_plot as scaling_plot,
)
