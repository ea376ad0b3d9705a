from rooftrace.tracer.collectives import marks as marks
from rooftrace.tracer.collectives.records import (
    Collective as Collective,
    Group as Group,
    axis_of as axis_of,
    replicas_of as replicas_of,
)
