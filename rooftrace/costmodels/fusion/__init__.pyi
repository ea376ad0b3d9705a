from rooftrace.costmodels.fusion import runs as runs, traffic as traffic
from rooftrace.costmodels.fusion.grouping import fuse as fuse
from rooftrace.costmodels.fusion.joins import fusion as fusion
from rooftrace.costmodels.fusion.kernels import KernelView as KernelView
from rooftrace.costmodels.fusion.partition import FusionGroup as FusionGroup, beyond as beyond
from rooftrace.costmodels.fusion.traffic import (
    bytes_by_role as bytes_by_role,
    storage_sizes as storage_sizes,
)
