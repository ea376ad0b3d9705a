from rooftrace.reporting.text import words as words
from rooftrace.reporting.text.calibrationtext import (
    render_calibration as render_calibration,
)
from rooftrace.reporting.text.chiptext import (
    render_chip as render_chip,
    render_chip_list as render_chip_list,
)
from rooftrace.reporting.text.comparetext import (
    comparisons_markdown as comparisons_markdown,
    render_comparisons as render_comparisons,
)
from rooftrace.reporting.text.difftext import (
    diff_markdown as diff_markdown,
    render_diff as render_diff,
)
from rooftrace.reporting.text.grids import (
    Column as Column,
    Grid as Grid,
    grid as grid,
)
from rooftrace.reporting.text.validationtext import (
    parity_points as parity_points,
    render_validation as render_validation,
    validation_markdown as validation_markdown,
)
from rooftrace.reporting.text.words import (
    LIMITS as LIMITS,
    kernel_name as kernel_name,
    listed as listed,
    plural as plural,
    short_module as short_module,
)
