from rooftrace.costmodels.fusion.finished import (
    larger_groups as larger_groups,
)
from rooftrace.costmodels.fusion.grouping import (
    fuse as fuse,
)
from rooftrace.costmodels.fusion.groups import (
    FusionGroup as FusionGroup,
)
from rooftrace.costmodels.fusion.joins import (
    JOINS as JOINS,
    fusion as fusion,
)
from rooftrace.costmodels.fusion.kernels import (
    Kernel as Kernel,
)
from rooftrace.costmodels.fusion.layouts import (
    has_channels_last as has_channels_last,
    keeps_channels_last as keeps_channels_last,
    weight_shape as weight_shape,
)
from rooftrace.costmodels.fusion.runs import (
    kernel_modules as kernel_modules,
    missing as missing,
    resting_shares as resting_shares,
    segments as segments,
)
from rooftrace.costmodels.fusion.traffic import (
    bytes_by_role as bytes_by_role,
    compulsory_bytes as compulsory_bytes,
    group_costs as group_costs,
    storage_sizes as storage_sizes,
)
