"""Weights that a checkpoint holds, and the class of its model does not build."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from rooftrace.hardware.precisions import storage_bytes
from rooftrace.hardware.units import format_count, format_traffic
from rooftrace.tracer.values import marks

_PREDICTORS = re.compile(r"num_nextn_predict_layers|(num_|n_)?mtp_(num_)?(hidden_)?layers")
"""Fields with the number of layers that predict further tokens (DeepSeek-V3, section 2.2)."""
_BUILT = re.compile(r"(^|[._])(mtp|nextn)")


def unbuilt(data: Mapping[str, Any], module: nn.Module) -> str:
    """A sentence on layers for further tokens that a config counts and a module lacks; "" without.

    Each is taken to be as large as the largest layer of the longest stack, in its formats.
    """
    found = next(_counted(data, ""), None)
    if found is None or any(_BUILT.search(path) for path, _ in module.named_modules()):
        return ""
    where, count = found
    stacks = [m for m in module.modules() if isinstance(m, nn.ModuleList) and len(m)]
    if not stacks:
        return ""
    layers = [_size(layer) for layer in max(stacks, key=len)]
    params, size = max(layers)
    return (
        f"{where} is {count}: the checkpoint also holds layers that predict further tokens, which "
        f"{type(module).__name__} does not build; they are not counted: about "
        f"{format_count(count * params)} parameters, {format_traffic(count * size)}"
    )


def _counted(data: Mapping[str, Any], place: str) -> Iterator[tuple[str, int]]:
    for name, value in data.items():
        if isinstance(value, Mapping):
            yield from _counted(value, f"{place}{name}.")
        elif _PREDICTORS.fullmatch(name) and type(value) is int and value > 0:
            yield f"{place}{name}", value


def _size(layer: nn.Module) -> tuple[int, int]:
    """Parameters of a layer, and their bytes as they are stored."""
    params = size = 0
    for part in layer.modules():
        declared = vars(part).get(marks.STORED, {})
        for name, tensor in part._parameters.items():
            if tensor is not None:
                params += tensor.numel()
                form = declared.get(name)
                bytes_here = tensor.numel() * tensor.element_size()
                size += bytes_here if form is None else storage_bytes(form, tensor.numel())
    return params, size
