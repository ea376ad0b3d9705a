"""Indices that an op chooses by unknown scores: topk, argmax, sort, multinomial ..."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from rooftrace.tracer.asking import assumptions
from rooftrace.tracer.ops import Call, traits
from rooftrace.tracer.tape import Tape, records
from rooftrace.tracer.tensors import trees
from rooftrace.tracer.values import marks


def route(tape: Tape, call: Call, index: Tensor, position: int) -> frozenset[int]:
    """Learn values by a policy for an index output of a call, or values from real data.

    position: the position of that output.  Returns the assumptions that the values rest on.
    """
    values = tape.values
    if index.dtype.is_floating_point:
        return records.NO_TAINT
    if values.decision(assumptions.ROUTING) is None and _as_the_data_chooses(
        tape, call, index, position
    ):
        return records.NO_TAINT
    dimension = call.named.get("dim")
    along = -1 if dimension is None else int(dimension)
    sorts = any(argument.name == "descending" for argument in call.func._schema.arguments)
    source = call.tensors[0]
    routed = values.route(call.name, source, index, along, sorts=sorts)
    return records.NO_TAINT if routed is None else frozenset([routed])


def _as_the_data_chooses(tape: Tape, call: Call, index: Tensor, position: int) -> bool:
    """Learn indices from the real tensors, as an assumption; False if they give none."""
    if index.numel() > marks.MAX_CHOSEN:
        return False
    values, exact = tape.values, {}
    for tensor in trees.listed(call.args):
        entry = values.known(tensor)
        value = values.compute(tensor) if entry is None else entry.value
        if value is None or (entry is not None and entry.taint):
            return False
        exact[id(tensor)] = value
    args, kwargs = tree_map_only(
        Tensor, lambda t: exact[id(t)], (tuple(call.args), dict(call.kwargs))
    )
    with _disable_current_modes(), torch.no_grad():
        try:
            if tape.generators is not None and traits.is_random(call.func):
                results = tape.generators.run(call.func, args, kwargs)
            else:
                results = traits.run_on_cpu(call.name, call.func, list(args), kwargs)
        except (NotImplementedError, RuntimeError):  # no kernel for a CPU, or not for these types
            return False
    values.computed += 1
    values.learn(index, trees.listed(results)[position])
    values.assume("data-routing", f"{call.name} chooses as the given weights and inputs do")
    return True
