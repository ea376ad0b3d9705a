"""Values and counts that processes exchange, and expected counts of the classes of routed rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from rooftrace.errors import RequestError
from rooftrace.graph import Collective, Group, assumptions
from rooftrace.graph.formulas import polynomials
from rooftrace.tracer.recording import groups, taperecords
from rooftrace.tracer.recording.ops import Call
from rooftrace.tracer.recording.tape import Tape
from rooftrace.tracer.recording.taperecords import META_KEY
from rooftrace.tracer.sharding import fsdp
from rooftrace.tracer.values import choices, trees
from rooftrace.tracer.values.masks import Known, small

# -- exchanged counts ------------------------------------------------------------------------------
# Counts of rows that processes tell each other before they exchange the rows: who gets how many.
#
# One process is traced, so the others' tensors are unknown.  By a policy that treats all classes
# alike each process sends as many rows to every other, and gets as many as it sends.  By one that
# prefers classes all processes prefer the same ones.

_ALIKE = ("expected", "uniform", "balanced")
"""Policies by which every class is as likely as another."""


def expect_counts_of_others(
    tape: Tape, call: Call, outputs: list[Tensor], together: tuple[Collective, Group] | None
) -> frozenset[int]:
    """Learn the counts that an all_to_all receives, where the sent counts rest on a choice.

    Returns the assumptions that they rest on.
    """
    if together is None or together[0].kind != "all_to_all" or together[1].size < 2:
        return taperecords.NO_TAINT
    sent, made = _ends(call, outputs)
    if sent is None or made is None or sent.is_floating_point() or sent.shape != made.shape:
        return taperecords.NO_TAINT
    entry = tape.values.known(sent)
    ranks = together[1].ranks
    if entry is None or sent.numel() % len(ranks) or bool((entry.value < 0).any()):
        return taperecords.NO_TAINT
    choice = _choice(tape, entry.taint, sent.numel(), len(ranks))
    if choice is None:
        return taperecords.NO_TAINT
    facts, gets, sends = _expected(tape, choice, entry.value, ranks)
    number = tape.values.assume(assumptions.ROUTING, _said(call, facts), facts["classes"], facts)
    tape.values.routed.setdefault(number, set())
    taint = entry.taint | {number}
    tape.values.learn(sent, sends, entry.taint)
    tape.values.learn(made, gets, taint)
    return taint


def _expected(
    tape: Tape, choice: Mapping[str, Any], sent: Tensor, ranks: tuple[int, ...]
) -> tuple[dict[str, Any], Tensor, Tensor]:
    """The facts of the choices of all processes, and the counts that this one gets and sends.

    Equal layers get the same tensors, so that results from them are computed once.
    """
    results = tape.values.results
    mine = own_place(ranks)
    key = ("counts of others", str(dict(choice)), str(sent.tolist()), sent.dtype, len(ranks), mine)
    kept = results.memo.get(key)
    if kept is None:
        counts = sent.reshape(len(ranks), -1)
        if choice["policy"].partition(":")[0] in _ALIKE:
            facts = _facts_alike(choice, counts)
            gets, sends = _balanced(facts, counts)
        else:
            facts = _facts_of_skewed(tape, choice, counts, mine)
            gets, sends = counts[mine].expand_as(counts).clone(), counts.clone()
        both = [counts.reshape(sent.shape).to(sent.dtype) for counts in (gets, sends)]
        kept = results.memo[key] = facts, *both
        results.shared.update(map(trees.bytes_of, both))
    return kept[0], kept[1], kept[2]


def _ends(call: Call, outputs: list[Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """The sent tensor of a call, and the one that it makes or overwrites."""
    written = call.written()
    if len(written) > 1 or len(outputs) > 1 + len(written):
        return None, None
    made = next(iter([*written, *outputs]), None)
    sent = [tensor for tensor in call.tensors if tensor is not made]
    return (sent[0], made) if len(sent) == 1 else (None, None)


def _choice(
    tape: Tape, taint: frozenset[int], counts: int, processes: int
) -> Mapping[str, Any] | None:
    """The facts of the choice that counts rest on: a count for each class, or for each process."""
    made = [tape.values.assumptions[number].facts for number in sorted(taint)]
    routed = [facts for facts in made if "policy" in facts and "processes" not in facts]
    exact = [facts for facts in routed if facts["classes"] == counts]
    if not exact and counts == processes:
        exact = [facts for facts in routed if not facts["classes"] % processes]
    return max(exact, key=lambda facts: int(facts["classes"]), default=None)


def _rows(choice: Mapping[str, Any], counts: Tensor) -> int:
    """Rows of all processes that choose: each may send a part of its rows."""
    chosen = int(choice["chosen"])
    return len(counts) * -(-int(counts.sum()) // max(chosen, 1))


def _facts_alike(choice: Mapping[str, Any], counts: Tensor) -> dict[str, Any]:
    """The choices of all processes among the classes of one: each makes 1 / processes of them."""
    processes = len(counts)
    rows, chosen = _rows(choice, counts), choice["chosen"] / processes
    classes = choice["classes"] // processes
    balanced = choice["policy"] == "balanced"
    reach = polynomials.balanced_distinct if balanced else polynomials.expected_distinct
    drawn = polynomials.balanced_distinct if balanced else polynomials.drawn_distinct
    return {
        "policy": choice["policy"],
        "rows": rows,
        "chosen": int(chosen) if chosen.is_integer() else chosen,
        "classes": classes,
        "distinct": float(reach(rows, chosen, classes)),
        "drawn": int(drawn(rows, chosen, classes)),
        "processes": processes,
        "chosen_each": choice["chosen"],
    }


def _facts_of_skewed(
    tape: Tape, choice: Mapping[str, Any], counts: Tensor, mine: int
) -> dict[str, Any]:
    """The choices of all processes among the classes of one, where some classes are likelier.

    The number of classes is the drawn one where the policy is not at hand.
    """
    processes, drawn = len(counts), int((counts[mine] > 0).sum())
    rows, classes = _rows(choice, counts), choice["classes"] // processes
    reached = float(drawn)
    try:
        decided = tape.values.decision(assumptions.ROUTING)
        policy = assumptions.policy_of(decided or choice["policy"])
        shares = choices.shares_of(policy, choice["chosen"], choice["classes"])
        if str(policy) == choice["policy"] and shares is not None:
            part = shares[mine * classes : (mine + 1) * classes]
            reached = choices.expected_distinct(rows, 1, classes, part)
    except RequestError:
        pass  # a histogram for another module
    return {
        "policy": choice["policy"],
        "rows": rows,
        "chosen": processes * float(counts[mine].sum()) / max(rows, 1),
        "classes": classes,
        "distinct": reached,
        "drawn": drawn,
        "processes": processes,
        "chosen_each": choice["chosen"],
    }


def _balanced(facts: Mapping[str, Any], counts: Tensor) -> tuple[Tensor, Tensor]:
    """Counts that a process gets from each for each class, and counts that it sends.

    As many rows come as go, a process sends as many to each, or one more, and the rows reach as
    many classes as expected.
    """
    processes, columns = counts.shape
    rows = int(counts.sum())
    reached = max(min(facts["drawn"], columns), 1)
    # Row n comes from process n * processes // rows, for the class n % reached of those reached.
    ends = -(torch.arange(processes + 1) * -rows // processes)  # where each one's rows begin
    before = (ends[:, None] - torch.arange(reached) + reached - 1) // reached  # rows of a class
    gets = torch.zeros_like(counts, dtype=torch.long)
    gets[:, torch.arange(reached) * columns // reached] = before.diff(dim=0)
    sends = (-(torch.arange(counts.numel() + 1) * -rows // counts.numel())).diff()
    return gets, sends


def _said(call: Call, facts: Mapping[str, Any]) -> str:
    likewise = "sends as many rows to each, and gets as many"
    if facts["policy"].partition(":")[0] not in _ALIKE:
        likewise = "prefers the same classes"
    text = f"{call.short_name}: each of {facts['processes']} processes {likewise}"
    return f"{text}; of all, in the classes of one, {assumptions.said_of_routing(facts)}"


# -- exchanged values ------------------------------------------------------------------------------
# Known values that processes exchange where one of them is run and the others are not there.
#
# Every process is taken to hold the same values: a sum over them is the value times their number,
# a maximum is the value.  What ops of the fake process group leave in real memory is set right,
# too.

SAME = "every process is taken to hold the same values as this one"
_OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")
"""Reductions in the order of torch's numbers for them."""
_IN_PLACE = ("all_reduce", "broadcast", "reduce")
_FOLLOWED = frozenset((*_IN_PLACE, "all_gather", "reduce_scatter", "gather", "scatter"))


def before_exchange(tape: Tape, call: Call) -> list[Known] | None:
    """The sent values of a collective, where all are known; None for any other op."""
    if not fsdp.running or not groups.is_collective(call.func):
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
    """Learn the results of a collective; returns the assumptions that they rest on."""
    if sent is None or together is None:
        return taperecords.NO_TAINT
    kind, ranks = together[0].kind, together[1].ranks
    if len(ranks) < 2:
        made = call.written() or list(outputs)
        values: list[Tensor] | None = [entry.value for entry in sent]
    else:
        made = call.written() or list(outputs)
        mine = own_place(ranks)
        values = _values(kind, _reduction(call), [e.value for e in sent], made, len(ranks), mine)
    if values is None:
        return taperecords.NO_TAINT
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
    return ranks.index(dist.get_rank()) if dist.get_rank() in ranks else 0


def _reduction(call: Call) -> str:
    """The reduction of a collective ("sum"); "" where torch does not say."""
    reduction: Any = call.named.get("reduce_op")
    if isinstance(reduction, str):
        return reduction.lower()
    number = reduction.op() if hasattr(reduction, "op") else -1
    return _OPS[number] if 0 <= number < len(_OPS) else ""


def _values(
    kind: str, reduction: str, sent: list[Tensor], made: list[Tensor], ranks: int, mine: int
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
        return [sent[mine]] if len(sent) == ranks else None
    parts = [value.reshape(ranks, -1)[mine] for value in sent] if len(sent) == len(made) else None
    if parts is None:
        parts = [sent[mine]] if len(sent) == ranks else []
    reduced = [_reduced(value, reduction, ranks) for value in parts]
    return None if any(value is None for value in reduced) else reduced  # type: ignore[return-value]


def _reduced(value: Tensor, reduction: str, ranks: int) -> Tensor | None:
    """The reduction of so many equal values."""
    if reduction == "sum":
        return value if value.dtype is torch.bool else value * ranks
    if reduction == "product":
        return value**ranks
    if reduction == "bxor":
        return value if ranks % 2 else torch.zeros_like(value)
    return value if reduction in _OPS else None


# -- reached ---------------------------------------------------------------------------------------
# Expected counts of the classes that routed rows reach, on the ops that read or write by them.
#
# The code got one draw of indices; how many experts an op touches is on average another number,
# and not an integer.  It takes the place of the draw's number where the op takes exactly the
# classes that a router chose: a grouped product with one group for each class, and reads and
# writes of the rows of a weight that has one row for each class.

_INDEXED = {
    "aten.index": (0, 1),
    "aten.index_select": (0, 2),
    "aten.embedding": (0, 1),
    "aten.index_put": (0, 1),
    "aten.index_put_": (0, 1),
    "aten._index_put_impl_": (0, 1),
    "aten._unsafe_index_put": (0, 1),
    "aten.index_add": (0, 2),
    "aten.index_add_": (0, 2),
}
"""Ops that take rows of a tensor by indices: where the two stand."""
_STEPS = 6
"""Ops that may lie between a weight and the tensor that is read: a cast, a view, a product of two
weights."""


def expect_counts(tape: Tape, call: Call, facts: dict[str, Any]) -> frozenset[int]:
    """Put expected counts into `facts` in place of the drawn ones.

    Returns the assumptions that they rest on.
    """
    if "groups_touched" in facts:
        return _groups(tape, call, facts)
    if call.name in _INDEXED and tape.values.routed:
        return _reached_rows(tape, call, facts)
    if call.name == "aten.embedding_dense_backward" and tape.values.routed:
        shape = (call.args[2], *call.args[0].shape[call.args[1].dim() :])
        return _written(tape, call.args[1], shape, facts)
    return taperecords.NO_TAINT


def _groups(tape: Tape, call: Call, facts: dict[str, Any]) -> frozenset[int]:
    for tensor in call.tensors:
        if tensor.dtype == torch.int32 and tensor.dim() == 1:
            number = _expected_choice(tape, tensor, len(tensor), facts["groups_touched"])
            if number is not None:
                facts["groups_touched"] = _distinct(tape, number)
            else:
                _share_of_groups(tape, tensor, facts)
    return taperecords.NO_TAINT  # the draw's number rests on the same


def _share_of_groups(tape: Tape, offsets: Tensor, facts: dict[str, Any]) -> None:
    """Groups of one process among all classes: its share of the expected count."""
    choice, parts = _shared_choice(tape, offsets, len(offsets))
    if choice is not None:
        facts["groups_touched"] = _part(choice["distinct"], parts)
        facts["rows_routed"] = _part(choice["rows"] * choice["chosen"], parts)


def _part(number: float, parts: int) -> float:
    part = number / parts
    return int(part) if part.is_integer() else part


def _shared_choice(tape: Tape, index: Tensor, mine: int) -> tuple[Mapping[str, Any] | None, int]:
    """The routing of which processes have as many classes each as `mine`, and how many do.

    None where a process has all classes, where parts are unequal, and for classes of which some are
    likelier than others, which count as in the draw.
    """
    entry = tape.values.known(index)
    if entry is None or not dist.is_available() or not dist.is_initialized():
        return None, 1
    made = [tape.values.assumptions[number].facts for number in entry.taint]
    choice = max((f for f in made if "policy" in f), key=_classes, default=None)
    if choice is None or choice["policy"].partition(":")[0] in ("skewed", "histogram"):
        return None, 1
    parts, rest = divmod(choice["classes"], mine)
    if rest or parts < 2 or dist.get_world_size() % parts:
        return None, 1
    return choice, parts


def _classes(facts: Mapping[str, Any]) -> int:
    return int(facts["classes"])


def _reached_rows(tape: Tape, call: Call, facts: dict[str, Any]) -> frozenset[int]:
    source, index = (call.args[place] for place in _INDEXED[call.name])
    if call.name.startswith(("aten.index_select", "aten.index_add")) and call.args[1] != 0:
        return taperecords.NO_TAINT
    if isinstance(index, (list, tuple)):
        if len(index) != 1:
            return taperecords.NO_TAINT
        index = index[0]
    if not isinstance(index, Tensor) or not source.dim():
        return taperecords.NO_TAINT
    if "uniform_over" in facts:
        return taperecords.NO_TAINT
    if "rows_touched" not in facts or "index_add" in call.name:
        return _written(tape, index, tuple(source.shape), facts)
    number = _expected_choice(tape, index, source.shape[0], facts["rows_touched"])
    tag = tape.tags.of(source)
    if tag is None or not _of_weights(tag.node, _STEPS):
        return taperecords.NO_TAINT
    if number is None:
        choice, parts = _shared_choice(tape, index, source.shape[0])
        if choice is not None:
            facts["rows_touched"] = _part(choice["distinct"], parts)
        return taperecords.NO_TAINT
    tape.values.routed.setdefault(number, set()).add(tuple(source.shape))
    facts["rows_touched"] = _distinct(tape, number)
    return taperecords.NO_TAINT


def _written(
    tape: Tape, index: Tensor, shape: tuple[int, ...], facts: dict[str, Any]
) -> frozenset[int]:
    """Gradients are written to the rows of a tensor of the shape of a weight that was read so."""
    entry = tape.values.known(index)
    for number in () if entry is None else sorted(entry.taint):
        if shape in tape.values.routed.get(number, ()):
            facts["rows_touched"] = _distinct(tape, number)
            return frozenset([number])
    return taperecords.NO_TAINT


def _expected_choice(tape: Tape, index: Tensor, classes: int, reached: int) -> int | None:
    """The assumption on routing whose classes an index reaches, all of the drawn ones."""
    entry = tape.values.known(index)
    fitting = [
        number
        for number in (() if entry is None else sorted(entry.taint))
        for facts in [tape.values.assumptions[number].facts]
        if (facts.get("classes"), facts.get("drawn")) == (classes, reached)
    ]
    return fitting[0] if len(fitting) == 1 else None


def _distinct(tape: Tape, number: int) -> int | float:
    reached: float = tape.values.assumptions[number].facts["distinct"]
    return int(reached) if reached.is_integer() else reached


def _of_weights(node: fx.Node, steps: int) -> bool:
    """Whether a value is a weight, or made of weights alone."""
    entry = node.meta.get(META_KEY)
    if isinstance(entry, taperecords.Entry):
        return entry.kind in ("parameter", "buffer")
    inputs = node.all_input_nodes
    return steps > 0 and bool(inputs) and all(_of_weights(n, steps - 1) for n in inputs)
