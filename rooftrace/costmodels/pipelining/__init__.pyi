from rooftrace.costmodels.pipelining.pipes import Pipe as Pipe
from rooftrace.costmodels.pipelining.stages import (
    Pipelined as Pipelined,
    StageCost as StageCost,
    pipelined as pipelined,
)
from rooftrace.costmodels.pipelining.walking import (
    live_microbatches as live_microbatches,
    walk_table as walk_table,
)
