"""Arguments by the parameters of a module's forward: their names, their values, a cache."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rooftrace.errors import RequestError
from rooftrace.tracer.dtypes import torch_dtype
from rooftrace.tracer.graph import GraphError
from rooftrace.tracer.tensors import parameters_of, tensors_in
from rooftrace.tracer.twins import twin
from rooftrace.tracer.values import META, REAL_VALUE, Values, marks


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
    elif (mask := marks.mask_of(tensor)) is not None:
        values.learn(tensor, mask)
    if marks.UNIFORM in tensor.__dict__:
        values.uniform.learn_classes(tensor, tensor.__dict__[marks.UNIFORM])


# -- inputs of a shape -----------------------------------------------------------------------------

_MOST_BYTES = (1 << 63) - 1
"""Bytes of a tensor that torch can count."""

MOST_DRAWN = 1 << 25
"""Whole numbers of an input that are drawn (256 MiB).  Of a larger one only sizes are known."""

_SEED = 0


def drawn(shape: tuple[int, ...], dtype: torch.dtype, first: int, end: int) -> Tensor:
    """Whole numbers from `first` to below `end`, by a fixed seed."""
    unknown = sized(shape, dtype)
    if math.prod(shape) > MOST_DRAWN:
        return unknown
    generator = torch.Generator().manual_seed(_SEED)
    return twin(torch.randint(first, end, shape, generator=generator).to(dtype))


def sized(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A meta tensor.  Raises RequestError where torch cannot count its bytes."""
    size = math.prod(max(n, 1) for n in shape) * dtype.itemsize
    if size > _MOST_BYTES:
        raise RequestError(
            f"an input of {' x '.join(map(str, shape))} numbers has {float(size):.3g} bytes; torch "
            f"counts up to {_MOST_BYTES:.3g}: ask for smaller sizes"
        )
    return torch.empty(shape, dtype=dtype, device=META)


def parsed_inputs(texts: Mapping[str, str]) -> dict[str, Tensor]:
    """Meta tensors for "8,3,224,224:fp32"; integers are zeros and ones.  Raises RequestError."""
    return {name: _parsed(name, text) for name, text in texts.items()}


def _parsed(name: str, text: str) -> Tensor:
    shape_text, _, dtype_text = text.partition(":")
    try:
        shape = tuple(int(n) for n in shape_text.replace("x", ",").split(",") if n.strip())
        if any(not 0 <= n <= _MOST_BYTES for n in shape):
            raise ValueError(shape)
    except ValueError:
        raise RequestError(
            f"--input {name}={text:.60}: expected SHAPE:DTYPE, for example {name}=8,3,224,224:fp32"
        ) from None
    try:
        dtype = torch_dtype(dtype_text or "fp32")
    except GraphError as error:
        raise RequestError(f"--input {name}={text}: {error}") from None
    return made_input(shape, dtype)


def made_input(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A meta tensor of a shape; whole numbers are zeros and ones."""
    if dtype.is_floating_point or dtype.is_complex:
        return sized(shape, dtype)
    return drawn(shape, dtype, 0, 2)
