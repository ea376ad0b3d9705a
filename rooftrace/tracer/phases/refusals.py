"""Modules that cannot be traced, each refused with its reason and what to do."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from rooftrace.errors import RequestError
from rooftrace.tracer.sharded import fsdp
from rooftrace.tracer.source import TraceError
from rooftrace.tracer.tensors import own_tensors

_DEEP = 64
"""A tree of modules of this depth may be why Python's stack of calls was too short."""
LIMIT_OF_C_IS_FIXED = sys.version_info[:2] == (3, 12)
"""Whether Python limits calls that pass through C by a number that nobody can change."""
_FRAMES = 20
"""Calls of Python on its stack for each module of a chain, at most: in a copy, and in a trace."""


def check_traceable(root: nn.Module, inputs: Sequence[Tensor] = ()) -> None:
    """Raise RequestError for fake tensors, and for real ones that `fully_shard` has sharded."""
    if fsdp.is_real(root):
        raise RequestError(
            f"{type(root).__name__} holds real weights that fully_shard has sharded, and cannot be "
            "copied: build it under `with torch.device('meta'):`, call fully_shard, pass that"
        )
    for path, module in root.named_modules():
        where = f" (in {path!r:.80})" if path else ""
        for tensor in own_tensors(module):
            if isinstance(tensor, FakeTensor):
                raise RequestError(
                    f"{type(module).__name__} has tensors of a FakeTensorMode{where}: build it "
                    "under `with torch.device('meta'):`"
                )
    for tensor in inputs:
        if isinstance(tensor, FakeTensor):
            raise RequestError(
                f"an input {list(tensor.shape)} is a tensor of a FakeTensorMode: pass "
                "`torch.empty(SHAPE, device='meta')`, or a real one"
            )


@contextlib.contextmanager
def depth_explained(root: Any) -> Iterator[None]:
    """Inside, a module too deep for Python's stack of calls raises a RequestError that says so."""
    try:
        yield
    except (RecursionError, TraceError) as error:
        causes: list[BaseException | None] = [error, error.__cause__, error.__context__]
        depth = _depth(root) if isinstance(root, nn.Module) else 0
        if depth < _DEEP or not any(isinstance(cause, RecursionError) for cause in causes):
            raise
    else:
        return
    limit = sys.getrecursionlimit()
    what = f"{type(root).__name__} has modules inside modules, {depth:,} deep"
    if LIMIT_OF_C_IS_FIXED:
        raise RequestError(
            f"{what}: more calls through C than Python 3.12 ever stacks; use another release of it"
        )
    raise RequestError(
        f"{what}: more calls than Python stacks ({limit:,}); call "
        f"sys.setrecursionlimit({max(depth * _FRAMES, 2 * limit)}) before"
    )


def _depth(root: nn.Module) -> int:
    """The length of the longest chain of modules inside modules."""
    depth, level, seen = 0, [root], {id(root)}
    while level:
        inner = [child for module in level for child in module._modules.values()]
        level = [child for child in inner if child is not None and id(child) not in seen]
        seen.update(map(id, level))
        depth += 1
    return depth
