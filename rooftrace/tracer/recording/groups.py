"""Collectives between processes: how a call names its group, and how many are in it."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any

import torch

from rooftrace.graph import Collective, Group
from rooftrace.hardware.systems.records import COLLECTIVES
from rooftrace.tracer import torch_private
from rooftrace.tracer.recording.overrides import original_of, replaced
from rooftrace.tracer.values import dtype_name

_WRITTEN = frozenset(("output", "outputs", "output_tensor", "output_tensors", "output_lists"))
_BOTH = frozenset(("tensors",))
"""Arguments that a collective reads and overwrites (allreduce_), or receives (recv_)."""
_SENDS = frozenset(("send",))
_NAMES = ("group_name", "group", "process_group")
"""Names of the group in schemas: an argument has its name, or the group itself."""


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
    """Whether an op takes a process group: its results depend on other processes' tensors."""
    return bool(_places(func))


def kind_of(func: Any) -> str:
    """The kind of a collective, in the words of nccl; "" for any other op."""
    return _KINDS.get(func._opname, "") if is_collective(func) else ""


def written(func: Any) -> tuple[tuple[int, str], ...]:
    """Arguments (position, name) that an op of c10d or FSDP writes, where its schema is silent."""
    if (func.namespace, func._opname) == ("fsdp", "all_gather_copy_in"):
        return ((1, "all_gather_output"),)
    schema = getattr(func, "_schema", None)
    if schema is None or func.namespace != "c10d" or not is_collective(func):
        return ()
    sends = "input" in " ".join(a.name for a in schema.arguments) or func._opname in _SENDS
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.name in _WRITTEN or (argument.name in _BOTH and not sends)
    )


def communicates(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[torch.Tensor]
) -> tuple[Collective, Group] | None:
    """The exchange of a call, and its group; None for an op that works alone, or whose
    group nobody knows any more.  outputs: the tensors that it returned."""
    positions = _places(func)
    kind = _KINDS.get(func._opname)
    if not positions or kind is None:
        return None
    values = _named(func, args, kwargs)
    members = next((g for g in (_ranks(values.get(name)) for _, name in positions) if g), None)
    if members is None:
        return None
    name, ranks = members
    peer = values.get("dst", values.get("src")) if kind in ("send", "recv") else None
    splits = values.get("input_split_sizes", values.get("input_splits")) or ()
    told = [member for member, rows in zip(ranks, splits, strict=False) if rows]
    if kind == "all_to_all" and len(told) == 1 < len(ranks):  # a step around a ring
        kind, peer, splits = "send", told[0], ()
    collective = Collective(
        kind=kind,
        group=name,
        bytes=_buffer_bytes(func, kind, values, len(ranks), outputs),
        dtype=_precision(values),
        waits=_waits(func, values),
        splits=tuple(map(int, splits)) if len(set(splits)) > 1 else (),
        peer=None if peer is None else int(peer),
    )
    return collective, Group(ranks)


_KINDS = {
    op.partition(".")[2]: kind.name
    for kind in COLLECTIVES.values()
    for op in (*kind.torch, *kind.variants)
}
"""The kinds of torch's collectives, by the name of the op without its namespace."""


def _named(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, defaults included."""
    values = {}
    for place, argument in enumerate(func._schema.arguments):
        if place < len(args):
            values[argument.name] = args[place]
        elif argument.name in kwargs:
            values[argument.name] = kwargs[argument.name]
        elif argument.has_default_value():
            values[argument.name] = argument.default_value
    return values


def _buffer_bytes(
    func: Any,
    kind: str,
    values: Mapping[str, Any],
    ranks: int,
    outputs: Sequence[torch.Tensor],
) -> int:
    """Bytes of the full buffer of a collective (see `Collective`)."""
    if "matmul_reduce_scatter" in func._opname:
        return ranks * _bytes(list(outputs))  # it reduces a product that no op makes
    overwritten = {name for _, name in written(func)} | _OUTPUTS
    sent = [v for n, v in values.items() if n not in overwritten and n not in _UNSENT]
    made = [v for n, v in values.items() if n in overwritten]
    if kind == "all_gather":
        return _bytes(made) or ranks * _bytes(sent)
    return _bytes(sent) or _bytes(made)


def _waits(func: Any, values: Mapping[str, Any]) -> bool:
    """Whether the stream that issues a collective waits for it.

    Functional ones are awaited later, also where nobody calls `wait_tensor`; collectives
    of symmetric memory are kernels of the stream itself; c10d has an argument for it.
    """
    if "async_op" in values:
        return not values["async_op"]
    return func.namespace in ("symm_mem", "c10d") and _KINDS[func._opname] not in ("send", "recv")


_OUTPUTS = _WRITTEN | {"out"}
_UNSENT = frozenset(
    ("B", "Bs", "A_scale", "B_scale", "B_scales", "biases", "bias", "result_scales")
)
"""Operands of products that are not sent."""


def _bytes(values: Any) -> int:
    if isinstance(values, torch.Tensor):
        return values.numel() * values.element_size()
    return sum(map(_bytes, values)) if isinstance(values, (list, tuple)) else 0


def _precision(values: Mapping[str, Any]) -> str:
    """The precision of the first tensor among the arguments; "" where there is none."""
    stack = list(values.values())[::-1]
    while stack:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            return dtype_name(item.dtype)
        if isinstance(item, (list, tuple)):
            stack += reversed(item)
    return ""


def _ranks(group: Any) -> tuple[str, tuple[int, ...]] | None:
    """The name of a group and the ranks in it, from the group or from its name."""
    import torch.distributed as dist

    if not dist.is_available() or group is None:
        return None
    try:
        if isinstance(group, str):
            group = torch_private.resolve_process_group(group)
        elif not isinstance(group, dist.ProcessGroup):  # as TorchScript sees it
            group = dist.ProcessGroup.unbox(group)
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError):
        return None  # no such group is there any more
    try:
        return str(group.group_name), tuple(dist.get_process_group_ranks(group))
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError):
        return str(id(group)), tuple(range(group.size()))  # not one that torch registered


# -- how torch finds the sizes of results of sharded tensors ---------------------------------------

_NAME = "_propagate_tensor_meta_non_cached"
_FAKE = "_rebuild_tensor_from_dtensor_meta"
_EXCHANGE = "shard_dim_alltoall"
_NUMBER = "generate_unique_id"
"""Of an exchange on meta tensors; numbers that torch draws are up to 10 ** 9."""
_BEHIND = 10**9 + 1


@contextlib.contextmanager
def sizes_unseen() -> Iterator[None]:
    """Inside, sizes of unsharded tensors are found outside of all modes; exchanges are a GPU's."""
    with contextlib.ExitStack() as stack:
        torch_private.DYNAMO_LATER.once(
            torch_private.SHARDED, stack, partial(_sizes_unseen, stack.enter_context)
        )
        yield


def _sizes_unseen(enter: Callable[[AbstractContextManager[Any]], Any], dynamo: Any = None) -> None:
    works = sys.modules.get(torch_private.META_EXCHANGES)
    if hasattr(works, _NUMBER):  # drawn by Python's generator, as no exchange on a GPU does
        enter(replaced(works, {_NUMBER: partial(next, itertools.count(_BEHIND))}))
    home = sys.modules.get(torch_private.SHARDING_PROP)
    propagator: Any = getattr(home, "ShardingPropagator", None)
    if propagator is None or not hasattr(propagator, _NAME):
        return
    original = original_of(propagator, _NAME)

    def sizes(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch_private.disable_current_modes():
            return original(self, *args, **kwargs)

    enter(replaced(propagator, {_NAME: sizes}))
    places: Any = sys.modules["torch.distributed.tensor.placement_types"]
    if hasattr(places, _EXCHANGE):
        enter(replaced(places, {_EXCHANGE: _exchanged}))
    schema = sys.modules[torch_private.OP_SCHEMA]
    if hasattr(schema, _FAKE):
        enter(replaced(schema, {_FAKE: _on_meta}))


def forget_meshes() -> None:
    """Let DTensor find layouts anew: it takes those of an equal mesh, whose groups are gone."""
    loaded = torch_private.SHARDING_PROP in sys.modules
    if loaded and torch_private.has("clear_sharding_cache"):
        torch_private.clear_sharding_cache()
        torch_private.sharding_propagator.propagate_op_sharding.cache_clear()


def _exchanged(tensor: Any, gather_dim: int, shard_dim: int, mesh: Any, mesh_dim: int) -> Any:
    """Shards of one dimension from those of another, as on a GPU: a mesh of the CPU gathers all."""
    if not tensor.is_meta:
        places: Any = sys.modules["torch.distributed.tensor.placement_types"]
        return original_of(places, _EXCHANGE)(tensor, gather_dim, shard_dim, mesh, mesh_dim)
    name = mesh.get_group(mesh_dim).group_name
    return torch.ops._dtensor.shard_dim_alltoall(tensor, gather_dim, shard_dim, name)


def _on_meta(spec: Any) -> torch.Tensor:
    """A tensor of the size of a sharded one; its mesh may be of a device that torch lacks here."""
    meta = spec.tensor_meta
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")
