from rooftrace.costmodels.traffic import layouts as layouts
from rooftrace.costmodels.traffic.moved import (
    access_scales as access_scales,
    bytes_by_role as bytes_by_role,
    compulsory_bytes as compulsory_bytes,
    group_costs as group_costs,
    storage_sizes as storage_sizes,
)
from rooftrace.costmodels.traffic.wide_stores import (
    stored_wide as stored_wide,
)
