"""Graphs of live steps, traced on meta from notes, and prices, fitted between traced sizes."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from rooftrace.costmodels.estimates import Estimate, estimate
from rooftrace.costmodels.fusion import ExecutionModel
from rooftrace.errors import RequestError, worded
from rooftrace.graph import OpGraph
from rooftrace.hardware import Chip
from rooftrace.measured.live.notes import CallArguments, CallNote, Notebook, StepNote, StepPattern
from rooftrace.tracer import trace
from rooftrace.tracer.recording import overrides
from rooftrace.tracer.values import tensors_in

# -- prices ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Costs of a part of a step, of a step, or of many steps: sums that add up."""

    flops: float = 0.0  # FLOP, attention dense, without recomputation
    flops_matrix: float = 0.0  # FLOP of these in matrix products and convolutions
    bytes: float = 0.0  # byte through HBM
    useful_s: float = 0.0  # s of its useful matrix FLOPs at the peak: MFU times the time
    matrix_s: float = 0.0  # s of all its matrix FLOPs at the peak: HFU times the time
    expected: float = 0.0  # s
    low: float = 0.0  # s; nine of ten steps lie between low and high
    high: float = 0.0  # s; NaN where there is no interval
    bound: float = 0.0  # s

    def times(self, count: int) -> Price:
        """The price of `count` of them."""
        return Price(**{part.name: count * getattr(self, part.name) for part in fields(self)})


def price_of(estimate: Estimate) -> Price:
    """The price of one graph."""
    low, high = estimate.t_interval or (float("nan"), float("nan"))
    return Price(
        flops=estimate.flops,
        flops_matrix=estimate.flops_matrix,
        bytes=estimate.bytes_hbm,
        useful_s=(estimate.mfu or 0.0) * estimate.t_est,
        matrix_s=(estimate.hfu or 0.0) * estimate.t_est,
        expected=estimate.t_est,
        low=low,
        high=high,
        bound=estimate.t_bound,
    )


def total(prices: Iterable[Price]) -> Price:
    """The price of several together."""
    listed = list(prices)
    return Price(
        **{part.name: sum(getattr(price, part.name) for price in listed) for part in fields(Price)}
    )


# -- tracing ---------------------------------------------------------------------------------------
# Noted calls are run again on meta copies.  Modules, gradients, optimizers and random generators of
# the user do not change.

_SHARDED = (
    "{name} has weights spread over several processes ({kind}): what one process runs is traced "
    "with a fake mesh; pass that graph, live(..., graph=rooftrace.trace(...))"
)

Forward = Callable[..., Any]
"""Runs a noted call: (module, *args, **kwargs) -> its output."""


def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


def graph_of(
    notebook: Notebook, notes: Sequence[CallNote], steps: Sequence[int], forward: Forward
) -> OpGraph:
    """The graph of calls, each with its backward, and of steps of optimizers by their numbers.

    Raises the errors of `rooftrace.trace`.
    """
    for module in notebook.modules:
        _refuse_sharded(module)
    count = len(notebook.modules)
    calls = [(note, _arguments(notebook, note)) for note in notes]
    arguments = [(call.args, call.kwargs) for _, call in calls]
    on_cpu = all(t.device.type == "cpu" for m in notebook.modules for t in m.parameters())
    # Steps of one optimizer are of one object, so that its state stays one.
    optimizers = [notebook.optimizers[number] for number in steps]

    def step(*args: Any) -> None:
        modules, (inputs, *stepped) = args[:count], args[count:]
        for (note, call), (args, kwargs) in zip(calls, inputs, strict=True):
            _run(modules[note.module], note, call, args, kwargs, forward)
        for optimizer in stepped:
            _ready(optimizer, on_cpu)
            optimizer.step()

    step.__name__ = "of the loop"
    with undisturbed():
        return trace(step, *notebook.modules, arguments, *optimizers)


def _arguments(notebook: Notebook, note: CallNote) -> CallArguments:
    arguments = notebook.arguments_of(note)
    if arguments is None:
        raise RequestError("calls of too many sizes ran to keep the arguments of each; say kinds=")
    return arguments


def _run(
    module: nn.Module,
    note: CallNote,
    call: CallArguments,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    forward: Forward,
) -> None:
    for part, training in zip(module.modules(), call.training, strict=True):
        part.training = training
    with contextlib.ExitStack() as settings:
        settings.enter_context(torch.set_grad_enabled(note.gradients))
        for device, dtype in note.autocast:
            settings.enter_context(torch.autocast(device, dtype=dtype))
        output = forward(module, *args, **kwargs)
    outputs = tensors_in(output)
    roots: list[Tensor] = [outputs[root] for root in note.roots if root < len(outputs)]
    for number in range(note.backwards if roots else 0):
        ones = [torch.ones_like(root) for root in roots]
        torch.autograd.backward(roots, ones, retain_graph=number + 1 < note.backwards)


def _ready(optimizer: Optimizer, on_cpu: bool) -> None:
    """Give each trained weight without a gradient an empty one.

    torch steps weights one by one on a CPU, but on meta as on a GPU, unless `foreach` is set.
    """
    for group in optimizer.param_groups:
        if on_cpu and "foreach" in group and not (group["foreach"] or group.get("fused")):
            group["foreach"] = False
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)


def _refuse_sharded(module: nn.Module) -> None:
    kinds = {type(tensor).__name__ for tensor in module.parameters()}
    kinds |= {type(part).__name__ for part in module.modules()}
    kind = next(iter(kinds & {"DTensor", "FullyShardedDataParallel"}), None)
    if kind is not None:
        raise RequestError(_SHARDED.format(name=type(module).__name__, kind=kind))


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Restore random generators, the record of shown warnings and the mode of autograd."""
    with (
        overrides.draws_undone(),
        warnings.catch_warnings(),
        torch.enable_grad(),
        torch.inference_mode(False),
    ):
        warnings.simplefilter("ignore")
        yield


# -- graph book ------------------------------------------------------------------------------------

Part = CallNote | int
"""A kind of call, or the number of an optimizer."""


class GraphBook:
    """Graphs and prices by the parts of steps, each traced when its price is first needed.

    graph: of a step, from the caller: then nothing is traced, and steps that differ from the first
    are not priced.  kinds: number of kinds of calls that are traced; others are traced, up to twice
    as many, where no fit to these holds (`fitted`).
    """

    def __init__(
        self,
        notebook: Notebook,
        chip: Chip,
        execution: ExecutionModel,
        kinds: int,
        graph: OpGraph | None = None,
        forward: Forward = called,
    ) -> None:
        self.chip, self.execution, self.forward = chip, execution, forward
        self.graph = graph
        self._notebook, self._kinds = notebook, kinds
        self._graphs: dict[Part, OpGraph] = {}
        self._prices: dict[Part, Price | None] = {}
        self._first: StepPattern | None = None
        self._tried = 0  # kinds of calls that were traced, or failed
        self.fitted = 0  # kinds of calls whose price is a fit to those of others
        self.assumed: dict[str, None] = {}  # assumptions of the traces, in sentences
        self.unknown: dict[str, None] = {}  # ops without a rule
        self.refused: dict[str, int] = {}  # number of kinds that were not traced, by the reason

    def price(self, pattern: StepPattern) -> Price | None:
        """The price of a step; None where part of it cannot be priced."""
        if self.graph is not None:
            if self._first is None:
                self._first = pattern
            return self._of_graph(-1, lambda: self.graph) if pattern == self._first else None
        if not pattern.calls:
            self._refuse(_NO_CALL)
            return None
        prices = [(self._of_call(note), count) for note, count in pattern.calls]
        prices += [(self._of_optimizer(number), 1) for number in pattern.optimizers]
        if any(price is None for price, _ in prices):
            return None
        return total(price.times(count) for price, count in prices if price is not None)

    def graphs(self, pattern: StepPattern) -> tuple[tuple[OpGraph, int], ...]:
        """(graph, count) of the parts of a priced step."""
        if self.graph is not None:
            return ((self.graph, 1),)
        parts: list[tuple[Part, int]] = [*pattern.calls, *((n, 1) for n in pattern.optimizers)]
        traced = [(self._graphs[part], count) for part, count in parts if part in self._graphs]
        return tuple(sorted(traced, key=lambda entry: entry[0].phase != "training"))

    def graph_of_step(self, step: StepNote) -> OpGraph:
        """The graph of a step in order.  Raises the errors of `rooftrace.trace`."""
        return self.graph or self._graph_of(step.calls, step.optimizers)

    def estimated(self, graph: OpGraph) -> Estimate:
        """The estimate of a graph."""
        return estimate(graph, self.chip, self.execution)

    def _of_call(self, note: CallNote) -> Price | None:
        if note not in self._prices and self._tried >= self._kinds:
            price = self._prices[note] = fitted(note, self._traced)
            if price is not None:
                self.fitted += 1
            elif self._tried < 2 * self._kinds and self._notebook.arguments_of(note):
                del self._prices[note]  # trace a few more, so that others are between traced ones
            else:
                self._refuse(_TOO_MANY.format(kinds=2 * self._kinds))
        self._tried += note not in self._prices
        return self._of_graph(note, lambda: self._graph_of([note], []))

    def _of_optimizer(self, number: int) -> Price | None:
        return self._of_graph(number, lambda: self._graph_of([], [number]))

    def _graph_of(self, calls: Sequence[CallNote], optimizers: Sequence[int]) -> OpGraph:
        return graph_of(self._notebook, calls, optimizers, self.forward)

    def _of_graph(self, part: Part, make: Callable[[], Any]) -> Price | None:
        if part not in self._prices:
            self._prices[part] = None
            try:
                graph = self._graphs[part] = make()
                priced = self.estimated(graph)
                self._prices[part] = price_of(priced)
                self.assumed |= dict.fromkeys(a.text for a in graph.assumptions)
                self.unknown |= dict.fromkeys(op.target for op in priced.unsupported_ops())
            except Exception as error:  # code of the user on meta must not stop the loop
                self._refuse(f"not counted: {worded(error).splitlines()[0]}")
        return self._prices[part]

    @property
    def _traced(self) -> dict[CallNote, Price]:
        prices = ((part, self._prices[part]) for part in self._graphs)
        return {p: price for p, price in prices if isinstance(p, CallNote) and price is not None}

    def _refuse(self, reason: str) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1


_NO_CALL = (
    "not counted: no call of the module was seen in a step: pass the module that the step calls, "
    "for a compiled one what torch.compile(...) returned"
)
_TOO_MANY = (
    "not counted: calls of more than {kinds} sizes ran, the first {kinds} are traced, and no fit "
    "to them tells the others; say kinds= for more"
)


# -- fits of sizes ---------------------------------------------------------------------------------
# Padding to the longest text of a batch gives nearly every batch another length.  FLOP of such
# calls are polynomials of their sizes: a fit to traced calls that differ in sizes alone holds if
# it meets each of them, with more traces than terms, and only between traced sizes.


LEAST = 5
"""Traces that a fit needs."""
_TOLERANCES = {
    "flops_matrix": 1e-6, "flops": 0.01, "useful_s": 0.01, "matrix_s": 0.1, "bound": 0.2,
    "low": 0.3, "high": 0.3,
}  # fmt: skip
_NEAR = 0.05
"""Relative errors at traced sizes up to which a fit holds; _NEAR for sums without a tolerance.

FLOP in products are polynomials; an attention kernel that skips masked blocks rounds them.  Ends of
intervals step where another limit rules.
"""
_OF_ONE = ((0,), (1,), (2,))
_OF_TWO = ((0, 0), (1, 0), (0, 1), (1, 1), (1, 2), (2, 1))
"""Powers of the sizes in each term: of one that varies, and of two (a batch and a length)."""


def fitted(note: CallNote, traced: Mapping[CallNote, Price]) -> Price | None:
    """The price of a call between traced ones; None where no fit holds."""
    alike = [other for other in traced if _shape(other) == _shape(note)]
    if len(alike) < LEAST:
        return None
    rows = [_numbers(other) for other in (*alike, note)]
    # Sizes that are equal in all calls are one.
    varying = dict.fromkeys(column for column in zip(*rows, strict=True) if len(set(column)) > 1)
    if not 1 <= len(varying) <= 2:
        return None
    if any(not min(column[:-1]) <= column[-1] <= max(column[:-1]) for column in varying):
        return None
    powers: Sequence[tuple[int, ...]] = _OF_ONE if len(varying) == 1 else _OF_TWO
    if len(alike) <= len(powers):
        return None
    terms = [
        [float(math.prod(map(pow, point, power))) for power in powers]
        for point in zip(*varying, strict=True)
    ]
    values: dict[str, float] = {}
    for part in fields(Price):
        prices = [getattr(traced[other], part.name) for other in alike]
        value = _fit(terms, prices, _TOLERANCES.get(part.name, _NEAR))
        if value is None:
            return None
        values[part.name] = value
    return Price(**values)


def _fit(
    terms: Sequence[Sequence[float]], prices: Sequence[float], tolerance: float
) -> float | None:
    """The fit to all points but the last, at the last one; None where it misses a price."""
    if any(map(math.isnan, prices)):  # there is no interval
        return float("nan")
    matrix, values = numpy.array(terms), numpy.array(prices)
    matrix = matrix / numpy.abs(matrix).max(axis=0)
    solved: Any = numpy.linalg.lstsq(matrix[:-1], values, rcond=None)[0]
    errors = numpy.abs(matrix[:-1] @ solved - values)
    if (errors > tolerance * numpy.abs(values) + 1e-12).any():
        return None
    return float(matrix[-1] @ solved)


def _shape(note: CallNote) -> Hashable:
    """The key of calls that differ in sizes alone."""
    tensors, plain, names = note.sizes
    kinds = tuple((len(shape), dtype, gradient) for shape, dtype, gradient in tensors)
    settings = (note.module, note.training, note.gradients, note.autocast)
    return settings, note.roots, note.backwards, kinds, plain, names


def _numbers(note: CallNote) -> tuple[int, ...]:
    return tuple(size for shape, _, _ in note.sizes[0] for size in shape)
