from rooftrace.measured.groups.timing import (
    GroupMeasureError as GroupMeasureError,
    measure_collectives as measure_collectives,
    time_ops as time_ops,
)
