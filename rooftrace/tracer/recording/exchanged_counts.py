"""Counts of rows that processes tell each other before they exchange the rows: who gets how many.

One process is traced, so what the others send is unknown.  By a policy that treats all classes
alike each process sends as many rows to every other, and gets as many as it sends.  By one that
prefers classes all processes prefer the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rooftrace.errors import RequestError
from rooftrace.tracer.asking import assumptions as asked
from rooftrace.tracer.collectives import Collective, Group
from rooftrace.tracer.formulas import functions
from rooftrace.tracer.ops import Call
from rooftrace.tracer.recording.exchanged_values import own_place
from rooftrace.tracer.tape import Tape, records
from rooftrace.tracer.tensors import trees
from rooftrace.tracer.values import distinct

_ALIKE = ("expected", "uniform", "balanced")
"""Policies by which every class is as likely as another."""


def expect_counts_of_others(
    tape: Tape, call: Call, outputs: list[Tensor], together: tuple[Collective, Group] | None
) -> frozenset[int]:
    """Learn the counts that an all_to_all brings, where those that it sends rest on a choice.

    Returns the assumptions that they rest on.
    """
    if together is None or together[0].kind != "all_to_all" or together[1].size < 2:
        return records.NO_TAINT
    sent, made = _ends(call, outputs)
    if sent is None or made is None or sent.is_floating_point() or sent.shape != made.shape:
        return records.NO_TAINT
    entry = tape.values.known(sent)
    ranks = together[1].ranks
    if entry is None or sent.numel() % len(ranks) or bool((entry.value < 0).any()):
        return records.NO_TAINT
    choice = _choice(tape, entry.taint, sent.numel(), len(ranks))
    if choice is None:
        return records.NO_TAINT
    facts, gets, sends = _expected(tape, choice, entry.value, ranks)
    number = tape.values.assume(asked.ROUTING, _said(call, facts), facts["classes"], facts)
    tape.values.routed.setdefault(number, set())
    taint = entry.taint | {number}
    tape.values.learn(sent, sends, entry.taint)
    tape.values.learn(made, gets, taint)
    return taint


def _expected(
    tape: Tape, choice: Mapping[str, Any], sent: Tensor, ranks: tuple[int, ...]
) -> tuple[dict[str, Any], Tensor, Tensor]:
    """The facts of what all processes send, and the counts that this one gets and sends.

    Equal layers get the same tensors, so that what follows from them is computed once.
    """
    results = tape.values.results
    own = own_place(ranks)
    key = ("counts of others", str(dict(choice)), str(sent.tolist()), sent.dtype, len(ranks), own)
    kept = results.memo.get(key)
    if kept is None:
        counts = sent.reshape(len(ranks), -1)
        if choice["policy"].partition(":")[0] in _ALIKE:
            facts = _facts_alike(choice, counts)
            gets, sends = _balanced(facts, counts)
        else:
            facts = _facts_of_own(tape, choice, counts, own)
            gets, sends = counts[own].expand_as(counts).clone(), counts.clone()
        both = [counts.reshape(sent.shape).to(sent.dtype) for counts in (gets, sends)]
        kept = results.memo[key] = facts, *both
        results.shared.update(map(trees.bytes_of, both))
    return kept[0], kept[1], kept[2]


def _ends(call: Call, outputs: list[Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """What a call sends, and what it makes or overwrites."""
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
    choices = [facts for facts in made if "policy" in facts and "processes" not in facts]
    exact = [facts for facts in choices if facts["classes"] == counts]
    if not exact and counts == processes:
        exact = [facts for facts in choices if not facts["classes"] % processes]
    return max(exact, key=lambda facts: int(facts["classes"]), default=None)


def _rows(choice: Mapping[str, Any], counts: Tensor) -> int:
    """How many rows of all processes choose: one may send a part of those that chose here."""
    chosen = int(choice["chosen"])
    return len(counts) * -(-int(counts.sum()) // max(chosen, 1))


def _facts_alike(choice: Mapping[str, Any], counts: Tensor) -> dict[str, Any]:
    """The choices of all processes among the classes of one: each makes 1 / processes of them."""
    processes = len(counts)
    rows, chosen = _rows(choice, counts), choice["chosen"] / processes
    classes = choice["classes"] // processes
    balanced = choice["policy"] == "balanced"
    reach = functions.balanced_distinct if balanced else functions.expected_distinct
    drawn = functions.balanced_distinct if balanced else functions.drawn_distinct
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


def _facts_of_own(
    tape: Tape, choice: Mapping[str, Any], counts: Tensor, own: int
) -> dict[str, Any]:
    """The choices of all processes among the classes of one, where some classes are likelier.

    The expected number of classes is that of the draw where the policy is not at hand.
    """
    processes, drawn = len(counts), int((counts[own] > 0).sum())
    rows, classes = _rows(choice, counts), choice["classes"] // processes
    reached = float(drawn)
    try:
        policy = asked.policy_of(tape.values.decision(asked.ROUTING) or choice["policy"])
        shares = distinct.shares_of(policy, choice["chosen"], choice["classes"])
        if str(policy) == choice["policy"] and shares is not None:
            part = shares[own * classes : (own + 1) * classes]
            reached = distinct.expected_distinct(rows, 1, classes, part)
    except RequestError:
        pass  # a histogram for another module
    return {
        "policy": choice["policy"],
        "rows": rows,
        "chosen": processes * float(counts[own].sum()) / max(rows, 1),
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
    number = torch.arange(rows)
    senders = number * processes // max(rows, 1)
    reached = max(min(facts["drawn"], columns), 1)
    places = (number % reached) * columns // reached
    gets = torch.bincount(senders * columns + places, minlength=counts.numel())
    sends = torch.bincount(number * counts.numel() // max(rows, 1), minlength=counts.numel())
    return gets, sends


def _said(call: Call, facts: Mapping[str, Any]) -> str:
    likewise = "sends as many rows to each, and gets as many"
    if facts["policy"].partition(":")[0] not in _ALIKE:
        likewise = "prefers the same classes"
    text = f"{call.short_name}: each of {facts['processes']} processes {likewise}"
    return f"{text}; of all, in the classes of one, {asked.said_of_routing(facts)}"
