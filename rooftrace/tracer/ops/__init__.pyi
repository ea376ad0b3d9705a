from rooftrace.tracer.ops import groups as groups, traits as traits
from rooftrace.tracer.ops.calls import (
    Call as Call,
    info_of as info_of,
    written_nodes as written_nodes,
)
from rooftrace.tracer.ops.registered import (
    registered_ops as registered_ops,
)
