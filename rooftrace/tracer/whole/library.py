"""The library of our own operators, `torch.ops.rooftrace`, and what their kernels share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

Library: Any = torch.library.Library
_library = Library("rooftrace", "DEF")
OPS: Any = torch.ops.rooftrace


def define(schema: str, **kernels: Callable[..., Any]) -> None:
    """Add an operator of ours, with its kernels by dispatch key ("Meta", "CPU").

    The kernel of the CPU also tells the sizes on meta, unless there is one for that: it would loop
    over tokens, or look at values.
    """
    _library.define(schema)
    for device, kernel in {"Meta": kernels.get("CPU"), **kernels}.items():
        _library.impl(schema.partition("(")[0], kernel, device)


@contextlib.contextmanager
def differentiable() -> Iterator[None]:
    """Inside, autograd follows ops, also where a dispatch mode asks for a value: it runs below."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView):
        excluded -= torch._C.DispatchKeySet(key)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield
