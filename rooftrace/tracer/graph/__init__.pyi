from rooftrace.tracer.graph.expand import (
    REVERSED as REVERSED,
    made_in_reverse as made_in_reverse,
    numbered as numbered,
)
from rooftrace.tracer.graph.graph import (
    LOWER_BOUND as LOWER_BOUND,
    PARTS as PARTS,
    ROLES as ROLES,
    UNRECORDED as UNRECORDED,
    Argument as Argument,
    Assumption as Assumption,
    GraphError as GraphError,
    Neighbour as Neighbour,
    Op as Op,
    OpGraph as OpGraph,
    Ref as Ref,
    Repeat as Repeat,
    Tensor as Tensor,
    contiguous as contiguous,
    in_order as in_order,
    moved as moved,
    pattern_of as pattern_of,
    references as references,
    refs as refs,
    renumbered as renumbered,
    split as split,
)
from rooftrace.tracer.graph.graphfile import (
    GraphFileError as GraphFileError,
    graphs_bytes as graphs_bytes,
    load_graphs as load_graphs,
    looks_saved as looks_saved,
    save_graphs as save_graphs,
    write_bytes as write_bytes,
)
from rooftrace.tracer.graph.precisions import (
    dtype_name as dtype_name,
    torch_dtype as torch_dtype,
)
from rooftrace.tracer.graph.rebuild import (
    to_fx as to_fx,
    written as written,
)
