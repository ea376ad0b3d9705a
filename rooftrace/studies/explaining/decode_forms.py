"""A decode step of a form for an exploration: its totals, and its routed experts apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from rooftrace._plain import Plain
from rooftrace._shown import Shown, short
from rooftrace.costmodels.fusion import plan
from rooftrace.errors import RequestError
from rooftrace.hardware import Chip
from rooftrace.studies.explaining.critical_batch import (
    BATCHES,
    Array,
    DecodeStep,
    Experts,
    Explored,
    Rates,
    explore,
)
from rooftrace.studies.forms import Conditions, PlanForm, Points
from rooftrace.studies.forms.kernelforms import AccessNumbers, GroupNumbers, KernelForm
from rooftrace.studies.sweeps import Form, evaluated

Totals = Mapping[str, Array]
GROUPED = "grouped mm"
"""The class of kernels that multiply rows with the weights of their groups."""
_STACKED = 3
"""Dimensions of the weights of all experts of a layer: experts, inputs, results."""


@dataclass(frozen=True)
class FormTotals:
    """Totals of a form over batch and kv, each point evaluated once.

    flops, bytes: of the step, as in an estimate.  kv: bytes of the cache.
    routed_flops, routed_weights: of products whose rows are drawn among experts.  sent: bytes of
    the rows that come to experts and of their results.
    """

    form: Form
    conditions: Conditions
    fixed: Mapping[str, int] = field(default_factory=dict)
    _known: dict[bytes, Totals] = field(default_factory=dict, repr=False)

    def at(self, batch: Array, kv: Array) -> Totals:
        """The totals at points, FLOP and bytes."""
        columns = zip(("batch", "kv"), np.broadcast_arrays(batch, kv), strict=True)
        sizes: dict[str, Any] = {
            name: np.asarray(column, dtype=np.int64).ravel() for name, column in columns
        }
        key = b"|".join(column.tobytes() for column in sizes.values())
        if key not in self._known:
            for name, value in self.fixed.items():
                sizes[name] = np.full(len(sizes["batch"]), value)
            points = Points({name: sizes[name] for name in self.form.names})
            self._known[key] = self._evaluated(points)
        return self._known[key]

    def _evaluated(self, points: Points) -> Totals:
        totals: dict[str, Array] = {}
        for planned, at in self.form.plans(points, self.conditions):
            for name, column in _totals(planned, points.where(at)).items():
                totals.setdefault(name, np.zeros(len(points)))[at] = column
        return totals


def _totals(plan: PlanForm, points: Points) -> Totals:
    """The totals of `FormTotals` where a form of the plan holds."""
    routed = {id(kernel.numbers) for kernel in plan.kernels if is_routed(kernel)}
    last = {id(numbers) for numbers in last_products(plan)}

    def moved(keep: Callable[[GroupNumbers, AccessNumbers], bool]) -> Array:
        return plan.bytes(
            points, lambda group, access: access.wire == "hbm" and keep(group, access)
        )

    return {
        "flops": plan.flops(points),
        "bytes": plan.bytes(points),
        "kv": moved(lambda _, access: access.role == "kv"),
        "routed_flops": plan.flops(
            points, lambda group, work: id(group) in routed and work.is_dense
        ),
        "routed_weights": moved(
            lambda group, access: id(group) in routed and access.role == "weights"
        ),
        # Twice what the last product of a module writes: a first one may read a token once for all
        # its experts.
        "sent": 2 * moved(lambda group, access: access.write and id(group) in last),
    }


def is_routed(kernel: KernelForm) -> bool:
    """Whether a kernel multiplies rows with the weights of the experts that they are sent to."""
    return GROUPED in kernel.numbers.spread_kind


def last_products(plan: PlanForm) -> Iterator[Any]:
    """The last product of each module of experts, which tokens leave by."""
    by_module: dict[tuple[str, int], list[Any]] = {}
    run = 0
    before = ""
    for kernel in plan.kernels:
        if not is_routed(kernel):
            continue
        numbers = kernel.numbers
        # One after the other in launch order: a product of as many inputs as results ends a run.
        run += before != numbers.module
        before = numbers.module
        by_module.setdefault((numbers.module, run), []).append(numbers)
    for products in by_module.values():
        half = _turns(products)
        for start in range(0, len(products), half):
            yield products[start : start + half][-1]


def _turns(products: list[Any]) -> int:
    """After how many products the next layer begins: where sizes are those of the first again."""
    shapes = [tuple((w.columns, w.inner) for w, _ in numbers.work) for numbers in products]
    for size in range(1, len(shapes) + 1):
        if len(shapes) % size == 0 and shapes == shapes[:size] * (len(shapes) // size):
            return size
    return len(shapes)


@dataclass(frozen=True)
class FormExperts:
    """The routed experts of a form, as an exploration takes them.

    With D devices each brings a batch; the weights that one reads are a share of those that one
    device would read for D batches.
    """

    totals: FormTotals
    experts: int
    kv: int  # a cache length; routed experts do not depend on it

    @cached_property
    def _saturated(self) -> int | None:
        """The largest proven batch, if every expert is taken there; more tokens change nothing."""
        place = self.totals.form.names.index("batch")
        most = max((regime.high[place] for regime in self.totals.form.regimes), default=2)
        half, full = self._at(np.array([most // 2, most]))["routed_weights"]
        return most if half == full else None

    def local(self, devices: int) -> int:
        """Experts of a layer on the device that has most."""
        return math.ceil(self.experts / devices)

    def flops(self, batch: Array, devices: int) -> Array:
        """FLOP of the device with most experts, when each of `devices` brings `batch` tokens."""
        share = devices * self.local(devices) / self.experts
        return self._at(batch)["routed_flops"] * share

    def bytes(self, batch: Array, devices: int) -> Array:
        """Bytes of the device's experts that some token of all devices takes, in expectation."""
        share = self.local(devices) / self.experts
        tokens = np.asarray(batch) * devices
        most = self._saturated
        return (
            self._at(tokens if most is None else np.minimum(tokens, most))["routed_weights"] * share
        )

    def link_bytes(self, batch: Array, devices: int) -> Array:
        """Bytes that a device sends, and receives: tokens to experts elsewhere, results back."""
        return self._at(batch)["sent"] * ((devices - 1) / devices)

    def _at(self, batch: Array) -> Totals:
        return self.totals.at(batch, np.full(len(np.atleast_1d(batch)), self.kv))


@dataclass(frozen=True)
class NoExperts:
    """A step without routed experts: nothing to share, so there is one device."""

    experts: int = 1

    def flops(self, batch: Array, devices: int) -> Array:
        """None."""
        return np.zeros(len(batch))

    bytes = link_bytes = flops


def decode_step(totals: FormTotals) -> DecodeStep:
    """Everything of the step but its routed experts' products and weights, on each device.

    Weights that are read at any batch are among `other_bytes`: a further sequence adds none.
    """

    def flops(batch: Array, kv: Array) -> Array:
        at = totals.at(batch, kv)
        return at["flops"] - at["routed_flops"]

    def others(batch: Array, kv: Array) -> Array:
        at = totals.at(batch, kv)
        return at["bytes"] - at["kv"] - at["routed_weights"]

    return DecodeStep(
        flops=flops,
        kv_bytes=lambda batch, kv: totals.at(batch, kv)["kv"],
        weight_bytes=0.0,
        other_bytes=others,
    )


def experts_of(totals: FormTotals, batch: int, kv: int) -> FormExperts | NoExperts:
    """The routed experts of a form; NoExperts where no product has groups of rows.

    Raises RequestError where layers have different numbers of experts.
    """
    sizes = {**totals.fixed, "batch": batch, "kv": kv}
    conditions = totals.conditions
    graph = plan(totals.form.graph(**sizes), conditions.execution).graph
    weights = (
        graph.values[value]
        for op in graph.ops
        if "groups_touched" in op.facts
        for value in op.inputs
        if graph.values[value].role == "weights"
    )
    counts = {tensor.shape[0] for tensor in weights if len(tensor.shape) == _STACKED}
    if not counts:
        return NoExperts()
    if len(counts) > 1:
        raise RequestError(
            f"layers have {', '.join(map(str, sorted(counts)))} experts: expected the same in all"
        )
    return FormExperts(totals, counts.pop(), kv)


@dataclass(frozen=True, kw_only=True, repr=False)
class Exploration(Plain, Shown):
    """The limits of a decode step: a cell for each number of devices and cache length.

    rates: of one device.  alpha: the share of the slower of HBM and link at which computing counts
    as the limit.  experts: of a layer; 1 without routed experts.  cells: devices change last.
    """

    title: str
    chip: str
    execution: str
    precisions: tuple[str | None, ...]
    rates: Rates
    alpha: float
    experts: int
    cells: tuple[Explored, ...]

    KEYS = "title chip execution precisions rates alpha experts cells=to_rows"

    def __repr__(self) -> str:
        reached = sum(cell.batch is not None for cell in self.cells)
        return short(
            self,
            f"{self.title} on {self.chip}: {reached} of {len(self.cells)} cells can be limited by "
            "computing",
        )

    def of(self, devices: int, kv: int) -> Explored:
        """The cell of a number of devices and a length.  Raises RequestError where none is."""
        for cell in self.cells:
            if (cell.devices, cell.kv) == (devices, kv):
                return cell
        raise RequestError(f"devices {devices}, kv {kv}: it was not explored")

    def to_rows(self) -> list[dict[str, Any]]:
        """A row for each cell, as a CSV file takes them."""
        return [{**cell.to_row(), "global_batch": cell.global_batch} for cell in self.cells]


DEVICES = (1, 2, 4, 8, 16, 32, 64)
"""Devices that share routed experts, where nobody says how many."""


def explore_form(
    form: Form,
    conditions: Conditions,
    chip: Chip,
    *,
    devices: Sequence[int] | None = None,
    kv: Sequence[int],
    batches: Sequence[int] | None = None,
    alpha: float = 0.9,
    link: float | None = None,
    fixed: Mapping[str, int] | None = None,
) -> Exploration:
    """The least batch of each device at which computing limits a decode step of a form.

    The form is over batch and kv, and sizes of `fixed`.  The peak is that of the engine with most
    matrix FLOPs; link: byte/s, in place of the chip's fastest.  devices: None: 1 to 64 with routed
    experts, else 1.  batches: those to try; None: powers of 2 up to 16,384, then every number below
    the first that does.
    Raises RequestError where `explore` does, for several devices without routed experts, and for
    a chip without a link where one is needed; RequestError for sizes outside of the form.
    """
    totals = FormTotals(form, conditions, fixed or {})
    tried = tuple(BATCHES if batches is None else batches)
    least = min(tried, default=1), min(kv, default=1)
    routed = experts_of(totals, *least)
    if devices is None:
        devices = (1,) if isinstance(routed, NoExperts) else DEVICES
    if isinstance(routed, NoExperts) and any(count != 1 for count in devices):
        raise RequestError(
            f"devices={list(devices)!r:.60}: {form.title} has no products of routed experts to "
            "share; ask for one device"
        )
    bandwidth = max((each.bandwidth.value for each in chip.links), default=0.0)
    if link is None and not bandwidth and any(count > 1 for count in devices):
        raise RequestError(f"{chip.name} has no link: say one, in byte/s")
    points = Points({name: [{**totals.fixed, "batch": least[0], "kv": least[1]}[name]]
                     for name in form.names})  # fmt: skip
    peak = float(evaluated(form, points, [chip], conditions)["peak"][0])
    rates = Rates(peak, chip.memory_bandwidth.value, link or bandwidth or 1.0)
    step = decode_step(totals)
    cells = explore(step, routed, rates, devices=devices, kv=kv, batches=tried, alpha=alpha)
    if batches is None:
        cells = tuple(_refined(cell, step, routed, rates, alpha) for cell in cells)
    return Exploration(
        title=form.title,
        chip=chip.name,
        execution=conditions.execution.name,
        precisions=(conditions.dtype, conditions.weights_dtype, conditions.kv_dtype),
        rates=rates,
        alpha=alpha,
        experts=routed.experts,
        cells=cells,
    )


def _refined(
    cell: Explored, step: DecodeStep, routed: Experts, rates: Rates, alpha: float
) -> Explored:
    """The cell with the least batch of all between the power of 2 that does and the one before."""
    if cell.batch is None or cell.batch <= 2:
        return cell
    between = range(cell.batch // 2 + 1, cell.batch + 1)
    (least,) = explore(
        step, routed, rates, devices=[cell.devices], kv=[cell.kv], batches=between, alpha=alpha
    )
    intensities = cell.flop_per_kv_byte, cell.flop_per_link_byte
    return replace(least, flop_per_kv_byte=intensities[0], flop_per_link_byte=intensities[1])
