"""Changes after which a step fits its chip: checkpoints, states elsewhere, smaller batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace as replace_fields
from functools import partial

import numpy
from msgspec.structs import replace

from rooftrace.costmodels.estimates import Estimate
from rooftrace.costmodels.memory import KINDS, OPTIMIZERS
from rooftrace.costmodels.rewrites import Editor, reading_others, with_fused_optimizer
from rooftrace.errors import RequestError
from rooftrace.graph import PARTS, Op, OpGraph, in_order, refs
from rooftrace.hardware.units import format_bandwidth, format_capacity, listed
from rooftrace.studies.advice.variants import Study, Variant
from rooftrace.studies.advice.whatifs import StepChange, WhatIf, all_of, priced_change

AtBatch = Callable[[int], OpGraph]
"""A trace of the step at another batch size; it raises RequestError where there is none."""
OverChips = Callable[[int, bool], OpGraph]
"""A trace of the step over so many chips, with checkpoints or without; raises as `AtBatch`."""


def fitting(
    step: Estimate, at_batch: AtBatch | None = None, over_chips: OverChips | None = None
) -> tuple[WhatIf, ...]:
    """Changes after which a step fits its chip, the shortest first; none where it fits already.

    Checkpoints of layers, states of 8 bits or of the host's memory, and shards are of training,
    which adds gradients of smaller batches up.  Checkpoints and narrow states together are told
    where they take less than each alone; other pairs where none of them is enough.
    """
    room = step.chip.room()
    if step.memory.peak <= room:
        return ()
    single = _smaller(step) if step.phase == "training" else ()
    both = (all_of(single, ", ".join(change.action for change in single)),) * (len(single) > 1)
    again = [change for change in single if with_checkpoints in change.edits]
    priced: dict[str, WhatIf | None] = {}

    def edited(change: StepChange) -> WhatIf | None:
        if change.edits and change.action not in priced:
            priced[change.action] = priced_change(step, change)
        return priced.get(change.action)

    shards = _Shards(step, over_chips, edited, again[:1])

    def tried(
        whole: Sequence[StepChange], batches: Sequence[StepChange], others: Sequence[StepChange]
    ) -> list[WhatIf]:
        ways: list[WhatIf | None] = []
        others = others if step.phase == "training" else ()
        if step.memory.weights <= room:  # each chip has all of them but where they are shared
            ways += [_fewer_layers(step, change, edited(change)) for change in whole]
            ways += [_smaller_batch(step, at_batch, change, edited(change)) for change in batches]
            ways += [_in_host_memory(step, change, edited(change)) for change in others]
        ways += map(shards.way, others)
        return [way for way in ways if way is not None and way.fits]

    fit = tried(single, [_AS_IT_IS], [_AS_IT_IS])
    least = min((way.t_after for way in fit), default=math.inf)
    more = tried(both, (), ()) if fit else tried(both, [*single, *both], again)
    return tuple(sorted([*fit, *(w for w in more if w.t_after < least)], key=lambda w: w.t_after))


def _smaller(step: Estimate) -> tuple[StepChange, ...]:
    """Checkpoints of layers, and narrow states of the optimizer, where there are some."""
    source = step.plan.source
    lists = layer_lists(source)
    checkpoints = StepChange(
        lever="memory",
        action=f"run each layer of {listed(lists)} again in backward (torch.utils.checkpoint)",
        needs="a checkpoint around the call of each of them",
        edits=(with_checkpoints,),
    )
    states = StepChange(
        lever="memory",
        action="keep the states of the optimizer in 8 bits",
        needs="an optimizer such as bitsandbytes' AdamW8bit; accuracy is not checked",
        edits=(with_small_states,),
    )
    return ((checkpoints,) if lists else ()) + ((states,) if step.memory.optimizer else ())


def _fewer_layers(step: Estimate, change: StepChange, all_again: WhatIf | None) -> WhatIf | None:
    """The step in which as few layers run again as make it fit, the first ones; or as given.

    all_again: the step with the change.  The first number tried is that by which the peak before
    the optimizer should fit; then come those beside it, as long as one of them may be the least.
    """
    rest = [edit for edit in change.edits if edit is not with_checkpoints]
    if rest or not change.edits or all_again is None or not all_again.fits:
        return all_again
    whole = step.plan.source.expand()
    layers, room = len(_layers_of(whole)), step.chip.room()
    running, least = (_fullest(of)(1)[0] for of in (step, all_again.after))
    spare, lists = (running - least) / max(layers, 1), layer_lists(whole)
    most = layers - (least + spare <= _ABOUT * room)
    number = min(math.ceil((running - room) / spare) if spare > 0 else layers, most)
    best, fewest, too_few = all_again, layers, 0
    for _ in range(_MORE):
        if not too_few < number < fewest:
            break
        some = f"run the first {number} of {layers} layers of {listed(lists)} again in backward"
        edit = partial(with_checkpoints, first=number)
        fewer = replace_fields(change, action=f"{some} (torch.utils.checkpoint)", edits=(edit,))
        way = priced_change(step, fewer)
        if way is None or not way.fits:
            too_few, number = number, number + 1
            continue
        best, fewest = way, number
        if _fullest(way.after)(1)[0] + spare > _ABOUT * room:
            break
        number -= 1
    return best


_MORE = 5
"""How many numbers of layers are tried at most."""


def _in_host_memory(step: Estimate, change: StepChange, edited: WhatIf | None) -> WhatIf | None:
    """The step with the states of the optimizer in the host's memory, and another change.

    edited: the step with that change alone.  None without such states.
    """
    away, link = step.memory.optimizer, step.chip.host_link
    if not away:
        return None
    return WhatIf(
        lever="memory",
        action=f"Keep the states of the optimizer in the host's memory{_also(change)}",
        option="",
        needs=f"{format_capacity(away)} of pinned memory, PCIe at {format_bandwidth(link)}, and an "
        "optimizer that pages, as bitsandbytes' PagedAdamW; no copy overlaps with the step",
        before=step,
        after=edited.after if edited else step,
        away=away,
        t_away=2 * away / link,
    )


class _Shards:
    """Finds the fewest chips, a power of two, which share a step so that it fits each of them.

    traced: makes its traces.  edited: gives the step with a change alone.  again: the change that
    runs layers again, if there is one.  gathered: bytes that a trace has shown each chip to hold
    until the optimizer runs, beside its shares, the layer that runs and what no chip shares.
    """

    def __init__(
        self,
        step: Estimate,
        traced: OverChips | None,
        edited: Callable[[StepChange], WhatIf | None],
        again: Sequence[StepChange],
    ) -> None:
        self.step, self.traced, self.edited, self.again = step, traced, edited, again
        self.gathered: float | None = None
        self._ways: dict[tuple[str, int], WhatIf | None] = {}
        self._fullest: dict[str, Callable[[int], tuple[float, float]]] = {}

    def way(self, change: StepChange) -> WhatIf | None:
        """The step over chips, and with another change; None where no number of them is enough."""
        if self.traced is None or not self._enough(change, 0.0):
            return None
        if self.gathered is None:
            self._learn(change)
        short: list[int] = []
        while self.gathered is not None and len(short) < _TRACES:
            number = self._enough(change, self.gathered, short)
            way = self._over(number, change) if number else None
            if way is None or way.fits:
                return way
            short.append(number)
        return None

    def _learn(self, change: StepChange) -> None:
        """Learn what is gathered from a trace that may be the answer, for some change.

        What is taken to be there at a time: the weights of the next layer, and the gradients of one
        as they were made and, in fp32, as they are added up over the chips.
        """
        graph = self.step.graph
        weights = [graph.values[i] for i in graph.external if graph.values[i].role == "weights"]
        wide = 4 * sum(held.elements for held in weights) / max(sum(h.nbytes for h in weights), 1)
        guess = (2 + wide) * max(_weights_of_layers(graph), default=0)
        for each in (change, *self.again):
            if number := self._enough(each, guess):
                self._over(number, each)
                return
        self._over(self._enough(change, 0.0), change)

    def _over(self, number: int, change: StepChange) -> WhatIf | None:
        """The step over so many chips, traced once; None where that cannot be traced."""
        key = change.action, number
        if key not in self._ways:
            self._ways[key] = self._traced(number, change)
        return self._ways[key]

    def _traced(self, number: int, change: StepChange) -> WhatIf | None:
        assert self.traced is not None
        again = self.edited(change) is not None
        try:
            after = Study(self.step).estimate(Variant(graph=self.traced(number, again)))
        except (RequestError, ValueError):
            return None
        self.gathered = _fullest(after)(1)[0] - self._fullest[change.action](number)[0]
        return WhatIf(
            lever="memory",
            action=f"Shard over {number} chips (FSDP2){_also(change)}",
            option=f"--mesh dp={number}" + " --checkpoint full" * again,
            needs=f"{number} chips, which share weights, gradients and states; each takes this "
            f"batch: {number} times the samples",
            before=self.step,
            after=after,
        )

    def _alone(self, change: StepChange) -> Estimate:
        """The step with a change, on one chip."""
        edited = self.edited(change)
        return edited.after if edited else self.step

    def _enough(self, change: StepChange, gathered: float, short: Sequence[int] = ()) -> int:
        """The first of 2, 4 ... chips on which it should fit, not those in `short`; else 0."""
        alone, number = self._alone(change), 2
        if change.action not in self._fullest:
            self._fullest[change.action] = _fullest(alone)
        fullest = self._fullest[change.action]
        held = [tensor for tensor in alone.memory.tensors if tensor.role in _SHARED]
        rows = max((tensor.shape[0] for tensor in held if tensor.shape), default=0)
        while number < 2 * rows:  # no more chips have a part of a weight
            running, updating = fullest(number)
            most = max(running + gathered, updating)
            if number not in short and most <= _ABOUT * self.step.chip.room():
                return number
            number *= 2
        return 0


_TRACES = 3
"""How many numbers of chips are traced for one answer."""
_ABOUT = 1.02
"""A peak that should be up to so many times the room is traced: it may fit."""
_SHARED = ("weights", "gradients", "optimizer", OPTIMIZERS)
"""The kinds of bytes of which each chip has its part."""


def _fullest(step: Estimate) -> Callable[[int], tuple[float, float]]:
    """The most bytes of a chip before the optimizer and in it, by how many chips share the weights.

    A chip has whole rows of each weight, as in FSDP2, and all of the layer that runs.
    """
    held = [tensor for tensor in step.memory.tensors if tensor.role in _SHARED and tensor.shape]
    moments, layers = step.memory.timeline.moments, _weights_of_layers(step.graph)
    sizes = numpy.array([moment.sizes for moment in moments], float)
    shared = sizes[:, [KINDS.index(kind) for kind in _SHARED]].sum(axis=1)
    updates = numpy.array([moment.part == PARTS[3] for moment in moments])
    whole = numpy.array([layers[moment.op] for moment in moments]) * ~updates

    def over(chips: int) -> tuple[float, float]:
        rows = sum(h.bytes / h.shape[0] * math.ceil(h.shape[0] / chips) for h in held)
        away = 1 - rows / max(sum(h.bytes for h in held), 1)
        bytes_of = sizes.sum(axis=1) - away * (shared - whole)
        running, updating = (bytes_of[part].max(initial=0.0) for part in (~updates, updates))
        return float(running), float(updating)

    return over


def _weights_of_layers(graph: OpGraph) -> list[int]:
    """Bytes of the weights that the layer of each op reads; 0 outside of layers."""
    read: dict[str, set[int]] = {"": set()}
    layers = [_layer(op.module) for op in graph.ops]
    for layer, op in zip(layers, graph.ops, strict=True):
        storages = {graph.values[i].storage for i in op.inputs if graph.values[i].role == "weights"}
        read.setdefault(layer, set()).update(storages if layer else ())
    weights = {layer: sum(graph.values[i].nbytes for i in read[layer]) for layer in read}
    return [weights[layer] for layer in layers]


def _also(change: StepChange) -> str:
    return f", and {change.action}" if change.action else ""


_AS_IT_IS = StepChange(lever="memory", action="", needs="")


def _smaller_batch(
    step: Estimate, at_batch: AtBatch | None, change: StepChange, edited: WhatIf | None
) -> WhatIf | None:
    """The step in several smaller batches, with another change; None where no batch fits.

    edited: the step with that change alone.  The number of batches is the least divisor of the
    batch for which the peak should fit, or the next.
    """
    batch, memory = int(step.graph.workload.get("batch") or 1), step.memory
    peak = memory.peak if edited is None else edited.peak
    held = memory.weights + memory.gradients + (edited.after if edited else step).memory.optimizer
    parts = [number for number in range(2, batch + 1) if not batch % number]
    enough = [number for number in parts if held + (peak - held) / number <= step.chip.room()]
    for number in enough[:2]:
        if at_batch is None:
            return None
        try:
            graph = at_batch(batch // number)
        except RequestError:
            return None
        after = Study(step).estimate(Variant(graph=change.edited(graph) or graph))
        also = f"{change.action[:1].upper()}{change.action[1:]}, in " if change.action else "In "
        adding = " whose gradients add up" if step.phase == "training" else ""
        way = WhatIf(
            lever="memory",
            action=f"{also}{number} batches of {batch // number}{adding}",
            option=f"--batch {batch // number}" if not change.edits else "",
            needs=change.needs or "the same samples, a part at a time",
            before=step,
            after=after,
            runs=number,
        )
        if way.fits:
            return way
    return None


# -- edits -----------------------------------------------------------------------------------------


def _layers_of(graph: OpGraph) -> list[list[Op]]:
    """The ops of forward of each item of a list of modules, in order."""
    layers: dict[tuple[str, tuple[int, ...]], list[Op]] = {}
    for op in graph.ops:
        path = _layer(op.module)
        if path and op.part == "forward":
            layers.setdefault((path, op.repeats), []).append(op)
    return [*layers.values()]


def with_checkpoints(graph: OpGraph, first: int | None = None) -> OpGraph:
    """Layers keep nothing for backward but their inputs, and run again in front of it.

    A layer is an item of a list of modules.  As `torch.utils.checkpoint` does, it runs again up to
    the last value that backward reads.  first: how many layers; all by default.
    """
    graph = graph if first is None else graph.expand()
    layers = _layers_of(graph)[:first]
    edit, ops, weights = Editor(graph), list(graph.ops), {*graph.external}
    again: dict[int, list[Op]] = {}  # before the op of this number
    instead: dict[int, int] = {}
    backward = [op for op in graph.ops if op.part == "backward"]
    reads = [ref.then for op in graph.ops for ref in op.reads]
    handed_on = {then.value for then in reads if then is not None}  # to the next iteration
    for forward in layers:
        inside = {op.id for op in forward}
        made = {value for op in forward for value in op.outputs} - handed_on
        outside = (op for op in graph.ops if op.part == "forward" and op.id not in inside)
        made -= {value for op in outside for value in op.inputs}
        readers = [op for op in backward if not made.isdisjoint(op.inputs)]
        if not readers:
            continue
        saved = {value for op in readers for value in op.inputs} & made
        last = max(op.id for op in forward if not saved.isdisjoint(op.outputs))
        now = _copied(edit, [op for op in forward if op.id <= last], again, readers[0].id)
        for op in ops:
            if op.holds and op.id not in inside:
                holds = tuple(ref for ref in op.holds if ref.id not in made)
                ops[op.id] = replace(op, holds=holds)
        for op in readers:
            ops[op.id] = reading_others(ops[op.id], now)
        # As torch does, hold the inputs of the layer until its backward has ended.
        inputs = [r for op in forward for r in op.reads if r.id not in made and r.id not in weights]
        end = ops[readers[-1].id]
        ops[end.id] = replace(end, holds=in_order((*end.holds, *inputs)))
        instead |= now
    for value in {value for op in ops if op.part == "backward" for value in op.outputs}:
        if edit.values[value].storage in instead:  # a view
            storage = instead[edit.values[value].storage]
            edit.values[value] = replace(edit.values[value], storage=storage)
    for op in ops:
        edit.ops += again.get(op.id, ())
        edit.ops.append(op)
    return edit.done().verify()


def layer_lists(graph: OpGraph) -> list[str]:
    """The lists of modules whose items `with_checkpoints` runs again, by their paths."""
    paths = (_layer(op.module) for op in graph.ops if op.part == "forward")
    return sorted({path.rpartition(".")[0] or "the model" for path in paths if path})


def _layer(path: str) -> str:
    """The path of the outermost item of a list of modules that a path leads into; "" for none."""
    parts = path.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdigit()), None)
    return "" if number is None else ".".join(parts[: number + 1])


def _copied(
    edit: Editor, forward: Sequence[Op], again: dict[int, list[Op]], place: int
) -> dict[int, int]:
    """Put copies of ops in front of an op; the values that they make, by those of the originals."""
    now: dict[int, int] = {}
    for op in forward:
        for value in op.outputs:
            tensor = edit.values[value]
            now[value] = len(edit.values)
            storage = now.get(tensor.storage, tensor.storage)
            edit.values.append(replace(tensor, storage=storage, name="", then=None))
        outputs = tuple(now[value] for value in op.outputs)
        op = reading_others(replace(op, holds=()), now)
        again.setdefault(place, []).append(replace(op, part="recompute", outputs=outputs))
    return now


SMALLEST = 4096
"""States of fewer numbers stay in 32 bits (`min_8bit_size` of bitsandbytes' optimizers)."""


def with_small_states(graph: OpGraph) -> OpGraph:
    """The states of the optimizer have 8 bits, and one kernel updates all, as in bitsandbytes.

    Its scale for each block of 256 numbers is not counted.
    """
    graph = with_fused_optimizer(graph)
    fused = [op for op in graph.ops if op.name.startswith("aten._fused_")]
    states = {value for op in fused for value in refs({n: op.arguments.get(n) for n in _STATES})}
    large = {value for value in states if graph.values[value].elements >= SMALLEST}
    small = [replace(t, dtype="uint8") if t.storage in large else t for t in graph.values]
    return graph.replace(values=tuple(small))


_STATES = ("exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "momentum_buffer_list", "state_sums")
