"""Seconds of the collectives of a plan over the links of a system."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from msgspec import Struct

from rooftrace._amounts import larger, smaller
from rooftrace.costmodels.network import (
    CollectiveTime,
    collective_seconds,
    expert_exchange_seconds,
    link_seconds,
    per_rank_link_bytes,
)
from rooftrace.costmodels.planning import Plan
from rooftrace.hardware.chip import MissingPeakError
from rooftrace.hardware.systems import System
from rooftrace.tracer.collectives import Group
from rooftrace.tracer.graph import OpGraph

# -- expert exchanges ------------------------------------------------------------------------------
# Exchanges of rows with the experts of other processes, and their seconds by DeepEP.
#
# An all_to_all of counts rests on an assumption that says how many rows there are of each process
# (see `Assumption.facts`).  The ones of rows that follow in that module, in the same group, send
# the rows to experts (dispatch) and bring them back (combine), in turns: backward does the same.


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


# -- exchanges -------------------------------------------------------------------------------------


_OF_EXPERTS = ("all_to_all", "dispatch", "combine")


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """One kernel of a plan that talks to other processes."""

    kernel: int  # its place in `Plan.groups`
    kind: str
    group: str  # a key of `OpGraph.groups`
    axis: str  # of the mesh; the name of the group where no mesh is known
    ranks: int
    calls: int  # kernels that it stands for
    nbytes: int  # of the whole buffer of one call
    seconds: float  # of one call
    least: float  # seconds of one call at the datasheet's bandwidth
    level: str  # the outermost level of links that it uses
    beyond: str  # what lies outside of measurements, "" where nothing does
    sent: float  # bytes that a process sends in one call
    exposed: float = 0.0  # seconds of all calls for which computing waits
    splits: bool = False  # whether processes get different amounts


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelExchange:
    """What one kernel exchanges with other processes; amounts are numbers, or arrays over sizes."""

    kind: str
    group: str  # a key of `OpGraph.groups`
    members: Group
    nbytes: Any  # of the whole buffer of one call
    splits: bool = False  # whether processes get different amounts
    experts: ExpertExchange | None = None  # by the kernels of DeepEP

    def seconds(self, system: System, how: str) -> ExchangeSeconds:
        """What one call takes over the links of a system.  how: `ExecutionModel.exchange`.

        Raises MissingPeakError for a chip without a link, and SystemSizeError for ranks that a
        system has no chips for.
        """
        if self.members.size > 1 and not system.levels:
            raise MissingPeakError(
                f"{system.name} has no link, and {self.members.size} processes exchange tensors: "
                "add a [[link]] to its TOML file, or name a system (`rooftrace systems list`)"
            )
        ranks = self.members.ranks
        least = link_seconds(system, self.kind, self.nbytes, ranks)
        taken = collective_seconds(system, self.kind, self.nbytes, ranks)
        if self.experts is None:
            return ExchangeSeconds(self.kind, taken, least)
        by_experts = seconds_of(self.experts, how, self.members, system)
        taken = replace(by_experts, level=taken.level)
        kind = kind_of(self.experts, how)
        return ExchangeSeconds(kind, taken, smaller(least, taken.seconds))


@dataclass(frozen=True, slots=True, eq=False)
class ExchangeSeconds:
    """What one call of an exchange takes, and the least at the datasheet's bandwidth."""

    kind: str
    taken: CollectiveTime
    least: Any

    def unevenly(self, factor: float) -> ExchangeSeconds:
        """An exchange with experts as the busiest process sees it: all others wait for it.

        factor: its tokens over the mean of all.
        """
        if factor == 1 or not any(word in self.kind for word in _OF_EXPERTS):
            return self
        return replace(self, taken=replace(self.taken, seconds=factor * self.taken.seconds))


def exchanges_of(planned: Plan) -> dict[int, KernelExchange]:
    """The collectives of a plan by their kernel."""
    communicating = {}
    graph = planned.graph
    experts = expert_exchanges(graph) if planned.execution.exchange in MODES else {}
    for number, group in enumerate(planned.groups):
        talking = [op for op in group.ops if graph.ops[op].collective is not None]
        if not talking:
            continue
        together = graph.ops[talking[0]].collective
        assert together is not None
        communicating[number] = KernelExchange(
            kind=together.kind,
            group=together.group,
            members=graph.groups[together.group],
            nbytes=together.bytes,
            splits=bool(together.splits),
            experts=experts.get(talking[0]),
        )
    return communicating


def communication_of(
    kernel: int, calls: int, exchange: KernelExchange, timed: ExchangeSeconds, exposed: float
) -> Communication:
    """One kernel of a plan that exchanges, as an estimate says it."""
    members = exchange.members
    return Communication(
        kernel=kernel,
        kind=timed.kind,
        group=exchange.group,
        axis=members.axis or exchange.group,
        ranks=members.size,
        calls=calls,
        nbytes=exchange.nbytes,
        seconds=timed.taken.seconds,
        least=timed.least,
        level=timed.taken.level,
        beyond=timed.taken.beyond,
        sent=per_rank_link_bytes(exchange.kind, exchange.nbytes, members.size),
        exposed=exposed,
        splits=exchange.splits,
    )
