"""Collectives between processes: how a call names its group, and how many are in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

_WRITTEN = frozenset(("output", "outputs", "output_tensor", "output_tensors", "output_lists"))
_BOTH = frozenset(("tensors",))
"""What a collective reads and overwrites (allreduce_), or receives (recv_)."""
_SENDS = frozenset(("send",))
_NAMES = ("group_name", "group", "process_group")
"""What schemas call the group: a name, or the group itself."""


@cache
def _places(func: Any) -> tuple[tuple[int, str], ...]:
    schema = getattr(func, "_schema", None)
    arguments = () if schema is None else schema.arguments
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(arguments)
        if argument.name in _NAMES or "ProcessGroup" in str(argument.type)
    )


def is_collective(func: Any) -> bool:
    """Whether an op takes a process group: what it makes depends on other processes' tensors."""
    return bool(_places(func))


def written(func: Any) -> tuple[tuple[int, str], ...]:
    """Positions and names of what an op of c10d writes, of which its schema says nothing."""
    schema = getattr(func, "_schema", None)
    if schema is None or func.namespace != "c10d" or not is_collective(func):
        return ()
    sends = "input" in " ".join(a.name for a in schema.arguments) or func._opname in _SENDS
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.name in _WRITTEN or (argument.name in _BOTH and not sends)
    )


def group_size(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """How many processes are in the group of a collective; None where nobody knows."""
    for position, name in _places(func):
        size = _size(args[position] if position < len(args) else kwargs.get(name))
        if size is not None:
            return size
    return None


def _size(group: Any) -> int | None:
    """The size of a group, or of the group of a name."""
    import torch.distributed as dist

    if not dist.is_available() or group is None:
        return None
    try:
        if isinstance(group, str):
            from torch._C import _distributed_c10d

            resolve: Any = _distributed_c10d._resolve_process_group
            group = resolve(group)
        elif not isinstance(group, dist.ProcessGroup):  # as TorchScript sees it
            group = dist.ProcessGroup.unbox(group)
        return int(group.size())
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError):
        return None  # no such group is there any more
