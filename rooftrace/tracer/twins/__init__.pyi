from rooftrace.tracer.twins import closures as closures
from rooftrace.tracer.twins.moving import (
    Twins as Twins,
    inputs_on_meta as inputs_on_meta,
    on_meta as on_meta,
    replaced as replaced,
    twin as twin,
)
