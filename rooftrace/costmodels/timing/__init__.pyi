from rooftrace.costmodels.timing import (
    queue as queue,
    steps as steps,
    streams as streams,
    timings as timings,
)
from rooftrace.costmodels.timing.collectives import (
    collective_seconds as collective_seconds,
    expert_exchange_seconds as expert_exchange_seconds,
    level_bytes as level_bytes,
    link_seconds as link_seconds,
    per_rank_link_bytes as per_rank_link_bytes,
    steps_of as steps_of,
)
from rooftrace.costmodels.timing.pipelines import (
    Pipe as Pipe,
    StageCost as StageCost,
    live_microbatches as live_microbatches,
    pipelined as pipelined,
    walk_table as walk_table,
)
