from rooftrace.costmodels.allocating.caching import (
    CachingAllocator as CachingAllocator,
)
from rooftrace.costmodels.allocating.replaying import (
    program as program,
)
from rooftrace.costmodels.allocating.reserving import (
    Reserved as Reserved,
    reserve as reserve,
)
