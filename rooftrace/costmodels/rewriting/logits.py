"""x."""
from rooftrace.tracer.graph import OpGraph

def last_logits(graph: OpGraph) -> tuple[OpGraph, int]:
    """x."""
    return graph, 0
