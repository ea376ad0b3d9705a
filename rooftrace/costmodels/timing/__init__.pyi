from rooftrace.costmodels.timing import (
    exchanges as exchanges,
    queue as queue,
    steps as steps,
    steptimes as steptimes,
    streams as streams,
    timings as timings,
)
