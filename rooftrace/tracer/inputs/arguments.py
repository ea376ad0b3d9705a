"""Arguments by the parameters of a module's forward: their names, their values, a cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rooftrace.errors import RequestError
from rooftrace.tracer.dtypes import torch_dtype
from rooftrace.tracer.graph import GraphError
from rooftrace.tracer.tensors import parameters_of, tensors_in
from rooftrace.tracer.values import REAL_VALUE, Values, marks


def cache_arguments(module: nn.Module) -> set[str]:
    """Names of the arguments by which a module could take a cache.

    Only a run shows whether it does: an output with such a name is passed to the next call.
    """
    parameters = parameters_of(module).values()
    return {parameter.name for parameter in parameters if parameter.default is None}


def named_inputs(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors among the arguments of a call, by the names that a graph has for them."""
    names = [
        n
        for n, p in parameters_of(module).items()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    labels = [*names[: len(args)], *(f"input_{i}" for i in range(len(names), len(args)))]
    for label, item in (*zip(labels, args, strict=True), *kwargs.items()):
        tensors = tensors_in(item)
        for index, tensor in enumerate(tensors):
            yield (label if len(tensors) == 1 else f"{label}_{index}"), tensor


def floating_input(model: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """A meta tensor of this shape in the precision of the model's first floating parameter."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return torch.empty(shape, dtype=dtype, device="meta")


def typed_input(shape: tuple[int, ...], dtype: Any) -> Tensor:
    """A meta tensor of this shape.  dtype: torch's, or a name, ours or torch's ("bf16", "int64").

    Raises RequestError for a dtype that there is not.
    """
    if not isinstance(dtype, (torch.dtype, str)):
        raise RequestError(f"dtypes: expected torch.float16 or 'fp16' and the like, got {dtype!r}")
    try:
        known = dtype if isinstance(dtype, torch.dtype) else torch_dtype(dtype)
    except GraphError as error:
        raise RequestError(f"dtypes: {error}") from None
    return torch.empty(shape, dtype=known, device="meta")


def learn(values: Values, tensor: Tensor) -> None:
    """Tell a recorder's values what is known of a tensor."""
    value = tensor.__dict__.get(REAL_VALUE)
    if value is not None:
        values.learn(tensor, value.clone())
    if marks.UNIFORM in tensor.__dict__:
        values.learn_draw(tensor, tensor.__dict__[marks.UNIFORM])
