from rooftrace.costmodels.memory.allocator import (
    CachingAllocator as CachingAllocator,
    program as program,
)
from rooftrace.costmodels.memory.footprint import (
    KINDS as KINDS,
    OPTIMIZERS as OPTIMIZERS,
    Held as Held,
    Memory as Memory,
    Moment as Moment,
    memory as memory,
)
from rooftrace.costmodels.memory.lives import Visits as Visits
from rooftrace.costmodels.memory.reserving import (
    LargestBatch as LargestBatch,
    Reserved as Reserved,
    largest as largest,
    reserve as reserve,
)
