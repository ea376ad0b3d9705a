from rooftrace.costmodels.kernels import (
    engines as engines,
    instructions as instructions,
    intervals as intervals,
    knobs as knobs,
    numbers as numbers,
    seconds as seconds,
    tiles as tiles,
    works as works,
)
from rooftrace.costmodels.kernels.attention_rows import attention_knobs as attention_knobs
from rooftrace.costmodels.kernels.engines import group_class as group_class
from rooftrace.costmodels.kernels.knobs import (
    Knobs as Knobs,
    dump_knobs as dump_knobs,
    load_knobs as load_knobs,
)
