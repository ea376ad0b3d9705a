"""Nodes of a step with the bytes of each kernel, and matrix rows that break alignment of loads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from rooftrace._plain import Plain
from rooftrace._shown import Shown, short, some
from rooftrace.costmodels.estimates.rows import Row
from rooftrace.costmodels.fusion import Plan
from rooftrace.costmodels.kernels import engines
from rooftrace.costmodels.ops import Access, Cost, Work
from rooftrace.graph import Op, OpGraph, pattern_of
from rooftrace.hardware.precisions import precision
from rooftrace.hardware.units import format_traffic

if TYPE_CHECKING:
    import pandas

# -- aligned sizes ---------------------------------------------------------------------------------
# A thread loads 16 bytes at once.  Where the rows of a matrix do not begin at multiples of that, as
# with 50257 logits in bf16, kernels load it in smaller pieces, and take longer (`Share.odd`).

NAMES = ("M", "N", "K")


@dataclass(frozen=True, slots=True)
class Aligned:
    """A product with its odd sizes up to the next aligned ones."""

    odd: tuple[str, ...]  # which of NAMES
    shape: tuple[float, int, float]  # M, N, K with these
    grown: float  # FLOP of this shape over those of the product as it is


def aligned(graph: OpGraph, op: Op, work: Work, bytes_aligned: int) -> Aligned | None:
    """The next aligned sizes of a product of an op; None where all are aligned or unknown.

    A size is odd where it is the length of the rows of an operand or of the result, as they lie in
    memory, and these are no multiple of `bytes_aligned`.  Convolutions are left out: their K is no
    row in memory.
    """
    if work.operation != "matmul" or work.shape is None or 0 in work.shape:
        return None
    multiples = _rows_in_memory(graph, op, bytes_aligned)
    sizes = [
        -(-size // multiples[size]) * multiples[size] if size in multiples else size
        for size in work.shape
    ]
    odd = tuple(name for name, old, new in zip(NAMES, work.shape, sizes, strict=True) if old != new)
    if not odd:
        return None
    rows, columns, inner = sizes
    return Aligned(odd, (rows, int(columns), inner), math.prod(sizes) / math.prod(work.shape))


def _rows_in_memory(graph: OpGraph, op: Op, bytes_aligned: int) -> dict[float, int]:
    """Lengths of rows of the matrices that an op reads and writes: elements that align each."""
    multiples: dict[float, int] = {}
    for number in (*op.inputs, *op.outputs):
        value = graph.values[number]
        stored = precision(value.dtype)
        if len(value.shape) < 2 or stored.kind != "float" or bytes_aligned * 8 % stored.bits:
            continue
        multiple = int(bytes_aligned * 8 / stored.bits)
        for size, stride in zip(value.shape, value.stride, strict=True):
            if stride == 1 and size > 1:
                multiples[size] = max(multiple, multiples.get(size, 1))
    return multiples


def with_shape(
    cost: Cost, work: Work, flop: int, made: Aligned, batch: float, output: tuple[int, float]
) -> tuple[Cost, int]:
    """The cost of a kernel with one of its products at other sizes, and how many FLOP more.

    flop: of that product, which may be a part of `cost.work[work]`.  batch: how many products of
    the shape it is.  output: the storage of its result, and bytes of an element.
    """
    assert work.shape is not None
    larger = round(flop * made.grown)
    rows, columns, inner = made.shape
    changed = dict(cost.work)
    changed[work] -= flop
    if not changed[work]:
        del changed[work]
    key = replace(work, rows=rows, columns=columns, inner=inner)
    changed[key] = changed.get(key, 0) + larger
    storage, width = output
    a, b = engines.stored_widths(work)
    (m, n, k), (old_m, old_n, old_k) = made.shape, work.shape
    more = (m * k - old_m * old_k) * a + (k * n - old_k * old_n) * b
    more += (m * n - old_m * old_n) * width
    access = Access(storage, True)
    traffic = {**cost.traffic, access: cost.traffic.get(access, 0) + round(batch * more)}
    return Cost(changed, traffic), larger - flop


# -- nodes -----------------------------------------------------------------------------------------
# Rows are exact: weights + inputs + outputs of a node are its HBM bytes, and nodes add up to the
# step.

STORED = ("weights", "kv", "optimizer", "constants")
"""Roles of tensors that stay in memory from step to step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNode(Plain):
    """Equal kernels of modules whose paths differ in numbers alone; sums over all of them."""

    name: str  # of the op, or of the fused pattern
    module: str  # path with starred indices
    family: str
    part: str
    calls: int
    flops: int  # FLOP, attention dense, without recomputation
    weights: int  # bytes of weights that are read through HBM
    inputs: int  # bytes of all else that is read: activations, the cache, states, constants
    outputs: int  # bytes that are written
    seconds: float

    KEYS = "* bytes intensity"

    @property
    def bytes(self) -> int:
        """All HBM bytes: weights + inputs + outputs."""
        return self.weights + self.inputs + self.outputs

    @property
    def intensity(self) -> float | None:
        """FLOP for each HBM byte; None where no byte is moved."""
        return self.flops / self.bytes if self.bytes else None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTable(Plain, Shown):
    """Every kernel of a step, most seconds first, and the storage that the step needs at least."""

    title: str
    phase: str
    chip: str
    execution: str
    expected: bool  # whether seconds are expected ones; False where they are bounds
    nodes: tuple[StepNode, ...]
    # Bytes that have to lie in memory whatever is computed, by role: all weights, also those of
    # experts that no token reaches and rows of tables that are not looked up; the cache; states.
    storage: Mapping[str, int]

    KEYS = (
        "title phase chip execution expected flops bytes storage storage_total weights_unread nodes"
    )

    @property
    def flops(self) -> int:
        """FLOP of all nodes: `Estimate.flops`."""
        return sum(node.flops for node in self.nodes)

    @property
    def bytes(self) -> int:
        """HBM bytes of all nodes: `Estimate.bytes_hbm`."""
        return sum(node.bytes for node in self.nodes)

    @property
    def storage_total(self) -> int:
        """Bytes of `storage` together."""
        return sum(self.storage.values())

    @property
    def weights_unread(self) -> int:
        """Bytes of weights that the step does not read: other experts, other rows of tables.

        0 where weights are read several times, as in training.
        """
        read = sum(node.weights for node in self.nodes)
        return max(0, self.storage.get("weights", 0) - read)

    def to_rows(self) -> list[dict[str, Any]]:
        """One plain dict for each node."""
        return [node.to_dict() for node in self.nodes]

    def to_frame(self) -> pandas.DataFrame:
        """One row for each node."""
        import pandas

        names = [each.name for each in fields(StepNode)]
        return pandas.DataFrame.from_records(self.to_rows(), columns=[*names, "bytes", "intensity"])

    def __repr__(self) -> str:
        names = (f"{node.name} of {node.module}" for node in self.nodes)
        return short(self, f"{len(self.nodes)} kinds, {format_traffic(self.bytes)}: {some(names)}")


def node_table(planned: Plan, chip: str, rows: Sequence[Row], *, expected: bool) -> NodeTable:
    """The nodes of an estimate, whose rows these are; equal ones of equal modules as one."""
    sums: dict[tuple[str, ...], list[Any]] = {}
    for row in rows:
        key = (row.name, pattern_of(row.module), row.family, row.part)
        entry = sums.setdefault(key, [0, 0, 0, 0, 0, 0.0])
        moved = (row.count * size for size in _moved(planned.graph, planned.costs[row.index]))
        for place, number in enumerate((row.count, row.flops, *moved, row.timing.t_device)):
            entry[place] += number
    names = [each.name for each in fields(StepNode)]
    nodes = [
        StepNode(**dict(zip(names, (*key, *entry), strict=True))) for key, entry in sums.items()
    ]
    return NodeTable(
        title=planned.graph.title,
        phase=planned.graph.phase,
        chip=chip,
        execution=planned.execution.name,
        expected=expected,
        nodes=tuple(sorted(nodes, key=lambda node: (-node.seconds, node.module, node.name))),
        storage=_stored(planned.source),
    )


def _moved(graph: OpGraph, cost: Cost) -> tuple[int, int, int]:
    """HBM bytes of one kernel: read from weights, read from elsewhere, written."""
    weights = inputs = outputs = 0
    for access, size in cost.traffic.items():
        if access.wire != "hbm":
            continue
        if access.write:
            outputs += size
        elif graph.values[access.storage].role == "weights":
            weights += size
        else:
            inputs += size
    return weights, inputs, outputs


def _stored(graph: OpGraph) -> dict[str, int]:
    """Bytes that come into a step from outside of it and stay, by role; each storage once."""
    sizes: dict[str, int] = {}
    for index in graph.external:
        tensor = graph.values[index]
        if tensor.storage == index and tensor.role in STORED:
            sizes[tensor.role] = sizes.get(tensor.role, 0) + graph.times(tensor) * tensor.nbytes
    return sizes
