from rooftrace.costmodels.memory.batches import (
    LargestBatch as LargestBatch,
    largest as largest,
)
from rooftrace.costmodels.memory.footprint import (
    Held as Held,
    Memory as Memory,
    Moment as Moment,
    memory as memory,
)
