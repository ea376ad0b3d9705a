from rooftrace.costmodels.knobs import classes as classes
from rooftrace.costmodels.knobs.knobs import (
    AttentionKnobs as AttentionKnobs,
    Knobs as Knobs,
    Tiling as Tiling,
    dump_knobs as dump_knobs,
    load_knobs as load_knobs,
)
from rooftrace.costmodels.knobs.residuals import (
    FEW as FEW,
    FITTED as FITTED,
    LEVEL as LEVEL,
    LEVELS as LEVELS,
    NO_FIT as NO_FIT,
    ONE_FACTOR as ONE_FACTOR,
    USES as USES,
    Residuals as Residuals,
    ResidualsError as ResidualsError,
    student as student,
)
