"""What one recording knows of the other processes: groups, the mesh, whole weights."""

from __future__ import annotations

from rooftrace.tracer.collectives import Collective, Group


class Shards:
    """The groups, the mesh and the whole weights of one recording."""

    def __init__(self) -> None:
        self.groups: dict[str, Group] = {}  # of the collectives so far, by name
        self.mesh: dict[str, int] = {}  # processes along each axis, outermost first
        self.whole: dict[int, str] = {}  # names of whole weights, by storage

    def exchanged(self, together: tuple[Collective, Group] | None) -> Collective | None:
        """Note the group of a collective; returns what is exchanged."""
        if together is None:
            return None
        collective, group = together
        self.groups[collective.group] = group
        return collective
