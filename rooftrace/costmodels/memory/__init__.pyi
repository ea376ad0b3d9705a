from rooftrace.costmodels.memory.batches import (
    LargestBatch as LargestBatch,
    largest as largest,
)
from rooftrace.costmodels.memory.footprint import (
    KINDS as KINDS,
    SAVED as SAVED,
    Held as Held,
    Memory as Memory,
    Moment as Moment,
    memory as memory,
)
from rooftrace.costmodels.memory.liveness import (
    Steps as Steps,
)
