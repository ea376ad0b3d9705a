from rooftrace.graph import (
    assumptions as assumptions,
    graph as graph,
    marks as marks,
    records as records,
)
from rooftrace.graph.file import (
    GraphFileError as GraphFileError,
    decoded_graph as decoded_graph,
    graphs_bytes as graphs_bytes,
    load_graphs as load_graphs,
    looks_saved as looks_saved,
    save_graphs as save_graphs,
)
from rooftrace.graph.graph import OpGraph as OpGraph
from rooftrace.graph.records import (
    LOWER_BOUND as LOWER_BOUND,
    PARTS as PARTS,
    REVERSED as REVERSED,
    ROLES as ROLES,
    UNRECORDED as UNRECORDED,
    Argument as Argument,
    Assumption as Assumption,
    Collective as Collective,
    GraphError as GraphError,
    Group as Group,
    Neighbour as Neighbour,
    Op as Op,
    Ref as Ref,
    Repeat as Repeat,
    Tensor as Tensor,
    axis_of as axis_of,
    in_order as in_order,
    pattern_of as pattern_of,
    references as references,
    refs as refs,
    replicas_of as replicas_of,
    split as split,
)
