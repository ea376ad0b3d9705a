"""Seconds of the collectives of a plan over the links of a system."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rooftrace._amounts import smaller
from rooftrace.costmodels.network import (
    CollectiveTime,
    collective_seconds,
    link_seconds,
    per_rank_link_bytes,
)
from rooftrace.costmodels.planning import Plan
from rooftrace.costmodels.timing.expert_exchanges import (
    MODES,
    ExpertExchange,
    expert_exchanges,
    kind_of,
    seconds_of,
)
from rooftrace.hardware.chip import MissingPeakError
from rooftrace.hardware.systems import System
from rooftrace.tracer.collectives import Group

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
