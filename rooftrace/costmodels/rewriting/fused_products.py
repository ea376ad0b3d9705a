"""x."""
from rooftrace.tracer.graph import OpGraph

def fuse_qkv(graph: OpGraph) -> tuple[OpGraph, int]:
    """x."""
    return graph, 0
def fuse_gate_up(graph: OpGraph) -> tuple[OpGraph, int]:
    """x."""
    return graph, 0
