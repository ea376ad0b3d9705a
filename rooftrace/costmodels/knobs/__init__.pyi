from rooftrace.costmodels.knobs import knobs as knobs, numbers as numbers, residuals as residuals
from rooftrace.costmodels.knobs.knobs import (
    Knobs as Knobs,
    dump_knobs as dump_knobs,
    load_knobs as load_knobs,
)
from rooftrace.costmodels.knobs.numbers import AttentionKnobs as AttentionKnobs
