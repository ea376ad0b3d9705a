"""Our names of torch's dtypes, and back."""

from __future__ import annotations

import functools

import torch

from rooftrace.hardware.precisions import PrecisionError, precision
from rooftrace.tracer.graph import GraphError

_PREFERRED = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Of several dtypes with one name, these are what the name means."""


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Our name of a torch dtype ("bf16"); one without a name is so many bits of integer."""
    try:
        return precision(str(dtype)).name
    except PrecisionError:
        return f"uint{8 * dtype.itemsize}"


@functools.cache
def _by_name() -> dict[str, torch.dtype]:
    every = {item for item in vars(torch).values() if isinstance(item, torch.dtype)}
    named = [d for d in every if not str(d).startswith(("torch.q", "torch.bits"))]
    ordered = sorted(named, key=lambda dtype: (dtype in _PREFERRED, str(dtype)))
    return {**{dtype_name(dtype): dtype for dtype in ordered}, "fp8": torch.float8_e4m3fn}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of one of our names, or of torch's own.

    Raises GraphError for a name that no dtype has (nvfp4, or a misspelling).
    """
    try:
        return _by_name()[precision(name).name]
    except (KeyError, PrecisionError):
        names = ", ".join(sorted(_by_name()))
        raise GraphError(f"{name!r} has no torch dtype; these have: {names}") from None
