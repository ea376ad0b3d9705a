"""Whether two recorded blocks are the same, op by op."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace
from torch import fx

from rooftrace.tracer.replay.blocks import RecordedCall
from rooftrace.tracer.tape import META_KEY, Recorded, records


class Likeness:
    """Two calls that may have recorded the same ops on their own arguments.

    nodes: for each argument of the second, that of the first.  assumptions: ids of those that ops
    of the second rest on, and what they are in the first.  Both grow while ops are compared.
    """

    def __init__(
        self,
        first: RecordedCall,
        second: RecordedCall,
        nodes: Mapping[fx.Node | None, fx.Node | None],
    ) -> None:
        self.nodes: dict[fx.Node | None, fx.Node | None] = dict(nodes)
        self.assumptions: dict[int, int] = {}
        self._calls = first, second
        self._storages: dict[int, int] = {}

    def alike(
        self,
        ours: Sequence[fx.Node],
        theirs: Sequence[fx.Node],
        arguments: Collection[fx.Node] = (),
    ) -> bool:
        """Whether these nodes of the first do what those of the second do.

        arguments: nodes read by the second that may be any of the first, but one each.
        """
        ours, theirs = ops_of(ours), ops_of(theirs)
        if len(ours) != len(theirs):
            return False
        self.nodes.update(zip(theirs, ours, strict=True))
        return all(
            self._equal(mine, other, arguments) for mine, other in zip(ours, theirs, strict=True)
        )

    def _equal(self, ours: fx.Node, theirs: fx.Node, arguments: Collection[fx.Node]) -> bool:
        if ours.target is not theirs.target:
            return False
        if not self._same((ours.args, ours.kwargs), (theirs.args, theirs.kwargs), arguments):
            return False
        mine, other = ours.meta.get(META_KEY), theirs.meta.get(META_KEY)
        return (
            isinstance(mine, Recorded)
            and isinstance(other, Recorded)
            and len(mine.specs) == len(other.specs)
            and all(map(self._same_spec, mine.specs, other.specs))
            and mine.origin == self._origin(other.origin)
            and (mine.view, mine.sync) == (other.view, other.sync)
            and _facts(mine.facts) == _facts(other.facts)
            and self._same_taint(sorted(mine.taint), sorted(other.taint))
        )

    def _same(self, ours: Any, theirs: Any, arguments: Collection[fx.Node]) -> bool:
        if isinstance(theirs, fx.Node):
            return isinstance(ours, fx.Node) and self._same_node(ours, theirs, arguments)
        if isinstance(theirs, (list, tuple)):
            return (
                isinstance(ours, (list, tuple))
                and len(ours) == len(theirs)
                and all(self._same(a, b, arguments) for a, b in zip(ours, theirs, strict=True))
            )
        if isinstance(theirs, Mapping):
            return ours.keys() == theirs.keys() and all(
                self._same(ours[name], item, arguments) for name, item in theirs.items()
            )
        return ours is theirs or (type(ours) is type(theirs) and bool(ours == theirs))

    def _same_node(self, ours: fx.Node, theirs: fx.Node, arguments: Collection[fx.Node]) -> bool:
        if theirs in arguments:
            return self.nodes.setdefault(theirs, ours) is ours
        if theirs in self.nodes:
            return self.nodes[theirs] is ours
        (mine, place), (other, number) = records.picked(ours), records.picked(theirs)
        return place == number and self.nodes.get(other, other) is mine

    def _same_spec(self, ours: records.Spec, theirs: records.Spec) -> bool:
        if self._storages.setdefault(theirs.storage, ours.storage) != ours.storage:
            return False
        return replace(theirs, storage=ours.storage) == ours

    def _origin(self, origin: records.Origin) -> records.Origin:
        """The origin of an op of the second call, as it would be in the first one."""
        first, second = self._calls
        path, source = origin.module, origin.source
        if is_below(path, second.path):
            path = first.path + path[len(second.path) :]
        if source == second.source:
            source = first.source
        return replace(origin, module=path, source=source)

    def _same_taint(self, ours: Sequence[int], theirs: Sequence[int]) -> bool:
        return len(ours) == len(theirs) and all(
            self.assumptions.setdefault(other, mine) == mine
            for mine, other in zip(ours, theirs, strict=True)
        )


def is_below(path: str, module: str) -> bool:
    """Whether a path is that of a module or of something inside of it."""
    return path == module or path.startswith(f"{module}.")


def ops_of(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Without picks, which are recorded where something first reads them."""
    return [node for node in nodes if node.target is not operator.getitem]


def _facts(facts: Mapping[str, Any]) -> str:
    """Facts can hold tensors, which have no equality of their own."""
    return repr(sorted(facts.items()))
