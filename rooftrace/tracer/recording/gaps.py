"""Signs that a step did work unseen by the recorder: each becomes an assumption (lower bound)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, fx, nn
from torch.utils.flop_counter import flop_registry

from rooftrace.tracer.tape import META_KEY, Entry, Tape
from rooftrace.tracer.tensors import trees


def look_for_gaps(tape: Tape, outputs: Sequence[Tensor], module: nn.Module) -> list[Tensor]:
    """The outputs of a step that can be in the graph; assumptions record the signs of a gap.

    Signs are outputs that were computed on the host, and a step that reads no weight.
    """
    kept = []
    for tensor in outputs:
        if tensor.device.type != "cpu" or tape.tags.has(tensor):
            kept.append(tensor)
        elif tensor.is_floating_point():
            label = trees.label_of(tensor)
            tape.entries.unrecorded(f"the step returns a {label} that was computed on the host")
    nodes = tape.graph.nodes
    weights = [node for node in nodes if _is_parameter(node)]
    products = (getattr(node.target, "overloadpacket", None) for node in nodes)
    idle = weights and not any(node.users for node in weights)
    empty = not (outputs and all(_was_there(tape, tensor) for tensor in outputs))
    if idle and empty and not any(packet in flop_registry for packet in products):
        tape.entries.unrecorded(f"no recorded op reads any parameter of {type(module).__name__}")
    return kept


def _was_there(tape: Tape, tensor: Tensor) -> bool:
    """Whether a tensor is an input, a weight or a known value, which no op had to make."""
    return tape.entries.entry_of(tensor) is not None or tape.values.known(tensor) is not None


def _is_parameter(node: fx.Node) -> bool:
    entry = node.meta.get(META_KEY)
    return isinstance(entry, Entry) and entry.kind == "parameter"
