from rooftrace.costmodels.knobs import classes as classes
from rooftrace.costmodels.knobs.knobs import (
    AttentionKnobs as AttentionKnobs,
    Knobs as Knobs,
    Tiling as Tiling,
    dump_knobs as dump_knobs,
    load_knobs as load_knobs,
)
