from rooftrace.costmodels.timing.attention_time import (
    attention_engine as attention_engine,
    attention_knobs as attention_knobs,
)
from rooftrace.costmodels.timing.kernels import (
    KernelTable as KernelTable,
    copies_layouts as copies_layouts,
    kernel_seconds as kernel_seconds,
    kernel_table as kernel_table,
    launch_seconds as launch_seconds,
    products_of as products_of,
)
from rooftrace.costmodels.timing.knobs import (
    Knobs as Knobs,
    dump_knobs as dump_knobs,
    load_knobs as load_knobs,
    with_shares as with_shares,
)
from rooftrace.costmodels.timing.opclass import (
    CLASSES as CLASSES,
    group_class as group_class,
)
from rooftrace.costmodels.timing.timing import (
    Launch as Launch,
    StepTimes as StepTimes,
    Timing as Timing,
    compute_seconds as compute_seconds,
    engine_of as engine_of,
    host_waits as host_waits,
    ranked as ranked,
    schedule as schedule,
    step_times as step_times,
)
from rooftrace.costmodels.timing.utilization import (
    TileTerms as TileTerms,
    matrix_engine as matrix_engine,
)
