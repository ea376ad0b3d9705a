"""The cost of one op on any chip: op kinds, work by precision, bytes by storage, kernel facts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Literal

from msgspec import Struct, field
from msgspec.structs import replace

from rooftrace.errors import one_of
from rooftrace.hardware.precisions import bytes_per_element

WRITTEN_OUT = "written_out"
"""Of an attention without a library's kernel, so that its tiles are unknown."""
UNFUSED = "unfused_attention"
"""Of the softmax of an attention for which CUDA has no single kernel: why that is."""
LIBRARY = "library"
"""Of an attention that another kernel than flash attention runs: EFFICIENT."""
EFFICIENT = "memory-efficient"
BESIDE = "beside"
"""Of an extra kernel of an op: the name of that op."""
MASK_FACTS = ("visible_pairs", "mask", "window", "visible_keys")
"""Facts of a mask: visible pairs of one head (mean of the batch and the heads), its kind, the most
keys that one query sees, and the keys that some query sees.  Of attention, or of the op that
applies the mask."""
BY_LENGTHS = "by_lengths"
"""Of an attention whose kernel takes lengths of sequences in place of its mask."""


# -- kinds -----------------------------------------------------------------------------------------
# Kind, family and traits of an op, by its rule or by its cost.
#
# kind: the class of kernels whose fitted shares of the chip's peaks apply (see `opclass`, which
# splits "conv" by sizes).  family: the part of a model that reports put the op under.

FusionClass = Literal["opaque", "pointwise", "reduction", "gather", "free"]
"""How a compiler may fuse the op.

opaque: its own kernel (matrix products, sorts, scatters).  pointwise: output[i] needs inputs[i]
(after broadcasting), copies and casts included.  reduction: reads rows, may write rows back (norms,
softmax).  gather: pointwise with indirect reads (embedding, index).  free: no kernel at all.
"""
FUSION_CLASSES = ("opaque", "pointwise", "reduction", "gather", "free")

KINDS = (
    "conv",
    "attention",
    "rnn",
    "scan",
    "state update",
    "ssd",
    "grouped mm",
    "mm",
    "bmm",
    "batch norm",
    "layer norm",
    "group norm",
    "softmax",
    "pooling",
    "upsample",
    "sort",
    "gather",
    "reduction",
    "copy",
    "cast",
    "elementwise",
)
"""Every kind, the heaviest first: a kernel of several ops is of the first that any of them is."""

FAMILIES = (
    "attention",
    "moe",
    "dense",
    "head",
    "convolution",
    "rnn",
    "norm",
    "embedding",
    "elementwise",
    "loss",
    "optimizer",
    "communication",
)

TRAITS = (
    "rereads",  # an activation that uses its input more than once, computing in fp32: x sigmoid(x)
    "places",  # joins its inputs into a larger result, in which their producers compute them
    "picks",  # reads one number for each element of its `target`, not all of its input
)

_FAMILY_OF: Mapping[str, str] = {
    "conv": "convolution",
    "attention": "attention",
    "rnn": "rnn",
    "scan": "rnn",
    "state update": "rnn",
    "ssd": "rnn",
    "grouped mm": "dense",
    "mm": "dense",
    "bmm": "dense",
    "batch norm": "norm",
    "layer norm": "norm",
    "group norm": "norm",
}


def kind_of(cost: Cost, fusion: str) -> str:
    """The kind of an op whose rule names none: by its largest matrix work, else by how it fuses.

    Products with `AttentionSizes` are attention, one product with M, N, K is "mm", several equal
    ones are "bmm".
    """
    matrix = {work: flop for work, flop in cost.work.items() if work.operation != "vector"}
    if matrix:
        work = max(matrix, key=lambda key: matrix[key])
        if any(key.attention is not None for key in matrix):
            return "attention"
        if work.operation == "convolution":
            return "conv"
        each = 0 if work.shape is None else 2 * work.shape[0] * work.shape[1] * work.shape[2]
        return "bmm" if each and matrix[work] > each else "mm"
    return fusion if fusion in ("reduction", "gather") else "elementwise"


def family_of(cost: Cost, kind: str) -> str:
    """The family of an op whose rule names none: by its kind; over a link it is communication."""
    if any(access.wire == "link" for access in cost.traffic):
        return "communication"
    return _FAMILY_OF.get(kind, "elementwise")


def check(noun: str, value: str | None, allowed: Collection[str]) -> None:
    """Raise ValueError for a kind, family, trait or fusion class that does not exist."""
    if value is not None and value not in allowed:
        raise ValueError(f'{noun} "{value}": {one_of(value, allowed)}')


# -- cost ------------------------------------------------------------------------------------------
# The cost of one op on any chip: work by operation and precision, bytes by storage and wire.
#
# A `Cost` is additive, and independent of chip, knobs and fusion.  Fusing drops internal values and
# reads a shared value once; `traffic` does so when it adds up costs.

OPERATIONS = ("matmul", "convolution", "vector")
MATRIX = ("matmul", "convolution")
"""The operations that a matrix engine can run."""
COMPUTED = ("useful", "masked_executed", "recompute")
"""The counts that take time; a kernel skips "masked" work."""
DENSE = ("useful", "masked", "masked_executed")
"""The counts of the dense count, without recomputation."""


class AttentionSizes(Struct, frozen=True):
    """The sizes of one attention kernel.

    batch: requests.  queries, keys: of one request, the mean where they differ.  visible: (query,
    key) pairs of one head and request that are computed.  heads, kv_heads: of queries, and of keys
    and values.  width: of query and key.
    kv_size: bytes of an element of key and value.  masked: the mask is a tensor of numbers, so it
    follows no known pattern.  paged: key and value lie in pages of a cache.  long: as many of the
    requests are as long as `long_queries` and `long_keys` say, of which `long_visible` pairs are
    computed each, and the others alike; 0 where all requests are.
    """

    batch: int
    queries: int | float
    keys: int | float
    visible: int | float
    heads: int
    kv_heads: int
    width: int
    value_width: int
    kv_size: int | float
    masked: bool = False
    paged: bool = False
    backward: bool = False
    long: int | float = 0.0
    long_queries: int | float = 0.0
    long_keys: int | float = 0.0
    long_visible: int | float = 0.0

    @property
    def flop(self) -> float:
        """FLOP of its products, without recomputation in backward."""
        each = 2 * (self.width + self.value_width) * (1 + self.backward)
        return self.batch * self.heads * self.visible * each


class Work(Struct, frozen=True):
    """A key of `Cost.work`.

    operation: matmul, convolution (both can use the matrix engine) or vector.
    precision: of the computation.
    rows: M_eff, the rows of the (per-group) matrix product that share one weight tile.  columns,
    inner: its N and K; None where it is no plain product (attention).  Rows or inner of products of
    different sizes are their mean, which may be no integer.  Vector work has rows and inner
    where a kernel runs few threads, each in a loop: how many threads there are, and the FLOP of one
    between two waits for memory.
    count: useful; masked (in the dense count, skipped by a kernel that knows the mask);
    masked_executed (the same, but this kernel computes it anyway); recompute (done again in
    backward: takes time, is not part of the model's FLOPs).
    attention: the attention kernel that computes these products.
    widths: bytes of an element of A[M, K] and of B[K, N] as they are stored and loaded; None where
    both are in `precision`.
    lined: which of the sizes M, N and K are lengths of rows as they lie in memory, of an operand or
    of the result, in this order ("NK").  Vector work along rows has "N", with their length as
    `columns`; "" where it is unknown, or does not matter.
    """

    operation: str
    precision: str
    rows: int | float | None = None
    count: str = "useful"
    columns: int | None = None
    inner: int | float | None = None
    attention: AttentionSizes | None = None
    widths: tuple[int | float, int | float] | None = None
    lined: str = ""

    @property
    def is_dense(self) -> bool:
        """Whether it is in the dense count, as in `Cost.flops`."""
        return self.count in DENSE

    @property
    def shape(self) -> tuple[float, int, float] | None:
        """M, N, K of one product; None where one of them is unknown."""
        if self.rows is None or self.columns is None or self.inner is None:
            return None
        return self.rows, self.columns, self.inner


WIRES = ("hbm", "link", "host")
"""To the memory of the device, to other devices, to the memory of the host."""


class Access(Struct, frozen=True):
    """A key of `Cost.traffic`: which storage, read or written, over which of `WIRES`.

    In a rule the storage is the operand's local index (see OpView); `bind` makes it a value id.
    """

    storage: int
    write: bool
    wire: str = "hbm"


class Cost(Struct, frozen=True):
    """work: FLOP by `Work` (one multiply-add = 2).  traffic: bytes by `Access`."""

    work: Mapping[Work, int] = field(default_factory=dict)
    traffic: Mapping[Access, int] = field(default_factory=dict)

    @staticmethod
    def of(
        *,
        matmul: int = 0,
        convolution: int = 0,
        vector: int = 0,
        precision: str = "fp32",
        rows: float | None = None,
        columns: int | None = None,
        inner: float | None = None,
        count: str = "useful",
        attention: AttentionSizes | None = None,
        widths: tuple[int | float, int | float] | None = None,
        lined: str = "",
    ) -> Cost:
        """Work of one kind; zero amounts leave no entry.  The arguments are the fields of `Work`.

        columns and lined are kept for vector work too.
        """
        work = {}
        if widths is not None and set(widths) == {bytes_per_element(precision)}:
            widths = None
        if matmul:
            key = Work(
                operation="matmul",
                precision=precision,
                rows=rows,
                count=count,
                columns=columns,
                inner=inner,
                attention=attention,
                widths=widths,
                lined=lined,
            )
            work[key] = matmul
        if convolution:
            key = Work("convolution", precision, rows, count, columns, inner, widths=widths)
            work[key] = convolution
        if vector:
            wide = widths if lined else None
            key = Work("vector", precision, None, count, columns, widths=wide, lined=lined)
            work[key] = vector
        return Cost(work)

    def computed(self) -> dict[Work, int]:
        """Computed FLOP by work; hidden pairs are a part of their product."""
        computed: dict[Work, int] = {}
        for work, flop in self.work.items():
            if work.count in COMPUTED:
                work = work if work.count == "useful" else replace(work, count="useful")
                computed[work] = computed.get(work, 0) + flop
        return computed

    def __add__(self, other: Cost) -> Cost:
        if not other.work and not other.traffic:
            return self
        if not self.work and not self.traffic:
            return other
        work, traffic = dict(self.work), dict(self.traffic)
        for work_key, flop in other.work.items():
            work[work_key] = work.get(work_key, 0) + flop
        for access, size in other.traffic.items():
            traffic[access] = traffic.get(access, 0) + size
        return Cost(work, traffic)

    def flops(
        self,
        operations: Iterable[str] = OPERATIONS,
        counts: Iterable[str] = DENSE,
    ) -> int:
        """FLOPs of these operations; by default the dense count without recomputation."""
        operations, counts = tuple(operations), tuple(counts)
        return sum(
            flop
            for work, flop in self.work.items()
            if work.operation in operations and work.count in counts
        )

    def bytes(self, wire: str = "hbm") -> int:
        """Bytes over one wire, read and written."""
        return sum(size for access, size in self.traffic.items() if access.wire == wire)

    def bind(self, storages: tuple[int, ...]) -> Cost:
        """Replace each local storage index by `storages[index]`."""
        traffic: dict[Access, int] = {}
        for access, size in self.traffic.items():
            key = Access(storages[access.storage], access.write, access.wire)
            traffic[key] = traffic.get(key, 0) + size
        return Cost(self.work, traffic)

    def recomputed(self) -> Cost:
        """The cost of doing this work a second time: all of it counts as recompute."""
        work: dict[Work, int] = {}
        for key, flop in self.work.items():
            if key.count != "masked":
                again = replace(key, count="recompute")
                work[again] = work.get(again, 0) + flop
        return Cost(work, self.traffic)
