"""Exchanges of rows with the experts of other processes, and their seconds by DeepEP.

An all_to_all of counts rests on an assumption that says how many rows there are of each process
(see `Assumption.facts`).  The ones of rows that follow in that module, in the same group, send the
rows to experts (dispatch) and bring them back (combine), in turns: backward does the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rooftrace.costmodels.network import CollectiveTime, expert_exchange_seconds
from rooftrace.hardware.systems import System
from rooftrace.tracer.collectives import Group
from rooftrace.tracer.graph import OpGraph

MODES: Mapping[str, str] = {"deepep": "normal", "deepep-low-latency": "low-latency"}
"""The modes of DeepEP's kernels by what an execution model calls them."""
COUNTS = "counts"
WAYS = ("dispatch", "combine")


@dataclass(frozen=True, slots=True)
class ExpertExchange:
    """What one op exchanges with the experts of other processes."""

    way: str  # one of WAYS; COUNTS: how many rows there will be
    tokens: float  # of this process
    chosen: int  # experts of a token
    experts: int  # of all processes
    row_bytes: float  # of a token as it is sent

    @property
    def rows(self) -> float:
        """Rows that this process sends: a token once for each of its experts."""
        return self.tokens * self.chosen


def expert_exchanges(graph: OpGraph) -> dict[int, ExpertExchange]:
    """The exchanges with experts of a graph by the id of their op."""
    exchanges: dict[int, ExpertExchange] = {}
    turns: dict[tuple[str, str], tuple[Mapping[str, Any], int]] = {}  # by module and group
    for op in graph.ops:
        together = op.collective
        if together is None or together.kind != "all_to_all":
            continue
        key, size = (op.module, together.group), graph.groups[together.group].size
        facts = [graph.assumptions[number].facts for number in op.assumptions]
        counted = next((f for f in facts if f.get("processes") == size), None)
        if counted is not None:
            turns[key] = counted, 0
            exchanges[op.id] = _of(counted, COUNTS, 0)
        elif key in turns:
            counted, turn = turns[key]
            turns[key] = counted, turn + 1
            exchanges[op.id] = _of(counted, WAYS[turn % 2], together.bytes)
    return exchanges


def _of(facts: Mapping[str, Any], way: str, nbytes: int) -> ExpertExchange:
    processes = facts["processes"]
    tokens, chosen = facts["rows"] / processes, facts["chosen_each"]
    return ExpertExchange(
        way=way,
        tokens=tokens,
        chosen=chosen,
        experts=facts["classes"] * processes,
        row_bytes=nbytes / max(tokens * chosen, 1),
    )


def seconds_of(
    exchange: ExpertExchange, execution: str, group: Group, system: System
) -> CollectiveTime:
    """Seconds by the kernels of DeepEP, which bring the counts with the rows."""
    if exchange.way == COUNTS:
        return CollectiveTime(0.0, "")
    return expert_exchange_seconds(
        system,
        exchange.tokens,
        exchange.row_bytes,
        exchange.chosen,
        group.ranks,
        MODES[execution],
        exchange.way,
        exchange.experts,
    )


def kind_of(exchange: ExpertExchange, execution: str) -> str:
    """ "dispatch (DeepEP low-latency)": what takes the place of an all_to_all."""
    return f"{exchange.way} (DeepEP {MODES[execution]})"
