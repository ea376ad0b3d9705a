"""Weights that a checkpoint holds, and the class of its model does not build."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from rooftrace.hardware.precisions import storage_bytes
from rooftrace.hardware.units import format_count, format_traffic
from rooftrace.tracer.targets.quantization import Declared, forms_of_copy

_PREDICTORS = re.compile(r"num_nextn_predict_layers|(num_|n_)?mtp_(num_)?(hidden_)?layers")
"""Fields with the number of layers that predict further tokens (DeepSeek-V3, section 2.2)."""
_BUILT = re.compile(r"(^|[._])(mtp|nextn)")


def unbuilt(data: Mapping[str, Any], module: nn.Module, declared: Sequence[Declared]) -> str:
    """A sentence on layers for further tokens that a config counts and a module lacks; "" without.

    Each is taken to be as large as the largest layer of the longest stack, with a projection of two
    hidden states to one, in the formats that `declared` gives a module of its name: checkpoints
    call it the next layer of the stack, or mtp.layers.0.  Some hold tables of embeddings of its own
    beside it, which no config says: a second number has them.
    """
    counted = next(_counted(data, ""), None)
    if counted is None or any(_BUILT.search(path) for path, _ in module.named_modules()):
        return ""
    where, count = counted
    stacks = [
        (path, m) for path, m in module.named_modules() if isinstance(m, nn.ModuleList) and len(m)
    ]
    if not stacks:
        return ""
    path, stack = max(stacks, key=lambda each: len(each[1]))
    params, size, layer = max(
        (*_size(layer, {}), f"{path}.{name}") for name, layer in stack.named_children()
    )
    names = [f"{path}.{len(stack)}", "mtp.layers.0"]
    params, size = _size(module.get_submodule(layer), forms_of_copy(module, declared, layer, names))
    tables = [_table(module, "get_input_embeddings"), _table(module, "get_output_embeddings")]
    hidden = max((t.shape[-1] for t in tables if t is not None), default=0)
    element = next((t.element_size() for t in tables if t is not None), 2)
    params, size = params + 2 * hidden**2, size + 2 * hidden**2 * element
    own = sum(t.numel() for t in tables if t is not None)
    whole = format_traffic(count * (size + own * element))
    more = f", or {whole} where they have embeddings and an output head of their own"
    return (
        f"{where} is {count}: the checkpoint also holds layers that predict further tokens, which "
        f"{type(module).__name__} does not build; they are not counted: about "
        f"{format_count(count * params)} parameters, {format_traffic(count * size)}"
        + (more if own else "")
    )


def _counted(data: Mapping[str, Any], place: str) -> Iterator[tuple[str, int]]:
    for name, value in data.items():
        if isinstance(value, Mapping):
            yield from _counted(value, f"{place}{name}.")
        elif _PREDICTORS.fullmatch(name) and type(value) is int and value > 0:
            yield f"{place}{name}", value


def _table(module: nn.Module, getter: str) -> nn.Parameter | None:
    weight = getattr(getattr(module, getter, lambda: None)(), "weight", None)
    return weight if isinstance(weight, nn.Parameter) else None


def _size(layer: nn.Module, forms: Mapping[int, str]) -> tuple[int, int]:
    """Parameters of a layer, and their bytes in these formats, by the id of a tensor."""
    params = size = 0
    for tensor in layer.parameters():
        params += tensor.numel()
        form = forms.get(id(tensor))
        bytes_here = tensor.numel() * tensor.element_size()
        size += bytes_here if form is None else storage_bytes(form, tensor.numel())
    return params, size
