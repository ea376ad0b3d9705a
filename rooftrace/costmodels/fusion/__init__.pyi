from rooftrace.costmodels.fusion import runs as runs
from rooftrace.costmodels.fusion.finished import (
    beyond as beyond,
)
from rooftrace.costmodels.fusion.grouping import (
    fuse as fuse,
)
from rooftrace.costmodels.fusion.groups import (
    FusionGroup as FusionGroup,
)
from rooftrace.costmodels.fusion.joins import (
    fusion as fusion,
)
from rooftrace.costmodels.fusion.kernels import (
    KernelView as KernelView,
)
