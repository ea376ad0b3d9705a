from rooftrace.costmodels.traffic import (
    layouts as layouts,
    moved as moved,
)
from rooftrace.costmodels.traffic.moved import (
    bytes_by_role as bytes_by_role,
    storage_sizes as storage_sizes,
)
from rooftrace.costmodels.traffic.wide_stores import (
    stored_wide as stored_wide,
)
