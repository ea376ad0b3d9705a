"""Known values that processes exchange where one of them is run and the others are not there.

Every process is taken to hold the same values: a sum over them is the value times their number, a
maximum is the value.  What ops of the fake process group leave in real memory is set right, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rooftrace.tracer.collectives import Collective, Group
from rooftrace.tracer.ops import Call, groups
from rooftrace.tracer.sharded import meshes
from rooftrace.tracer.tape import Tape, records
from rooftrace.tracer.tensors import trees
from rooftrace.tracer.values.marks import Known, small

SAME = "every process is taken to hold the same values as this one"
_OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")
"""Reductions in the order of torch's numbers for them."""
_IN_PLACE = ("all_reduce", "broadcast", "reduce")
_FOLLOWED = frozenset((*_IN_PLACE, "all_gather", "reduce_scatter", "gather", "scatter"))


def before_exchange(tape: Tape, call: Call) -> list[Known] | None:
    """The values that a collective sends, where all are known; None for any other op."""
    if not meshes.running or not groups.is_collective(call.func):
        return None
    kind = groups.kind_of(call.func)
    if kind not in _FOLLOWED:
        return None
    written = {id(tensor) for tensor in call.written()}
    sent = [t for t in call.tensors if kind in _IN_PLACE or id(t) not in written]
    if not sent or any(t.is_floating_point() and not small(t) and t.is_meta for t in sent):
        return None
    entries = [tape.values.known(tensor) for tensor in sent]
    if any(entry is None for entry in entries):
        return None
    return [Known(e.value.detach().clone(), e.taint, e.epoch) for e in entries if e is not None]


def after_exchange(
    tape: Tape,
    call: Call,
    outputs: Sequence[Tensor],
    sent: list[Known] | None,
    together: tuple[Collective, Group] | None,
) -> frozenset[int]:
    """Learn what a collective brings; returns the assumptions that it rests on."""
    if sent is None or together is None:
        return records.NO_TAINT
    kind, ranks = together[0].kind, together[1].ranks
    if len(ranks) < 2:
        made = call.written() or list(outputs)
        values: list[Tensor] | None = [entry.value for entry in sent]
    else:
        made = call.written() or list(outputs)
        own = own_place(ranks)
        values = _values(kind, _reduction(call), [e.value for e in sent], made, len(ranks), own)
    if values is None:
        return records.NO_TAINT
    taint: frozenset[int] = frozenset().union(*(entry.taint for entry in sent))
    if kind not in ("broadcast", "scatter"):
        taint |= {tape.values.assume("ranks", f"{kind}: {SAME}")}
    for tensor, value in zip(made, values, strict=False):
        if value.numel() != tensor.numel():
            continue
        value = value.reshape(tensor.shape).to(tensor.dtype)
        if tensor.device.type == "cpu":
            with torch.no_grad():
                tensor.copy_(value)
        elif small(tensor):
            tape.values.learn(tensor, value, taint)
    return taint


def exchanged_on_host(tape: Tape, call: Call) -> Any:
    """Run a collective on real tensors of the host; its results are as `after_exchange` says."""
    sent = before_exchange(tape, call)
    out = call.func(*call.args, **call.kwargs)
    outputs = [out] if isinstance(out, Tensor) else trees.listed(out)
    tensors = [item for item in outputs if isinstance(item, Tensor)]
    together = groups.communicates(call.func, call.args, call.kwargs, tensors)
    after_exchange(tape, call, tensors, sent, together)
    return out


def own_place(ranks: tuple[int, ...]) -> int:
    """The place of the traced process in a group."""
    import torch.distributed as dist

    return ranks.index(dist.get_rank()) if dist.get_rank() in ranks else 0


def _reduction(call: Call) -> str:
    """What a collective does with the values of the processes; "" where torch does not say."""
    reduction: Any = call.named.get("reduce_op")
    if isinstance(reduction, str):
        return reduction.lower()
    number = reduction.op() if hasattr(reduction, "op") else -1
    return _OPS[number] if 0 <= number < len(_OPS) else ""


def _values(
    kind: str, reduction: str, sent: list[Tensor], made: list[Tensor], ranks: int, own: int
) -> list[Tensor] | None:
    """The values of the tensors that a collective makes; None where they are unknown."""
    if kind == "broadcast":
        return sent
    if kind in ("all_reduce", "reduce"):
        reduced = [_reduced(value, reduction, ranks) for value in sent]
        return None if any(value is None for value in reduced) else reduced  # type: ignore[return-value]
    if kind in ("all_gather", "gather"):
        if len(sent) == len(made):
            return [torch.cat([value.reshape(-1)] * ranks) for value in sent]
        return [value for value in sent for _ in range(ranks)]
    if kind == "scatter":
        return [sent[own]] if len(sent) == ranks else None
    whole = [value.reshape(ranks, -1)[own] for value in sent] if len(sent) == len(made) else None
    if whole is None:
        whole = [sent[own]] if len(sent) == ranks else []
    reduced = [_reduced(value, reduction, ranks) for value in whole]
    return None if any(value is None for value in reduced) else reduced  # type: ignore[return-value]


def _reduced(value: Tensor, reduction: str, ranks: int) -> Tensor | None:
    """What so many equal values become."""
    if reduction == "sum":
        return value if value.dtype is torch.bool else value * ranks
    if reduction == "product":
        return value**ranks
    if reduction == "bxor":
        return value if ranks % 2 else torch.zeros_like(value)
    return value if reduction in _OPS else None
