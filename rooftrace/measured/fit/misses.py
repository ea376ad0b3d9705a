"""Measured seconds of a row by op, and likely reasons for the miss of each kernel."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rooftrace.costmodels.estimates import Estimate, Row
from rooftrace.costmodels.kernels import engines
from rooftrace.costmodels.ops import COMPUTED, MATRIX
from rooftrace.hardware.units import format_share, format_time
from rooftrace.measured.alignment import Alignment, Stray, keys
from rooftrace.measured.bench import ModelRow

# -- row seconds -----------------------------------------------------------------------------------
# A replay names ops by id.  The profiler sums equal calls, by name and input shapes, without inner
# calls and, in newer runs, also with them.

_FEWEST = 0.8
"""Share of the graph's calls of an op that a run must have to match them: a mixture of experts that
routes its tokens otherwise has few calls of these sizes."""

# The profiler counts a kernel for the innermost op, which a graph has under another name or only as
# a part of another op: (pattern, common name, number of shapes that distinguish two calls).
_INNERMOST: tuple[tuple[re.Pattern[str], str, int], ...] = tuple(
    (re.compile(pattern), name, shapes)
    for pattern, name, shapes in (
        # Casts and layout changes end in copy_.
        (r"aten::(_to_copy|clone|copy|contiguous)", "copy", 1),
        # The convolution of each backend is called inside of aten::convolution.
        (r"aten::(cudnn_|miopen_|mkldnn_|_slow_|slow_|thnn_)?_?conv(olution|_depthwise|2d|3d)\w*"
         r"(?<!backward)", "convolution", 2),
        (r"aten::(convolution|_slow_conv2d|mkldnn_convolution)_backward", "convolution back", 3),
        # Kernels of attention are launched inside of the op with the layout of the model.
        (r"aten::_(flash|efficient|cudnn)_attention_forward|attention", "attention", 0),
        # A CPU runs an LSTM layer by layer.
        (r"aten::mkldnn_rnn_layer|rnn", "rnn", 0),
        (r"aten::mkldnn_rnn_layer_backward|rnn_backward", "rnn_backward", 0),
        # stack calls cat; embedding calls index_select; relu is clamp_min on a GPU.
        (r"aten::(cat|stack)", "cat", 0),
        (r"aten::(embedding|index_select)", "embedding", 1),
        (r"aten::(relu|clamp_min)", "relu", 1),
        (r"aten::(_index_put_impl|_?index_put|_unsafe_index_put)", "index put", 1),
        # Dropout draws its mask by bernoulli_ on a CPU.
        (r"aten::(bernoulli|native_dropout)", "dropout", 1),
        # An optimizer's step on many tensors falls back to one op for each.
        (r"aten::_foreach_(\w+)", r"foreach \1", 0),
    )
)  # fmt: skip


@dataclass(frozen=True)
class RowSeconds:
    """The measured seconds of a row by op of its graph."""

    seconds: Mapping[int, float]  # s by op id, all iterations together
    total: float  # s of all ops of the row, unattributed seconds included
    strays: tuple[Stray, ...]  # calls that exceed those of the graph; most seconds first

    @property
    def coverage(self) -> float:
        """Share of the measured seconds that belongs to an op of the graph."""
        return sum(self.seconds.values()) / self.total if self.total else 0.0


def seconds_of_row(row: ModelRow, estimate: Estimate) -> RowSeconds:
    """The measured seconds of a row's ops, by op of `estimate.graph`.

    Calls with the name and shapes of an op belong to it, up to the graph's number of such ops.
    Other calls are parts of ops (a copy, a parameter of an optimizer's step), or strays.  Time of
    calls inside of an op belongs to it too, and is taken from the strays.  Equal ops share seconds
    in proportion to their predicted seconds.
    """
    total = row.attributed + (row.unattributed or 0.0)
    if row.source == "replay":
        return _by_id(row, estimate, total)
    kernels = _KeyedKernels(estimate)
    calls = [(keys.key_of_call(call.target, call.shapes), call) for call in row.ops]
    seen: Counter[tuple[keys.Key, str]] = Counter()  # a key may have wrappers of the same name
    inclusive: dict[tuple[keys.Key, str], float] = defaultdict(float)
    for key, call in calls:
        seen[key, call.target] += call.count
        inclusive[key, call.target] += call.inclusive
    strays: list[Stray] = []
    for key, call in calls:
        if call.seconds <= 0:  # all of it is in the calls inside
            continue
        share = kernels.op_share(key, seen[key, call.target])
        left = 1 - share
        if share:
            kernels.add(kernels.exact[key], call.seconds * share)
        others = kernels.around(key) if share < 1 else ()
        if others:
            kernels.add(others, call.seconds * left)
        elif share < 1:
            strays.append(Stray(call.target, key[1], call.count * left, call.seconds * left))
    with_inner: dict[keys.Key, float] = {}
    for (key, target), seconds in inclusive.items():
        if kernels.op_share(key, seen[key, target]) == 1:
            with_inner[key] = max(seconds, with_inner.get(key, 0.0))
    strays = _less(strays, kernels.fill(with_inner, sum(stray.seconds for stray in strays)))
    strays.sort(key=lambda stray: -stray.seconds)
    return RowSeconds(dict(kernels.seconds), total, tuple(strays))


def _less(strays: Sequence[Stray], seconds: float) -> list[Stray]:
    """Strays less seconds that belong to ops, in proportion, as their strays are unknown."""
    total = sum(stray.seconds for stray in strays)
    if not seconds:
        return list(strays)
    kept = 1 - seconds / total
    if kept < 1e-9:  # but for rounding, all of them
        return []
    return [replace(s, count=s.count * kept, seconds=s.seconds * kept) for s in strays]


class _KeyedKernels:
    """The kernels of an estimate by the keys of calls, and their measured seconds."""

    def __init__(self, estimate: Estimate) -> None:
        graph = estimate.graph
        self.exact: dict[keys.Key, list[int]] = defaultdict(list)
        self.loose: dict[keys.Key, list[int]] = defaultdict(list)
        self.launches: Counter[keys.Key] = Counter()
        self.seconds: dict[int, float] = defaultdict(float)
        for op in graph.ops:
            if op.kind == "kernel":
                key = keys.key_of_op(graph, op)
                self.exact[key].append(op.id)
                self.loose[_innermost(key)].append(op.id)
                self.launches[key] += graph.times(op)
        self._weights: dict[int, float] = defaultdict(float)
        for row in estimate.rows:
            for index in row.ops:
                self._weights[index] += row.timing.t_device / len(row.ops)

    def op_share(self, key: keys.Key, calls: int) -> float:
        """Share of these calls that are ops of the graph, not parts of others."""
        launches = self.launches[key]
        if not launches or calls < _FEWEST * launches:
            return 0.0
        return min(1.0, launches / calls)

    def around(self, key: keys.Key) -> Sequence[int]:
        """The ops that such calls are parts of."""
        exact = self.exact.get(key)
        for name in (_innermost(key), _foreach(key)):
            ops = self.loose.get(name)
            if ops and ops != exact:
                return ops
        return ()

    def fill(self, with_inner: Mapping[keys.Key, float], most: float) -> float:
        """Raise the seconds of ops to those that include inner calls, by at most `most` in all.

        Returns the seconds added.
        """
        missing = {
            key: seconds - sum(self.seconds.get(index, 0.0) for index in self.exact[key])
            for key, seconds in with_inner.items()
        }
        wanted = sum(more for more in missing.values() if more > 0)
        if not wanted:
            return 0.0
        share = min(1.0, most / wanted)
        for key, more in missing.items():
            if more > 0:
                self.add(self.exact[key], more * share)
        return wanted * share

    def add(self, owners: Sequence[int], seconds: float) -> None:
        """Share seconds among ops."""
        total = sum(self._weights[index] for index in owners)
        for index in owners:
            share = self._weights[index] / total if total else 1 / len(owners)
            self.seconds[index] += seconds * share


def _innermost(key: keys.Key) -> keys.Key:
    name, shapes = key
    for pattern, common, count in _INNERMOST:
        match = pattern.fullmatch(name)
        if match:
            return match.expand(common), shapes[:count]
    return key


def _foreach(key: keys.Key) -> keys.Key:
    """The key of the op on all parameters, of which the op on one parameter is a part."""
    return f"foreach {key[0].removeprefix('aten::')}", ()


def _by_id(row: ModelRow, estimate: Estimate, total: float) -> RowSeconds:
    ops = estimate.graph.ops
    seconds: dict[int, float] = {}
    strays: list[Stray] = []
    for call in row.ops:
        if call.id is not None and call.id < len(ops) and ops[call.id].target == call.target:
            seconds[call.id] = seconds.get(call.id, 0.0) + call.seconds
        else:
            strays.append(Stray(call.target, (), call.count, call.seconds))
    return RowSeconds(seconds, total, tuple(strays))


# -- misses ----------------------------------------------------------------------------------------
# A reason comes from the numbers (a share of the bandwidth, kernels that were not fused), never
# from a fit.  Predicted seconds are `t_device`, the gap between kernels included.

CLOSE = 0.2
"""A measurement this near to the prediction, as a share of it, needs no reason."""
SHORT = 10e-6
"""Seconds: below this a kernel is mostly its launch."""
FEW_TILES = 0.7
"""Share of the tiles' work that is useful, below which the shape is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One row of an estimate with its measurement."""

    row: Row
    predicted: float  # s, all launches of the row
    measured: float | None  # s, of the same launches; None where the run has none of its ops
    measured_ops: int  # number of its ops that the run has
    kernels: float | None  # that the run launched for one of ours; None: unknown
    reason: str  # why the two differ, as far as the numbers show; "" where they are close

    @property
    def miss(self) -> float:
        """measured - predicted [s]; a kernel that is not in the run counts as measured 0."""
        return (self.measured or 0.0) - self.predicted


def nodes(estimate: Estimate, measured: Alignment | Mapping[int, float]) -> tuple[Node, ...]:
    """Every kernel of `estimate` with its measurement, in the order of its rows.

    measured: an alignment with `estimate.graph`, or seconds by op id of that graph, all iterations
    together (a run that timed op by op).
    """
    seconds = measured.seconds if isinstance(measured, Alignment) else measured
    launched: Mapping[int, float] = {}
    if isinstance(measured, Alignment) and measured.trace.on_device:
        launched = {op: measurement.kernels for op, measurement in measured.measured.items()}
    launches = launches_by_op(estimate)
    is_same = not isinstance(measured, Alignment) or measured.trace.kind == estimate.chip.kind
    return tuple(_node(estimate, r, seconds, launched, launches, is_same) for r in estimate.rows)


def launches_by_op(estimate: Estimate) -> Counter[int]:
    """Launches by op id: an op may be in two rows, at the edge of iterations."""
    launches: Counter[int] = Counter()
    for row in estimate.rows:
        launches.update(dict.fromkeys(row.ops, row.count))
    return launches


def worst(kernels: tuple[Node, ...], count: int = 20) -> tuple[Node, ...]:
    """The nodes with the largest |measured - predicted|, largest first."""
    return tuple(sorted(kernels, key=lambda node: (-abs(node.miss), node.row.index))[:count])


def _node(
    estimate: Estimate,
    row: Row,
    seconds: Mapping[int, float],
    launched: Mapping[int, float],
    launches: Mapping[int, int],
    is_same: bool,
) -> Node:
    """is_same: whether a device of the chip's kind was measured; of another one no reason holds."""
    predicted = row.timing.t_device
    timed = [op for op in row.ops if op in seconds]
    measured = kernels = None
    reason = "not in the run"
    if timed:
        measured = sum(seconds[op] * row.count / launches[op] for op in timed)
        if all(op in launched for op in timed):
            kernels = sum(launched[op] for op in timed)
        reason = _reason(estimate, row, measured, kernels) if is_same else ""
        if len(timed) < len(row.ops):
            part = f"{len(timed)} of its {len(row.ops)} ops are in the run"
            reason = f"{part}; {reason}" if reason else part
    return Node(
        row=row,
        predicted=predicted,
        measured=measured,
        measured_ops=len(timed),
        kernels=kernels,
        reason=reason,
    )


def _reason(estimate: Estimate, row: Row, measured: float, kernels: float | None) -> str:
    predicted = row.timing.t_device
    if measured <= 0:
        return "no time in the run: it launches nothing"
    if abs(measured - predicted) <= CLOSE * predicted:
        return ""
    if not row.known:
        return "no rule: only its bytes are counted"
    slower = measured > predicted
    if slower and len(row.ops) > 1 and kernels is not None and kernels >= 2:
        return f"not fused in the run: {kernels:.0f} kernels for one"
    each, work = measured / row.count, (predicted - row.timing.gap) / row.count
    if slower and each < SHORT and work < 0.5 * each:
        return f"launch bound: {format_time(each)} kernel with {format_time(work)} of work"
    regime = row.timing.regime
    if regime == "launch":
        return f"launch bound: {format_time(each)}, predicted {format_time(predicted / row.count)}"
    if regime == "hbm":
        share = row.bytes / measured / estimate.chip.memory_bandwidth.value
        if share > 1:
            return f"{format_share(share)} of HBM bandwidth: caches hold what is counted as moved"
        return f"predicted HBM-bound, achieved {format_share(share)} of bandwidth"
    if regime == "network":
        share = row.timing.t_net / measured
        return f"predicted network-bound, achieved {format_share(share)} of the link"
    return _compute_reason(estimate, row, measured)


def _compute_reason(estimate: Estimate, row: Row, measured: float) -> str:
    """The reason for a compute-bound kernel: a shape that wastes tiles, or a share of the peak."""
    cost, chip = estimate.plan.costs[row.index], estimate.chip
    at_peak = 0.0  # seconds
    shapes: list[tuple[int, tuple[float, int, float]]] = []
    for work, flop in cost.work.items():
        if work.count in COMPUTED:
            at_peak += (
                row.count * flop / chip.peak(*engines.engine_of(work, chip, estimate.execution))
            )
            if work.operation in MATRIX and work.shape is not None:
                shapes.append((flop, work.shape))
    achieved = format_share(at_peak / measured)
    used = at_peak / row.timing.t_comp if row.timing.t_comp else 1.0
    if at_peak > measured:
        return f"{achieved} of the peak: the run skips work that is counted"
    if shapes and used < FEW_TILES:
        m, n, k = max(shapes)[1]
        name, size = min(("M", m), ("N", n), ("K", k), key=lambda pair: pair[1])
        return (
            f"small {name} = {size:g}: {format_share(used)} of the tiles used, achieved {achieved} "
            "of the peak"
        )
    return f"predicted compute-bound, achieved {achieved} of the peak"
