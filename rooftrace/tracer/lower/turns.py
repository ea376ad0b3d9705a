"""Turns of a loop stand once: one turn stands for those that the recorder left out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rooftrace.tracer.graph import Op, OpGraph, Repeat
from rooftrace.tracer.lower.blocks import Blocks, NotAlikeError
from rooftrace.tracer.lower.collapse import Collapse
from rooftrace.tracer.vocabulary import REVERSED

if TYPE_CHECKING:
    from rooftrace.tracer.rolling import Loop

_TURN = 2
"""The turn of a loop that stands for those that were left out."""
_SPREAD = 1024
"""More turns than are run of one loop: what keeps the labels of loops apart."""


def roll_loops(
    graph: OpGraph, turns: Sequence[tuple[int, int] | None], loops: Mapping[int, Loop]
) -> tuple[OpGraph, dict[int, int]]:
    """The graph with turn 2 of each loop in a repeat, and the new ids of the values in it.

    turns: the loop and the turn of each op.  Loops that stand in one place of the source and have
    equally many turns are one repeat.  Raises NotAlikeError where the turns differ after all.
    """
    if not loops:
        return graph, {value: value for value in range(len(graph.values))}
    graph, turns = _views_beside_readers(graph, turns)
    known: dict[tuple[int, str], Repeat] = {}
    repeats: dict[int, Repeat] = {}
    for serial, loop in loops.items():
        repeat = Repeat(len(known), loop.count, source=loop.source)
        repeats[serial] = known.setdefault((loop.count, loop.source), repeat)
    labels = [
        _SPREAD * turn[0] + turn[1] if turn is not None and turn[0] in loops else None
        for turn in turns
    ]
    rolled = _Turns(Blocks(graph, labels), repeats)
    return rolled.graph(tuple(known.values())), rolled.short


def _views_beside_readers(
    graph: OpGraph, turns: Sequence[tuple[int, int] | None]
) -> tuple[OpGraph, list[tuple[int, int] | None]]:
    """Views in backward that only one turn reads stand at its beginning, and belong to it.

    The gradient of a stack is taken apart all at once, before the turns go backward.
    """
    readers: dict[int, set[int]] = {}
    for op in graph.ops:
        for value in op.inputs:
            readers.setdefault(value, set()).add(op.id)
    starts: dict[tuple[int, int], int] = {}
    for op in graph.ops:
        turn = turns[op.id]
        if turn is not None and op.part in REVERSED:
            starts.setdefault(turn, op.id)
    before: dict[int, list[tuple[Op, tuple[int, int]]]] = {}
    for op in graph.ops:
        if turns[op.id] is None and op.kind == "view" and op.part in REVERSED:
            read_by = {turns[i] for value in op.outputs for i in readers.get(value, ())}
            turn = read_by.pop() if len(read_by) == 1 else None
            if turn in starts and starts[turn] > op.id:
                before.setdefault(starts[turn], []).append((op, turn))
    moved = {op.id for views in before.values() for op, _ in views}
    order = [
        item
        for op in graph.ops
        if op.id not in moved
        for item in (*before.get(op.id, ()), (op, turns[op.id]))
    ]
    return graph.with_ops(op for op, _ in order), [turn for _, turn in order]


class _Turns(Collapse):
    """Loops of which turns 0 to 3 and the last ones were recorded: turn 2 stands for `count` turns.

    loops: by their serial number; a label is the turn plus `_SPREAD` times that.  In a list, a
    value of turn 2 stands once for each turn that it stands for.
    """

    def __init__(self, blocks: Blocks, loops: Mapping[int, Repeat]) -> None:
        repeats = {_SPREAD * serial + _TURN: repeat for serial, repeat in loops.items()}
        super().__init__(blocks, repeats, {label: label for label in repeats})
        for label in repeats:
            if len({blocks.key(turn) for turn in (label - 1, label, label + 1)}) > 1:
                raise NotAlikeError
            for run in blocks.runs:
                if label in run:
                    self.copy.update({value: (value, 0) for value in run[label].made})
                    self.home.update(dict.fromkeys(run[label].made, label))
        self._match_spread()
        self._measure_steps()

    def graph(self, repeats: tuple[Repeat, ...]) -> OpGraph:
        """The graph with turns 2 in their repeats."""
        return self._write(repeats)

    def _match_spread(self) -> None:
        """Outputs of an op outside, one for each turn: what each turn reads stands side by side."""
        made = {
            value: (op, place)
            for op in self.source.ops
            if op.id not in self.blocks.label_of_op and len(op.outputs) > _TURN
            for place, value in enumerate(op.outputs)
        }
        for label, repeat in self.repeats.items():
            own = (self.blocks.own(turn) for turn in (label - 1, label, label + 1))
            for before, value, after in zip(*own, strict=True):
                if not {before, value, after} <= made.keys():
                    raise NotAlikeError
                op, place = made[value]
                ends = made[before] == (op, place - 1), made[after] == (op, place + repeat.count)
                if not all(ends):
                    raise NotAlikeError
                self.home[value] = label
                for q in range(repeat.count):
                    self.copy[op.outputs[place + q]] = (value, q)

    def _measure_steps(self) -> None:
        for label, repeat in self.repeats.items():
            before, here, after = (
                self.blocks.indices(turn) for turn in (label - 1, label, label + 1)
            )
            for place, index in here.items():
                step = index - before[place]
                right = index + repeat.count * step
                if after[place] not in (right, index + step):
                    raise NotAlikeError
                self.steps[(label, *place)] = step
                # What turn 3 takes of the turn before it was recorded as if that were turn 2.
                run, offset, name = place
                op = self.blocks.runs[run][label + 1].start + offset
                self.indices.setdefault(op, {})[name] = right

    def _ran_last(self, value: int, iteration: int, label: int | None) -> bool:
        return label is not None and abs(label - self.home[value]) == 1

    def _held_by_all(self, held: Collection[int]) -> Collection[int]:
        # Turns 0 and 1 stand for themselves; what is there of turn 1 is there of those after it.
        runs, place = self.blocks.runs, self.blocks.place
        inside = {v: place[v] for v in held if v in self.copy and v in place}
        return {v for v, (run, turn, at) in inside.items() if runs[run][turn - 1].made[at] in held}

    def _of_all(self, values: Sequence[int], home: int) -> bool:
        return len(values) >= self.repeats[home].count

    def _once(self, values: Sequence[int], count: int) -> list[int]:
        if any(self.copy[v][1] for v in values):
            return super()._once(values, count)
        runs = [(v, len(list(same))) for v, same in groupby(values)]
        if any(size != count for _, size in runs):
            raise NotAlikeError
        return [v for v, _ in runs]
