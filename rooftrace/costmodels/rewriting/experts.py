"""x."""
from rooftrace.tracer.graph import OpGraph

def route_experts(graph: OpGraph) -> tuple[OpGraph, int]:
    """x."""
    return graph, 0
