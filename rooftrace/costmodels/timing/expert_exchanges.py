"""Exchanges of rows with the experts of other processes, and their seconds by DeepEP.

An all_to_all of counts rests on an assumption that says how many rows there are of each process
(see `Assumption.facts`).  The ones of rows that follow in that module, in the same group, send the
rows to experts (dispatch) and bring them back (combine), in turns: backward does the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from rooftrace._amounts import larger
from rooftrace.costmodels.network import CollectiveTime, expert_exchange_seconds
from rooftrace.hardware.systems import System
from rooftrace.tracer.collectives import Group
from rooftrace.tracer.graph import OpGraph

MODES: Mapping[str, str] = {"deepep": "normal", "deepep-low-latency": "low-latency"}
"""The modes of DeepEP's kernels by what an execution model calls them."""
COUNTS = "counts"
WAYS = ("dispatch", "combine")


class ExpertExchange(Struct, frozen=True):
    """What one op exchanges with the experts of other processes; amounts may be arrays.

    way: one of WAYS; COUNTS: how many rows there will be.  rows: of all processes, a token once for
    each of its experts.  chosen: experts of a token.  classes: experts of one process.
    """

    way: str
    rows: Any
    processes: int
    chosen: int
    classes: int
    nbytes: Any

    @property
    def tokens(self) -> Any:
        """Tokens of this process."""
        return self.rows / self.processes

    @property
    def experts(self) -> int:
        """Experts of all processes."""
        return self.classes * self.processes

    @property
    def row_bytes(self) -> Any:
        """Bytes of a token as it is sent."""
        return self.nbytes / larger(self.tokens * self.chosen, 1)


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
    return ExpertExchange(
        way=way,
        rows=facts["rows"],
        processes=facts["processes"],
        chosen=facts["chosen_each"],
        classes=facts["classes"],
        nbytes=nbytes,
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
