from rooftrace.tracer.graph.graph import (
    OpGraph as OpGraph,
)
from rooftrace.tracer.graph.records import (
    Assumption as Assumption,
    GraphError as GraphError,
    Op as Op,
    Repeat as Repeat,
    Tensor as Tensor,
)
