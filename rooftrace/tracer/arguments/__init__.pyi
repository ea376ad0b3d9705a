from rooftrace.tracer.arguments.operands import (
    Argument as Argument,
    Neighbour as Neighbour,
    Ref as Ref,
    in_order as in_order,
    references as references,
    refs as refs,
)
