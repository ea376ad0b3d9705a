"""A trace of torch.profiler as one side of a comparison: its steps folded into one.

The unit is a call by the code of the model ("aten::linear"), with every kernel that is launched
inside of it.  The most frequent sequence of calls is the reference; the calls of other steps are
matched to it in order, and calls that it lacks are inserted, with their share of the steps.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from rooftrace.diffs.runs.rundiff import (
    MeasuredCall,
    MeasuredKernel,
    MeasuredSide,
    family_of_kernel,
    family_of_op,
    is_communication,
)
from rooftrace.errors import ProfileError
from rooftrace.hardware import units
from rooftrace.measured.alignment import keys
from rooftrace.measured.fit import idleness_of
from rooftrace.measured.profiles import Trace, TraceStep, records

_CALL = re.compile(r"\w+::\w+(\.\w+)?")
"""The name of an op of the dispatcher; ranges of autograd and of compiled code have others."""
_GRAPH = re.compile(r"^graph_\d+_(?=\w*fused)")
_TYPES: Mapping[str, str] = {
    "float": "fp32",
    "double": "fp64",
    "c10::BFloat16": "bf16",
    "c10::Half": "fp16",
    "c10::Float8_e4m3fn": "fp8",
    "c10::Float8_e5m2": "fp8e5",
    "long int": "int64",
    "long": "int64",
    "int": "int32",
    "signed char": "int8",
    "unsigned char": "uint8",
}
_OPERANDS = 4
"""Operands of a call of which the sizes are kept."""

_Kernels: TypeAlias = tuple[tuple[str, str, str], ...]
"""The name, the kind and the family of each kernel of a call."""


class _StepCall(NamedTuple):
    """One call in one step."""

    call: MeasuredCall  # without its kernels
    kernels: _Kernels
    seconds: Sequence[float]  # of each kernel


class _SequenceCall:
    """A call of the folded sequence, over all steps."""

    def __init__(self, call: MeasuredCall, kernels: _Kernels, steps: int) -> None:
        self.call, self.kernels, self.calls = call, kernels, 0
        self.seconds = [[0.0] * steps for _ in kernels]

    def add(self, step: int, seconds: Sequence[float]) -> None:
        """The call of one step."""
        self.calls += 1
        for by_step, more in zip(self.seconds, seconds, strict=True):
            by_step[step] += more

    def over(self, steps: int) -> MeasuredCall:
        """The call with the seconds of its kernels in each step; steps: their number."""
        kernels = (
            MeasuredKernel(
                name=name,
                kind=kind,
                count=self.calls / steps,
                seconds=tuple(seconds),
                family=family,
            )
            for (name, kind, family), seconds in zip(self.kernels, self.seconds, strict=True)
        )
        return replace(self.call, kernels=tuple(kernels))


@dataclass(frozen=True, slots=True)
class GraphPlace:
    """The position of a call in the graph of the measured code."""

    module: str
    pattern: str
    family: str


def side_of_trace(
    trace: Trace,
    label: str,
    places: Mapping[int, GraphPlace] | None = None,
) -> MeasuredSide:
    """The steps of a trace as one side.

    places: positions of ops of the trace, by index, in the graph of the measured code.  Raises
    ProfileError for a file of several ranks.
    """
    if trace.processes > 1:
        raise ProfileError(
            f"{label}: ops of {trace.processes} processes in one file, each a rank of its own; "
            "compare files of one rank (torch.profiler writes one for each)"
        )
    reader = _StepReader(trace, places or {})
    steps = [reader.instances(step) for step in trace.steps]
    if trace.on_device:
        figures = [step_figures(trace, step) for step in trace.steps]
    else:
        figures = [host_figures(step, reader.spans(step)) for step in trace.steps]
    for figure, step in zip(figures, steps, strict=True):
        figure["work"] = sum(sum(instance.seconds) for instance in step)
        if not trace.on_device:
            figure["kernels"] = sum(len(instance.kernels) for instance in step)
    return MeasuredSide(
        device=units.listed(sorted(set(trace.devices.values()))) if trace.devices else "",
        on_device=trace.on_device,
        figures={name: tuple(f[name] for f in figures) for name in figures[0]},
        middle="mean",
        calls=folded(steps),
        notes=tuple(_notes(trace)),
    )


def _notes(trace: Trace) -> Iterable[str]:
    """Remarks on the steps of a trace."""
    if len(trace.steps) == 1 and trace.steps[0].name == records.WHOLE:
        yield (
            "no steps are marked in it: the whole trace counts as one step; call the profiler's "
            "step(), or record_function('step')"
        )
    if not trace.has_shapes:
        yield "no input shapes in it (record_shapes=True): calls are told apart without sizes"
    devices = set(trace.kernels.device) - {records.NONE}
    if len(devices) > 1:
        yield f"kernels of {len(devices)} devices: busy is when any of them works"
    waited = sum(step.waited for step in trace.steps)
    if waited:
        yield (
            f"{units.format_time(waited)} in which the host waited for work from before the trace "
            "begins are left out"
        )
    idle = idleness_of(trace)
    if idle is not None and idle.calls:
        yield f"calls of the host while the device is idle: {idle.calls}"
    if trace.damage:
        yield trace.damage
    for placed in trace.placements:
        if placed.how not in (records.LAUNCH, records.OP):
            count = units.plural(placed.kernels + placed.copies, "kernel")
            yield f"{count} of it ({units.format_time(placed.seconds)}) {placed.how}"


class _StepReader:
    """Reads the calls of steps."""

    def __init__(self, trace: Trace, places: Mapping[int, GraphPlace]) -> None:
        self.trace = trace
        self.paths = module_paths(trace.ops.stacks.items)
        self._roots: dict[int, int] = {}
        self.places: dict[int, GraphPlace] = {}
        for op, place in places.items():
            earlier = self.places.get(self.root(op))
            # Of several ops of a call, another family says more than elementwise.
            if earlier is None or earlier.family in ("elementwise", "other"):
                self.places[self.root(op)] = place
        self._sizes: dict[int, str] = {}
        self._families: dict[tuple[int, ...], str] = {}  # by ops and name of a kernel

    def root(self, op: int) -> int:
        """The outermost op of the dispatcher around an op; the op itself where none is."""
        if op not in self._roots:
            ops = self.trace.ops
            outermost, above = op, op
            while above != records.NONE:
                if _CALL.fullmatch(ops.names.items[ops.name[above]]):
                    outermost = above
                above = ops.parent[above]
            self._roots[op] = outermost
        return self._roots[op]

    def instances(self, step: TraceStep) -> list[_StepCall]:
        """The calls of a step with their kernels, in order; on a host every call."""
        return self._on_device(step) if self.trace.on_device else self._on_host(step)

    def _on_device(self, step: TraceStep) -> list[_StepCall]:
        kernels = self.trace.kernels
        grouped: dict[int, list[int]] = {}
        # Kernels of a CUDA graph have one launch: they are in the order of their streams.
        for index in sorted(step.kernels, key=self._launch):
            op = kernels.op[index]
            # A kernel without an op is a separate call, with a negative key.
            group = -2 - index if op == records.NONE else self.root(op)
            grouped.setdefault(group, []).append(index)
        instances = []
        for group, launched in grouped.items():
            named = tuple(
                (
                    kernels.names.items[kernels.name[i]],
                    records.KINDS[kernels.kind[i]],
                    self._family_of(group, i),
                )
                for i in launched
            )
            call = self._call(group, {family for _, _, family in named})
            instances.append(_StepCall(call, named, [kernels.duration[i] for i in launched]))
        return instances

    def _launch(self, kernel: int) -> tuple[float, int, float]:
        kernels = self.trace.kernels
        start, launched = kernels.start[kernel], kernels.launched[kernel]
        return (launched if launched >= 0 else start), kernels.stream[kernel], start

    def _on_host(self, step: TraceStep) -> list[_StepCall]:
        ops = self.trace.ops
        instances = []
        for op in step.ops:
            if self.root(op) != op:
                continue
            name = self._name(op)
            # Ranges around calls of the dispatcher count without them.
            seconds = ops.duration[op] if _CALL.fullmatch(name) else ops.self_duration[op]
            family = self._family_of(op)
            call = self._call(op, {family})
            instances.append(_StepCall(call, ((name, "op", family),), [seconds]))
        return instances

    def spans(self, step: TraceStep) -> list[tuple[float, float]]:
        """(start, end) of each outermost op of a step."""
        ops = self.trace.ops
        outermost = (op for op in step.ops if ops.parent[op] == records.NONE)
        return [(ops.start[op], ops.start[op] + ops.duration[op]) for op in outermost]

    def _call(self, op: int, families: Collection[str]) -> MeasuredCall:
        """A call without its kernels; families: of these."""
        family = next(iter(families)) if len(families) == 1 else "other"
        if op < 0:
            return MeasuredCall(name="", family=family)
        ops = self.trace.ops
        place = self.places.get(op)
        if place is None:
            stack = ops.stacks.items[ops.modules[op]] if ops.modules[op] != records.NONE else ()
            # Paths of classes do not mix with paths of the graph.
            path, pattern = ("", "") if self.places else self.paths[stack]
            place = GraphPlace(path, pattern, family)
        return MeasuredCall(
            name=self._name(op),
            sizes=self._sizes_of(ops.inputs[op]),
            module=place.module,
            pattern=place.pattern,
            part=self._part(op),
            family=place.family,
        )

    def _name(self, op: int) -> str:
        """The name of a call; of a kernel of Inductor, without the number of its graph."""
        return _GRAPH.sub("", self.trace.ops.names.items[self.trace.ops.name[op]])

    def _part(self, op: int) -> str:
        ops = self.trace.ops
        while op != records.NONE:
            if ops.backward[op] or ops.names.items[ops.name[op]].startswith("autograd::engine"):
                return "backward"
            op = ops.parent[op]
        return ""

    def _sizes_of(self, number: int) -> str:
        """The tensors of a call: "bf16[8, 64] bf16[64, 64]"."""
        if number == records.NONE:
            return ""
        if number not in self._sizes:
            inputs: records.CallInputs = self.trace.ops.call_inputs.items[number]
            texts = []
            for position, shape in enumerate(inputs.shapes):
                if shape:
                    written = inputs.types[position] if position < len(inputs.types) else ""
                    texts.append(f"{_TYPES.get(written, written)}{_sized(shape)}")
            self._sizes[number] = " ".join(texts[:_OPERANDS])
        return self._sizes[number]

    def _family_of(self, op: int, kernel: int = records.NONE) -> str:
        """The family of one kernel of a call: by the call's place in the graph or its rule.

        Else by the op that launched the kernel, else by the name of the kernel.  Without a kernel
        it is that of a call on the host.
        """
        ops, kernels = self.trace.ops, self.trace.kernels
        if op in self.places:
            return self.places[op].family
        inside = [] if op < 0 else [op]
        name, kind, launcher = records.NONE, "op", records.NONE
        if kernel != records.NONE:
            name, kind = kernels.name[kernel], records.KINDS[kernels.kind[kernel]]
            launcher = kernels.op[kernel]
        while launcher not in (op, records.NONE):  # the innermost first
            inside.append(launcher)
            launcher = ops.parent[launcher]
        key = (name, kernels.kind[kernel] if name >= 0 else name, *(ops.name[i] for i in inside))
        if key not in self._families:
            called = kernels.names.items[name] if name >= 0 else self._name(op)
            by_op = [family_of_op(str(ops.names.items[ops.name[i]])) for i in inside]
            plain = next((f for f in by_op if f not in ("", "elementwise")), "")
            by_name = family_of_kernel(called, kind)
            if not plain and by_name in ("communication", "copies"):
                plain = by_name
            fallback = "elementwise" if "elementwise" in by_op else by_name
            self._families[key] = plain or fallback
        return self._families[key]


def _sized(shape: Sequence[object]) -> str:
    if shape and isinstance(shape[0], tuple):
        more = f" and {len(shape) - 1} more" if len(shape) > 1 else ""
        return f"({list(shape[0])}{more})"
    return str(list(shape))


# -- steps into one --------------------------------------------------------------------------------


def folded(steps: Sequence[Sequence[_StepCall]]) -> tuple[MeasuredCall, ...]:
    """The calls of all steps as one sequence; every second of every step is in it."""
    identities = [tuple((each.call, each.kernels) for each in step) for step in steps]
    reference, _ = Counter(identities).most_common(1)[0]
    slots = [_SequenceCall(call, kernels, len(steps)) for call, kernels in reference]
    extra: dict[tuple[int, object, int], _SequenceCall] = {}
    for number, (step, calls) in enumerate(zip(steps, identities, strict=True)):
        if calls == reference:
            pairs: Iterable[tuple[int, int]] = ((i, i) for i in range(len(slots)))
        else:
            pairs = keys.common(calls, reference)  # type: ignore[arg-type]  # compares only
        anchors = dict(pairs)
        anchor, seen = -1, Counter[object]()
        for index, instance in enumerate(step):
            if index in anchors:
                anchor = anchors[index]
                slots[anchor].add(number, instance.seconds)
                continue
            seen[anchor, calls[index]] += 1
            key = (anchor, calls[index], seen[anchor, calls[index]])
            if key not in extra:
                extra[key] = _SequenceCall(instance.call, instance.kernels, len(steps))
            extra[key].add(number, instance.seconds)
    ordered = [(index, 0, slot) for index, slot in enumerate(slots)]
    ordered += [(anchor, 1, slot) for (anchor, _, _), slot in extra.items()]
    ordered.sort(key=lambda entry: entry[:2])
    return tuple(slot.over(len(steps)) for _, _, slot in ordered)


# -- module paths ----------------------------------------------------------------------------------
# A profiler numbers the modules of a class through the model ("Linear_17"), so one more module
# shifts all numbers after it.  Here they are numbered inside of the module around them
# ("Linear.2"), so that paths of two traces agree.

Stack = tuple[str, ...]
"""Modules by their class and number, outermost first: ("Bert_0", "Linear_17")."""

_WRAPPER = re.compile(
    r"(OptimizedModule|DistributedDataParallel|DataParallel|FullyShardedDataParallel)_\d+"
)
"""Modules of torch around one of the user: with and without them it is the same path."""
_NUMBERED = re.compile(r"(.*)_(\d+)")


def module_paths(stacks: Iterable[Stack]) -> Mapping[Stack, tuple[str, str]]:
    """The path of each stack, and that path with the numbers of repeated blocks starred.

    Along a path the first module with siblings of its class is a repeated block, and so is every
    later one with modules inside; the number of a leaf tells q from k and v, and stays.
    """
    stacks = list(stacks)
    plain = {stack: _unwrapped(stack) for stack in stacks}
    paths = _paths(set(plain.values()))
    return {(): ("", ""), **{stack: paths[plain[stack]] for stack in stacks}}


def _unwrapped(stack: Stack) -> Stack:
    return tuple(module for module in stack if not _WRAPPER.fullmatch(module))


def _paths(stacks: Iterable[Stack]) -> dict[Stack, tuple[str, str]]:
    inside: dict[Stack, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    prefixes = {stack[:depth] for stack in stacks for depth in range(1, len(stack) + 1)}
    for stack in prefixes:
        kind, number = _parts(stack[-1])
        inside[stack[:-1]][kind].add(number)
    order = {
        (above, kind): {number: index for index, number in enumerate(sorted(numbers))}
        for above, kinds in inside.items()
        for kind, numbers in kinds.items()
    }
    paths: dict[Stack, tuple[str, str]] = {(): ("", "")}
    for stack in sorted(prefixes, key=len):
        path, pattern = paths[stack[:-1]]
        kind, number = _parts(stack[-1])
        siblings = order[stack[:-1], kind]
        name = starred = f"{kind}.{siblings[number]}"
        if len(siblings) == 1:
            starred = kind
        elif stack in inside or "*" not in pattern:
            starred = f"{kind}.*"
        paths[stack] = (_joined(path, name), _joined(pattern, starred))
    return paths


def _parts(module: str) -> tuple[str, int]:
    match = _NUMBERED.fullmatch(module)
    return (match[1], int(match[2])) if match else (module, 0)


def _joined(above: str, name: str) -> str:
    return f"{above}/{name}" if above else name


# -- parts of a step -------------------------------------------------------------------------------
# The parts of a step exclude each other and add up to its time.  Communication under a kernel that
# computes is hidden; the rest is exposed.


Interval: TypeAlias = tuple[float, float]
"""(start, end) [s]."""

_ROUNDING = 1e-12
"""Seconds: traces have nanoseconds."""


def step_figures(trace: Trace, step: TraceStep) -> dict[str, float]:
    """Every metric of a step but `work`, by name in METRICS."""
    kernels = trace.kernels
    names = kernels.names.items
    computing: list[Interval] = []
    communicating: list[Interval] = []
    copying: list[Interval] = []
    for index in step.kernels:
        start = kernels.start[index]
        span = (start, start + kernels.duration[index])
        if is_communication(names[kernels.name[index]]):
            communicating.append(span)
        elif kernels.kind[index]:
            copying.append(span)
        else:
            computing.append(span)
    under = _length(computing)
    with_communication = _length([*computing, *communicating])
    busy = _length([*computing, *communicating, *copying])
    communication, exposed = _length(communicating), _less(with_communication, under)
    idle = _less(step.seconds, busy)
    waiting, queued = _gaps(trace, step)
    waiting = min(waiting, idle)
    queued = min(queued, _less(idle, waiting))
    return {
        "time": busy + idle,
        "device": busy,
        "computing": under,
        "communication": communication,
        "hidden": _less(communication, exposed),
        "exposed": exposed,
        "copying": _less(busy, with_communication),
        "idle": idle,
        "waiting": waiting,
        "queued": queued,
        "outside": _less(idle, waiting + queued),
        "kernels": sum(not kernels.kind[index] for index in step.kernels),
        "copies": sum(bool(kernels.kind[index]) for index in step.kernels),
    }


def host_figures(step: TraceStep, calls: Iterable[Interval]) -> dict[str, float]:
    """The metrics of a step of a trace without kernels; calls: (start, end) of each call."""
    clipped = [(max(a, step.start), min(b, step.start + step.duration)) for a, b in calls]
    inside = _length([(a, b) for a, b in clipped if a < b])
    idle = _less(step.seconds, inside)
    return {"time": inside + idle, "device": inside, "idle": idle}


def _gaps(trace: Trace, step: TraceStep) -> tuple[float, float]:
    """Seconds of gaps between kernels before, and after, the host launched the next one."""
    kernels = trace.kernels
    waiting = queued = 0.0
    end: float | None = None
    for index in sorted(step.kernels, key=kernels.start.__getitem__):
        start = kernels.start[index]
        if end is not None and start > end:
            launched = kernels.launched[index]
            late = max(0.0, min(launched, start) - end) if launched >= 0 else 0.0
            waiting += late
            queued += start - end - late
        end = max(end or start, start + kernels.duration[index])
    return waiting, queued


def _less(seconds: float, part: float) -> float:
    """Seconds less a part of them; 0 for a remainder of rounding."""
    left = seconds - part
    return left if left > _ROUNDING else 0.0


def _length(intervals: Sequence[Interval]) -> float:
    """Seconds that intervals cover together."""
    return records.busy_and_gaps(intervals)[0]
