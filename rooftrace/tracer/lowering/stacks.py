"""Rolls up alike layers of a stack and turns of a loop, so that one stands for all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from rooftrace.graph import REVERSED, Op, OpGraph, Ref, Repeat, split
from rooftrace.tracer.lowering.blocks import Blocks, Collapse, NotAlikeError

if TYPE_CHECKING:
    from rooftrace.tracer.repeats import Loop

# -- stacks ----------------------------------------------------------------------------------------
# Layers of a stack stand once: modules of one container that are alike.
#
# Of a run of modules ("model.layers.3", "model.layers.4" ...) the first and the last stay as they
# are, so that ops between neighbours still stand in the graph.  The second one stands for
# all others.

MIN_COUNT = 2
"""As many iterations at least make a repeat."""
_PERIODS = (1, 2, 3, 4, 5, 6, 8)
_LIST = 8
"""An op of the optimizer with as many inputs updates many weights at once."""
_NO_VALUE = -1


def roll_stacks(graph: OpGraph) -> OpGraph:
    """The graph with equal modules of every container standing once, where there are enough."""
    done: list[str] = []
    for container in _containers(graph):
        if not any(container.startswith(f"{outer}." if outer else "") for outer in done):
            rolled = _rolled(graph, container)
            if rolled is not None:
                graph = rolled
                done.append(container)
    return graph


def _containers(graph: OpGraph) -> list[str]:
    """Paths that hold enough numbered modules, outermost first."""
    indices: dict[str, set[int]] = {}
    for path in {op.module for op in graph.ops}:
        steps = path.split(".")
        for depth, step in enumerate(steps):
            if step.isdigit():
                indices.setdefault(".".join(steps[:depth]), set()).add(int(step))
    enough = [c for c, numbers in indices.items() if len(numbers) >= MIN_COUNT + 2]
    return sorted(enough, key=lambda c: (len(c.split(".")) if c else 0, c))


def _rolled(graph: OpGraph, container: str) -> OpGraph | None:
    """The graph with the modules of one container rolled; None where that saves nothing."""
    labels = _labels(graph, container)
    period = _period(graph, labels)
    if period is None:
        return None
    blocks = Blocks(graph, labels, container, *period)
    ends = blocks.interval(MIN_COUNT + 2)
    if ends is None:
        return None
    try:
        return _Modules(blocks, *ends).graph()
    except NotAlikeError:
        return None


def _labels(graph: OpGraph, container: str) -> list[int | None]:
    """The number of the module of `container` that each op is in, or whose weights it updates."""
    by_path: dict[str, int | None] = {}

    def number(path: str) -> int | None:
        if path not in by_path:
            by_path[path] = _number(path, container)
        return by_path[path]

    labels = []
    owner: dict[int, int | None] = {}
    for op in graph.ops:
        label = number(op.module)
        if op.part == "optimizer" and len(op.inputs) < _LIST:
            numbers = {
                owner[v] if v in owner else number(graph.values[v].name) for v in op.inputs
            } - {None}
            label = numbers.pop() if len(numbers) == 1 else None
        for value in op.outputs:
            owner[value] = label
        labels.append(label)
    return labels


def _number(path: str, container: str) -> int | None:
    place = split(path, container)
    return None if place is None else place[0]


def _period(graph: OpGraph, labels: Sequence[int | None]) -> tuple[int, int] | None:
    """How many modules make one iteration, and the number of the first: by their ops.

    None where no iterations can be alike.  Of an interval that is, the iterations at both ends may
    have more ops here (`Blocks` cuts those off).
    """
    content: dict[int, list[Any]] = {}
    for op, label in zip(graph.ops, labels, strict=True):
        if label is not None:
            shape = graph.values[op.outputs[0]].shape if op.outputs else ()
            content.setdefault(label, []).append(
                (op.target, op.arguments.get("block"), op.part, shape)
            )
    keys = {label: hash(tuple(ops)) for label, ops in content.items()}
    alike = any(key == keys.get(label + 1) for label, key in keys.items())
    best = (0, 1, 0) if alike else None
    for period in _PERIODS:
        start = length = 0
        for label in sorted(keys):
            if keys[label] != keys.get(label + period):
                length = 0
                continue
            start, length = (start, length + 1) if length else (label, 1)
            iterations = (length + period) // period
            if iterations >= MIN_COUNT + 2 and (best is None or length + period > best[0]):
                best = (length + period, period, start)
    return best and best[1:]


class _Modules(Collapse):
    """Modules of a container; of those that are alike the first and the last stay as they are."""

    def __init__(self, blocks: Blocks, first: int, last: int) -> None:
        self.first, last = first + 1, last - 1
        self.count = last - first
        self.repeat = Repeat(
            len(blocks.graph.repeats),
            self.count,
            blocks.container,
            blocks.phase + self.first * blocks.period,
            blocks.period,
        )
        super().__init__(blocks, {self.first: self.repeat}, {self.first: last})
        self.dropped = {
            op
            for run in blocks.runs
            for label in range(self.first + 1, last + 1)
            if label in run
            for op in range(run[label].start, run[label].stop)
        }
        self._match()
        self._match_named(last)
        self._match_outputs()
        self._complete()
        self._match_lists()
        self._complete()
        self.home = {mine: self.first for mine, _ in self.copy.values()}
        self._measure_steps()

    def graph(self) -> OpGraph:
        """The short graph."""
        self._check_holds()
        short = self._write(self.source.repeats)
        repeat = self._described()
        self._check_order(short)
        return short.replace(repeats=(*short.repeats, repeat))

    def _runs(self, op: Op) -> bool:
        return op.id not in self.dropped

    # -- which values correspond -------------------------------------------------------------------

    def _match(self) -> None:
        """Values that the iterations make, or that only they use."""
        for q in range(self.count):
            label = self.first + q
            pairs = [
                zip(self.blocks.externals(self.first), self.blocks.externals(label), strict=True)
            ]
            for run in self.blocks.runs:
                if self.first in run:
                    pairs.append(zip(run[self.first].made, run[label].made, strict=True))
            for pair in pairs:
                self.copy.update({value: (mine, q) for mine, value in pair})

    def _match_named(self, last: int) -> None:
        """Values that bear the names of the iterations, without being used there."""
        values, named = self.source.values, dict[Any, int]()
        for value, label in self.blocks.owner.items():
            if value not in self.copy and self.first <= label <= last:
                mine = named.setdefault(self.blocks.relative(values[value].name, label), value)
                if values[mine].shape != values[value].shape:
                    raise NotAlikeError
                self.copy[value] = (mine, label - self.first)

    def _match_outputs(self) -> None:
        """Results of the step that no op touched, next to others of the same iteration."""
        outputs, values = self.source.outputs, self.source.values
        starts: dict[int, int] = {}
        for position, value in enumerate(outputs):
            if value in self.copy:
                starts.setdefault(self.copy[value][1], position)
        if len(starts) != self.count:
            return
        sizes = {starts[q + 1] - starts[q] for q in range(self.count - 1)}
        if len(sizes) != 1:
            return
        for offset in range(sizes.pop()):
            row = [outputs[starts[q] + offset] for q in range(self.count)]
            untouched = not any(v in self.copy or v in self.source.producers for v in row)
            if untouched and len(set(row)) == len({values[v].shape for v in row}) * self.count:
                self.copy.update({value: (row[0], q) for q, value in enumerate(row)})

    def _match_lists(self) -> None:
        """Outputs of an op outside, one for each item of a list through the iterations."""
        for op in self.source.ops:
            if op.id in self.blocks.label_of_op or len(op.outputs) <= self.count:
                continue
            for argument in op.arguments.values():
                if type(argument) is tuple and len(argument) == len(op.outputs):
                    positions = {item.id: i for i, item in enumerate(argument) if type(item) is Ref}
                    for item, output in zip(argument, op.outputs, strict=True):
                        if type(item) is Ref and item.id in self.copy and output not in self.copy:
                            mine, q = self.copy[item.id]
                            if mine not in positions:
                                raise NotAlikeError
                            self.copy[output] = (op.outputs[positions[mine]], q)

    def _complete(self) -> None:
        """Every value has a copy in every iteration."""
        copies = Counter(mine for mine, _ in self.copy.values())
        if any(count != self.count for count in copies.values()):
            raise NotAlikeError

    def _measure_steps(self) -> None:
        first = self.blocks.indices(self.first)
        second = self.blocks.indices(self.first + 1)
        steps = {place: second[place] - index for place, index in first.items()}
        for q in range(self.count):
            indices = self.blocks.indices(self.first + q)
            if any(indices[place] != first[place] + q * step for place, step in steps.items()):
                raise NotAlikeError
        self.steps = {(self.first, *place): step for place, step in steps.items()}

    # -- the short graph ---------------------------------------------------------------------------

    def _ran_last(self, value: int, iteration: int, label: int | None) -> bool:
        place = self.blocks.place.get(value)
        if place is None:
            return iteration == self.count - 1
        start = self.blocks.runs[place[0]][self.first].start
        back = self.source.ops[start].part in REVERSED
        return iteration == (0 if back else self.count - 1)

    def _held_by_all(self, held: Collection[int]) -> Collection[int]:
        copies = Counter(self.copy[value][0] for value in held if value in self.copy)
        return {v for v in held if v in self.copy and copies[self.copy[v][0]] == self.count}

    def _described(self) -> Repeat:
        """The repeat, with the names that do not follow from the path, and the assumptions."""
        names: dict[int, list[str]] = {}
        for value, (mine, q) in self.copy.items():
            names.setdefault(mine, [""] * self.count)[q] = self.source.values[value].name
        odd = {
            self.short[mine]: tuple(all_names)
            for mine, all_names in sorted(names.items())
            if any(name != self.repeat.path(all_names[0], q) for q, name in enumerate(all_names))
        }
        assumed = [self.blocks.assumptions(self.first + q) for q in range(self.count)]
        assumptions = {others[0]: others for others in zip(*assumed, strict=True)}
        return replace(self.repeat, names=odd, assumptions=assumptions)

    def _check_holds(self) -> None:
        """Check that variables hold the same values in all iterations, as seen from each.

        A Ref can say "of the iteration before", not "of two before": where a variable lives so
        long, or in some iterations only, these have to be written out.
        """
        ops = self.source.ops
        for run in self.blocks.runs:
            if self.first not in run:
                continue
            for offset in range(run[self.first].stop - run[self.first].start):
                row = [
                    ops[run[self.first + q].start + offset] for q in range(self.count)
                ]  # one op in each iteration
                if not any(op.holds for op in row):
                    continue
                seen = [self._seen(ref) for ref in row[0].holds]
                for q, op in enumerate(row):
                    mine = {self._at(ref, q) for ref in seen if ref is not None}
                    held = {ref.id for ref in op.holds}
                    if any(not self._lives_on(value, op.id) for value in mine ^ held):
                        raise NotAlikeError
        for op in ops:
            if op.holds and self.blocks.label_of_op.get(op.id) not in self._inside:
                self._check_outside(op)

    @cached_property
    def _inside(self) -> frozenset[int]:
        return frozenset(range(self.first, self.first + self.count))

    def _check_outside(self, op: Op) -> None:
        """An op outside holds values of all iterations, or of the last one."""
        everywhere = self._held_by_all({ref.id for ref in op.holds})
        for ref in op.holds:
            if ref.id not in self.copy or ref.id in everywhere:
                continue
            last = self._ran_last(ref.id, self.copy[ref.id][1], None)
            if not last and not self._lives_on(ref.id, op.id):
                raise NotAlikeError

    def _seen(self, ref: Ref) -> tuple[int, int, int] | None:
        """A held value relative to its iteration: (value at the edge, value made by the neighbour,
        distance); None if farther than one iteration."""
        place = self.blocks.place.get(ref.id)
        if place is not None and abs(place[1] - self.first) > 1:
            return None
        if place is None or place[1] == self.first:
            return ref.id, _NO_VALUE, 0
        run, made_in, offset = place
        shift = made_in - self.first
        runs = self.blocks.runs[run]
        last = self.lasts[self.first]
        if last + 1 not in runs and shift > 0:
            return None
        edge = ref.id if shift < 0 else runs[last + 1].made[offset]
        return edge, runs[self.first].made[offset], shift

    def _at(self, seen: tuple[int, int, int], q: int) -> int:
        """The value that iteration `q` holds then."""
        value, neighbour, shift = seen
        if shift:
            inside = 0 <= q + shift < self.count
            return self._copies[neighbour][q + shift] if inside else value
        return self._copies[value][q] if value in self._copies else value

    @cached_property
    def _copies(self) -> dict[int, list[int]]:
        """By the value that stays, its copies in order."""
        copies: dict[int, list[int]] = {}
        for value, (mine, q) in self.copy.items():
            copies.setdefault(mine, [_NO_VALUE] * self.count)[q] = value
        return copies

    def _check_order(self, short: OpGraph) -> None:
        """Written out again, every value gets the id that it has now."""
        ids = short.ids_written_out(self.repeat)
        for value in range(len(self.source.values)):
            mine, q = self.copy.get(value, (value, 0))
            if ids[self.short[mine]][q] != value:
                raise NotAlikeError


# -- turns -----------------------------------------------------------------------------------------
# Turns of a loop stand once: one turn stands for those that the recorder left out.

_TURN = 2
"""The turn of a loop that stands for those that were left out."""
_SPREAD = 1024
"""More turns than are run of one loop: keeps the labels of loops apart."""


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
    distinct: dict[tuple[int, str], Repeat] = {}
    repeats: dict[int, Repeat] = {}
    for serial, loop in loops.items():
        repeat = Repeat(len(distinct), loop.count, source=loop.source)
        repeats[serial] = distinct.setdefault((loop.count, loop.source), repeat)
    labels = [
        _SPREAD * turn[0] + turn[1] if turn is not None and turn[0] in loops else None
        for turn in turns
    ]
    rolled = _LoopStacks(Blocks(graph, labels), repeats)
    return rolled.graph(tuple(distinct.values())), rolled.short


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


class _LoopStacks(Collapse):
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
        """Outputs of an op outside, one for each turn: the inputs of turns side by side."""
        made = {
            value: (op, position)
            for op in self.source.ops
            if op.id not in self.blocks.label_of_op and len(op.outputs) > _TURN
            for position, value in enumerate(op.outputs)
        }
        for label, repeat in self.repeats.items():
            owned = (self.blocks.externals(turn) for turn in (label - 1, label, label + 1))
            for before, value, after in zip(*owned, strict=True):
                if not {before, value, after} <= made.keys():
                    raise NotAlikeError
                op, position = made[value]
                ends = (
                    made[before] == (op, position - 1),
                    made[after] == (op, position + repeat.count),
                )
                if not all(ends):
                    raise NotAlikeError
                self.home[value] = label
                for q in range(repeat.count):
                    self.copy[op.outputs[position + q]] = (value, q)

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
        # Turns 0 and 1 stand for themselves; a value of turn 1 has counterparts in later turns.
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
