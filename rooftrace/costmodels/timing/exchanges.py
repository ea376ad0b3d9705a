"""Seconds of the collectives of a plan over the links of a system."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rooftrace.costmodels.network import collective_seconds, link_seconds, per_rank_link_bytes
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
from rooftrace.tracer.collectives import Collective, Group


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


def exchanges_of(planned: Plan, system: System) -> dict[int, Communication]:
    """The collectives of a plan by their kernel, with what each takes.

    Raises MissingPeakError for a chip without a link, and SystemSizeError for ranks that a system
    has no chips for.
    """
    communicating = {}
    graph, how = planned.graph, planned.execution.exchange
    experts = expert_exchanges(graph) if how in MODES else {}
    for number, group in enumerate(planned.groups):
        talking = [op for op in group.ops if graph.ops[op].collective is not None]
        if not talking:
            continue
        together = graph.ops[talking[0]].collective
        assert together is not None
        members = graph.groups[together.group]
        made = _exchange(number, group.times, together, members, system)
        if talking[0] in experts:
            made = _of_experts(made, experts[talking[0]], how, members, system)
        communicating[number] = made
    return communicating


def _of_experts(
    made: Communication, exchange: ExpertExchange, how: str, group: Group, system: System
) -> Communication:
    """The exchange by the kernels of DeepEP in place of an all_to_all."""
    taken = seconds_of(exchange, how, group, system)
    return replace(
        made,
        kind=kind_of(exchange, how),
        seconds=taken.seconds,
        least=min(made.least, taken.seconds),
        beyond=taken.beyond,
    )


def _exchange(
    number: int, calls: int, together: Collective, group: Group, system: System
) -> Communication:
    if group.size > 1 and not system.levels:
        raise MissingPeakError(
            f"{system.name} has no link, and {group.size} processes exchange tensors: "
            "add a [[link]] to its TOML file, or name a system (`rooftrace systems list`)"
        )
    taken = collective_seconds(system, together.kind, together.bytes, group.ranks)
    return Communication(
        kernel=number,
        kind=together.kind,
        group=together.group,
        axis=group.axis or together.group,
        ranks=group.size,
        calls=calls,
        nbytes=together.bytes,
        seconds=taken.seconds,
        least=link_seconds(system, together.kind, together.bytes, group.ranks),
        level=taken.level,
        beyond=taken.beyond,
        sent=per_rank_link_bytes(together.kind, together.bytes, group.size),
        splits=bool(together.splits),
    )


def least_network(exchanges: Mapping[int, Communication]) -> float:
    """Seconds that the links need at least: those of the group with most to do.

    The exchanges of one group follow each other; those of different groups may overlap.
    """
    groups: dict[str, float] = defaultdict(float)
    for exchange in exchanges.values():
        groups[exchange.group] += exchange.calls * exchange.least
    return max(groups.values(), default=0.0)
