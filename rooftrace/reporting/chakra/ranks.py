"""The groups of every process of a mesh, from those of the process that was traced."""

from __future__ import annotations

from collections.abc import Mapping

from rooftrace.errors import RequestError
from rooftrace.tracer.collectives import Group
from rooftrace.tracer.graph import OpGraph


def traced_rank(graph: OpGraph) -> int:
    """The process whose step a graph is: it is in all of its groups."""
    members = [set(group.ranks) for group in graph.groups.values() if group.ranks]
    return min(set.intersection(*members), default=0) if members else 0


def groups_of(graph: OpGraph, rank: int, processes: int) -> dict[str, tuple[int, ...]]:
    """The ranks of each group of a graph, as the process `rank` of all `processes` has it.

    Raises RequestError for a group that lies along no axis of the mesh.
    """
    mesh = graph.mesh or {"": processes}
    return {name: _moved(name, group, mesh, rank) for name, group in graph.groups.items()}


def _moved(name: str, group: Group, mesh: Mapping[str, int], rank: int) -> tuple[int, ...]:
    """A group moved along the axes on which its members do not differ."""
    if rank in group.ranks:
        return group.ranks
    places = [_place(member, mesh) for member in group.ranks]
    own = _place(rank, mesh)
    varying = {axis for axis in mesh if len({place[axis] for place in places}) > 1}
    moved = [
        _rank({axis: (place if axis in varying else own)[axis] for axis in mesh}, mesh)
        for place in places
    ]
    if rank not in moved:
        raise RequestError(
            f"the group {name!r} of ranks {', '.join(map(str, group.ranks))} lies along no axis of "
            f"the mesh, so that of rank {rank} is not known: write the traced rank alone, and "
            f"trace others by rt.fake_mesh(sizes, rank={rank})"
        )
    return tuple(moved)


def _place(rank: int, mesh: Mapping[str, int]) -> dict[str, int]:
    """The coordinates of a rank; the innermost axis runs fastest."""
    place: dict[str, int] = {}
    for axis in reversed(list(mesh)):
        rank, place[axis] = divmod(rank, mesh[axis])
    return place


def _rank(place: Mapping[str, int], mesh: Mapping[str, int]) -> int:
    rank = 0
    for axis, size in mesh.items():
        rank = rank * size + place[axis]
    return rank
