"""Operations that the suite times alone, from products to copies: their cases, sizes and graphs.

A case is data until it is made.  Its flops and bytes predict its time on a device of measured
speed: a slow device leaves out long cases.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rooftrace.errors import ProfileError
from rooftrace.graph import OpGraph
from rooftrace.measured.bench import clock
from rooftrace.measured.bench.clock import Bench
from rooftrace.measured.bench.runfile import MicroRow
from rooftrace.tracer import capture, torch_private

Call = Callable[[], object]


class NotOfferedError(RuntimeError):
    """This device or torch has no such operation."""


@dataclass(frozen=True)
class MicroCase:
    """One operation to time."""

    kind: str
    sizes: Mapping[str, Any]
    flops: float  # FLOP of one call; 0 for a launch cost
    bytes: float  # byte that one call moves at least; 0 for a launch cost
    # Puts random data on the device and returns the call.
    make: Callable[[Bench], Callable[[], Any]] = field(repr=False)
    sampler: bool = False  # whether the call measures by itself and returns seconds

    @property
    def key(self) -> str:
        """The name of the case in a file."""
        return " ".join([self.kind, *(f"{name}={value}" for name, value in self.sizes.items())])


def element_size(dtype: str) -> int:
    """Bytes of one element."""
    return {"fp32": 4, "tf32": 4, "fp8": 1}.get(dtype, 2)


def torch_type(dtype: str) -> torch.dtype:
    types = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
    return types.get(dtype, torch.float32)


def usual_precision(on_cuda: bool) -> str:
    """The precision that models run in on such a device."""
    return "bf16" if on_cuda else "fp32"


def footprint(case: MicroCase) -> float:
    """Bytes of the data of a case on the device."""
    if case.kind == "lookup":
        table = case.sizes["entries"] * case.sizes["width"] * element_size(case.sizes["dtype"])
        return float(case.bytes + table)
    return case.bytes


def measured(case: MicroCase, bench: Bench, seconds: float) -> tuple[float, ...]:
    """Seconds of each call of `case`, repeated for about so many seconds after a warm-up.

    Raises NotOfferedError, or the errors of torch.
    """
    with (
        torch.inference_mode(),
        bench.float32_precision("high" if case.sizes.get("dtype") == "tf32" else "highest"),
    ):
        call = case.make(bench)
        sampler = call if case.sampler else lambda: bench.cold(call)
        sampler()
        sampler()
        return tuple(bench.repetitions(sampler, seconds, least=5, most=15))


def micro_cases(on_cuda: bool) -> list[MicroCase]:
    """Every case for a GPU or a CPU, kind by kind, whatever its size."""
    kinds = (
        _launches,
        matmuls,
        attention,
        convolutions,
        elementwise,
        rows,
        moves,
        batched,
        grouped,
    )
    return [case for kind in kinds for case in kind(on_cuda)]


def _launches(on_cuda: bool) -> Iterator[MicroCase]:
    def nothing(bench: Bench) -> Callable[[], float]:
        return lambda: bench.cold(lambda: None)

    makers: dict[str, Callable[[Bench], Callable[[], float]]] = {
        "eager op": clock.eager_dispatch,
        "direct op": clock.direct_dispatch,
        "clock alone": nothing,
    }
    if on_cuda:
        makers["stream kernel"] = clock.stream_of_tiny_kernels
        makers["graph kernel"] = lambda bench: clock.graph_of_tiny_kernels(bench)[0]
        makers["graph launch"] = lambda bench: clock.graph_of_tiny_kernels(bench)[1]
    for cost, make in makers.items():
        yield MicroCase("launch", {"what": cost}, 0.0, 0.0, make, sampler=True)


# -- graphs ----------------------------------------------------------------------------------------


class _OnMeta(Bench):
    """Makes tensors that have sizes only."""

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor of this shape."""
        return torch.empty(shape, dtype=dtype or torch.float32, device="meta")

    def integers(self, below: int, *shape: int) -> torch.Tensor:
        """Whole numbers of this shape."""
        return torch.empty(shape, dtype=torch.int64, device="meta")


def traced_micro(row: MicroRow, on_cuda: bool) -> OpGraph:
    """The graph of the call that `row` timed on a GPU or a CPU.

    Raises ProfileError for a row of no operation (launches), or of a case that this version does
    not have.
    """
    case = _cases(on_cuda).get(row.key)
    if case is None or case.sampler:
        raise ProfileError(f"{row.key!r}: not an operation that this version measures")
    call: Any = case.make(_OnMeta(torch.device("meta"), 0.0, lambda _: None))
    with capture(torch.nn.Module()) as captured:
        call()
    return captured.graph


@cache
def _cases(on_cuda: bool) -> dict[str, MicroCase]:
    return {case.key: case for case in micro_cases(on_cuda)}


# -- products --------------------------------------------------------------------------------------

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 512, 1000, 1024, 2048, 4096, 8192, 16384)
_FEW_ROWS = (1, 16, 64, 256, 1000, 4096, 16384)
_WEIGHTS = (
    (256, 256),
    (768, 768),
    (1024, 1024),
    (3072, 768),
    (768, 3072),
    (2048, 2048),
    (4096, 4096),
    (8192, 8192),
    (14336, 4096),
    (4096, 14336),
    (28672, 8192),
    (16384, 16384),
    (7168, 2048),
    (2112, 7168),
    (24576, 1536),
    (128256, 4096),
    (5120, 640),
    (50257, 768),
    (1001, 999),
    (4095, 4097),
)
"""Rows and columns of weights: usual linear layers, and two sizes that no tile divides."""
_FEW_WEIGHTS = ((1024, 1024), (4096, 4096), (8192, 8192), (14336, 4096), (1001, 999))


def matmuls(on_cuda: bool) -> Iterator[MicroCase]:
    main = usual_precision(on_cuda)
    others = ("fp16", "fp32", "tf32", "fp8") if on_cuda else ("bf16",)
    for dtype in (main, *others):
        full = dtype == main
        for n, k in _WEIGHTS if full else _FEW_WEIGHTS:
            for m in _ROWS if full else _FEW_ROWS:
                yield _matmul(m, n, k, dtype)


def _matmul(m: int, n: int, k: int, dtype: str) -> MicroCase:
    """y[m, n] = x[m, k] @ w[n, k].T, as a linear layer computes it."""

    def make(bench: Bench) -> Call:
        if dtype == "fp8":
            return _fp8_product(bench, m, n, k)
        x = bench.random(m, k, dtype=torch_type(dtype))
        w = bench.random(n, k, dtype=torch_type(dtype))
        return lambda: F.linear(x, w)

    out = 2 if dtype == "fp8" else element_size(dtype)
    moved = element_size(dtype) * (m * k + n * k) + out * m * n
    sizes = {"dtype": dtype, "m": m, "n": n, "k": k}
    return MicroCase("matmul", sizes, 2.0 * m * n * k, moved, make)


def _fp8_product(bench: Bench, m: int, n: int, k: int) -> Call:
    offered = bench.on_cuda and torch.cuda.get_device_capability(bench.device) >= (8, 9)
    if not offered and bench.device.type != "meta":
        raise NotOfferedError("fp8 products need a GPU of compute capability 8.9 or above")
    if n % 16 or k % 16:
        raise NotOfferedError("fp8 products need n and k in sixteens")
    x = bench.random(m, k).to(torch.float8_e4m3fn)
    w = bench.random(n, k).to(torch.float8_e4m3fn)
    unit = torch.ones((), device=bench.device)
    return lambda: torch_private.scaled_mm(
        x, w.t(), scale_a=unit, scale_b=unit, out_dtype=torch.bfloat16
    )


def batched(on_cuda: bool) -> Iterator[MicroCase]:
    """y[b, m, n] = x[b, m, k] @ w[b, k, n]."""
    dtype = usual_precision(on_cuda)
    for batch in (8, 32, 256):
        for m, n, k in ((1, 128, 128), (64, 64, 64), (128, 128, 64), (512, 64, 512), (1024,) * 3):

            def make(bench: Bench, batch: int = batch, m: int = m, n: int = n, k: int = k) -> Call:
                x = bench.random(batch, m, k, dtype=torch_type(dtype))
                w = bench.random(batch, k, n, dtype=torch_type(dtype))
                return lambda: torch.bmm(x, w)

            moved = element_size(dtype) * batch * (m * k + k * n + m * n)
            sizes = {"dtype": dtype, "b": batch, "m": m, "n": n, "k": k}
            yield MicroCase("batched_matmul", sizes, 2.0 * batch * m * n * k, moved, make)


def _grouped_runs(on_cuda: bool) -> bool:
    """Whether torch has a kernel of grouped products; torch 2.8 has none for a CPU."""
    keys = ("CUDA" if on_cuda else "CPU", "CompositeExplicitAutograd")
    kernels = (torch_private.has_kernel("aten::_grouped_mm", key) for key in keys)
    return torch_private.has("grouped_mm") and any(kernels)


def grouped(on_cuda: bool) -> Iterator[MicroCase]:
    """y[rows, n] = x[rows, k] @ w[expert of the row, k, n], equally many rows to each expert."""
    if not _grouped_runs(on_cuda):
        return
    shapes = ((8, 14336, 4096), (64, 2816, 2048), (256, 4096, 7168), (8, 256, 128), (32, 512, 256))
    for experts, n, k in shapes:
        for each in (1, 8, 64, 512):
            rows = experts * each

            def make(
                bench: Bench, experts: int = experts, rows: int = rows, n: int = n, k: int = k
            ) -> Call:
                x = bench.random(rows, k, dtype=torch.bfloat16)
                w = bench.random(experts, k, n, dtype=torch.bfloat16)
                ends = torch.arange(1, experts + 1, device=bench.device, dtype=torch.int32)
                ends = (ends * (rows // experts)).to(torch.int32)
                return lambda: torch_private.grouped_mm(x, w, offs=ends)

            moved = 2.0 * (rows * k + experts * k * n + rows * n)
            sizes = {"dtype": "bf16", "experts": experts, "rows": rows, "n": n, "k": k}
            yield MicroCase("grouped_matmul", sizes, 2.0 * rows * n * k, moved, make)


# -- attention -------------------------------------------------------------------------------------

_HEADS = (
    (32, 32, 128),
    (32, 8, 128),
    (64, 8, 128),
    (12, 12, 64),
    (16, 16, 64),
    (8, 8, 256),
    (128, 128, 192),
)
"""Query heads, key heads, width of a head."""


def attention(on_cuda: bool) -> Iterator[MicroCase]:
    dtype = usual_precision(on_cuda)
    prompts = ((1, 128), (1, 512), (8, 512), (1, 1000), (1, 4096), (4, 4096), (1, 16384))
    for heads in _HEADS:
        for batch, length in prompts:
            for causal in (False, True):
                yield _attend("attention_prefill", dtype, batch, heads, length, length, causal)
        for batch in (1, 8, 64):
            for cached in (128, 512, 1024, 4096, 16384):
                yield _attend("attention_decode", dtype, batch, heads, 1, cached, False)


def _attend(
    kind: str,
    dtype: str,
    batch: int,
    heads: tuple[int, int, int],
    queries: int,
    keys: int,
    causal: bool,
) -> MicroCase:
    """Two products of [queries, d] with [keys, d] a head; a causal query has keys up to itself."""
    h, hk, d = heads

    def make(bench: Bench) -> Call:
        q = bench.random(batch, h, queries, d, dtype=torch_type(dtype))
        k = bench.random(batch, hk, keys, d, dtype=torch_type(dtype))
        v = bench.random(batch, hk, keys, d, dtype=torch_type(dtype))
        attend: Any = F.scaled_dot_product_attention
        return lambda: attend(q, k, v, is_causal=causal, enable_gqa=h != hk)

    pairs = queries * (queries + 1) / 2 if causal else queries * keys
    moved = element_size(dtype) * batch * d * 2 * (h * queries + hk * keys)
    sizes = {"dtype": dtype, "b": batch, "h": h, "hk": hk, "q": queries, "kv": keys, "d": d}
    if queries > 1:
        sizes["causal"] = causal
    return MicroCase(kind, sizes, 4.0 * batch * h * d * pairs, moved, make)


# -- convolutions ----------------------------------------------------------------------------------

_CONVOLUTIONS = (
    # batch, channels in, channels out, width and height, kernel, stride, groups
    (64, 3, 64, 224, 7, 2, 1),
    (64, 64, 64, 56, 3, 1, 1),
    (64, 64, 256, 56, 1, 1, 1),
    (64, 128, 128, 28, 3, 1, 1),
    (64, 256, 256, 14, 3, 1, 1),
    (64, 512, 512, 7, 3, 1, 1),
    (64, 1024, 2048, 7, 1, 1, 1),
    (64, 256, 512, 56, 3, 2, 1),
    (64, 96, 96, 56, 7, 1, 96),
    (64, 384, 384, 14, 7, 1, 384),
    (64, 144, 144, 56, 3, 1, 144),
    (64, 256, 256, 28, 3, 1, 32),
    (2, 320, 320, 128, 3, 1, 1),
    (2, 1280, 1280, 32, 3, 1, 1),
    (2, 640, 320, 64, 1, 1, 1),
    (1, 3, 64, 224, 7, 2, 1),
    (1, 64, 64, 56, 3, 1, 1),
    (1, 64, 256, 56, 1, 1, 1),
    (1, 256, 256, 14, 3, 1, 1),
    (1, 144, 144, 56, 3, 1, 144),
    (1, 96, 96, 28, 7, 1, 96),
    (1, 64, 64, 28, 3, 1, 8),
)


def convolutions(on_cuda: bool) -> Iterator[MicroCase]:
    for dtype in ("fp16", "bf16") if on_cuda else ("fp32", "bf16"):
        for shape in _CONVOLUTIONS if dtype != "bf16" else _CONVOLUTIONS[1::4]:
            for last in (False, True):
                yield _convolution(dtype, *shape, channels_last=last)


def _convolution(
    dtype: str,
    batch: int,
    cin: int,
    cout: int,
    size: int,
    kernel: int,
    stride: int,
    groups: int,
    channels_last: bool,
) -> MicroCase:
    """y[b, cout, size/stride, size/stride]: each of them takes cin/groups * kernel^2 products."""
    layout = torch.channels_last if channels_last else torch.contiguous_format

    def make(bench: Bench) -> Call:
        x = bench.random(batch, cin, size, size, dtype=torch_type(dtype))
        w = bench.random(cout, cin // groups, kernel, kernel, dtype=torch_type(dtype))
        x, w = x.contiguous(memory_format=layout), w.contiguous(memory_format=layout)
        return lambda: F.conv2d(x, w, stride=stride, padding=kernel // 2, groups=groups)

    out = batch * cout * (-(-size // stride)) ** 2
    taps = cin // groups * kernel**2
    moved = element_size(dtype) * (batch * cin * size**2 + cout * taps + out)
    sizes = {
        "dtype": dtype,
        "b": batch,
        "cin": cin,
        "cout": cout,
        "size": size,
        "kernel": kernel,
        "stride": stride,
        "groups": groups,
        "channels_last": channels_last,
    }
    return MicroCase("convolution", sizes, 2.0 * out * taps, moved, make)


# -- streams ---------------------------------------------------------------------------------------

_ELEMENTS = tuple(2**power for power in (8, 12, 16, 18, 20, 22, 24, 26, 28, 30))


def _streamed(
    kind: str,
    op: str,
    dtype: str,
    shape: tuple[int, ...],
    reads: float,
    writes: float,
    call: Callable[[Tensor], object],
    work: float = 1.0,
) -> MicroCase:
    """An op on one tensor.  reads, writes: bytes of an element; work: its FLOP."""

    def make(bench: Bench) -> Call:
        x = bench.random(*shape, dtype=torch_type(dtype))
        return lambda: call(x)

    count = math.prod(shape)
    sizes = {"op": op, "dtype": dtype, "shape": "x".join(map(str, shape))}
    return MicroCase(kind, sizes, work * count, (reads + writes) * count, make)


def elementwise(on_cuda: bool) -> Iterator[MicroCase]:
    for dtype in dict.fromkeys((usual_precision(on_cuda), "fp32")):
        size = element_size(dtype)
        for count in _ELEMENTS:
            shape = (count,)
            yield _streamed("elementwise", "neg", dtype, shape, size, size, torch.neg)
            yield _streamed("elementwise", "gelu", dtype, shape, size, size, F.gelu)
            yield _streamed("elementwise", "silu", dtype, shape, size, size, F.silu)
            yield _two_operands(dtype, count)


def _two_operands(dtype: str, count: int) -> MicroCase:
    def make(bench: Bench) -> Call:
        x, y = (bench.random(count, dtype=torch_type(dtype)) for _ in range(2))
        return lambda: torch.add(x, y)

    sizes = {"op": "add", "dtype": dtype, "shape": str(count)}
    return MicroCase("elementwise", sizes, float(count), 3.0 * element_size(dtype) * count, make)


_ROW_SHAPES = tuple(
    (rows, width) for rows in (8, 64, 1024, 16384, 131072) for width in (256, 768, 4096, 16384)
)


def rows(on_cuda: bool) -> Iterator[MicroCase]:
    """Ops along the last dimension: reductions, softmax, norms."""
    dtype = usual_precision(on_cuda)
    size = element_size(dtype)
    for count in _ELEMENTS[2:]:
        yield _streamed("reduction", "sum", dtype, (count,), size, 0, torch.sum)
    for rows, width in _ROW_SHAPES:
        shape = (rows, width)
        for op, call in (("sum rows", lambda x: x.sum(-1)), ("max rows", lambda x: x.amax(-1))):
            yield _streamed("reduction", op, dtype, shape, size, size / width, call)
        yield _streamed("reduction", "sum columns", dtype, shape, size, 0, lambda x: x.sum(0))
        yield _streamed(
            "softmax", "softmax", dtype, shape, size, size, lambda x: x.softmax(-1), work=5
        )
        for op, norm in (("layer_norm", F.layer_norm), ("rms_norm", F.rms_norm)):
            yield _norm(op, norm, dtype, shape)
    for batch, channels, side in ((1, 320, 32), (2, 320, 64), (2, 640, 128), (64, 64, 56)):
        yield _streamed(
            "norm",
            "group_norm",
            dtype,
            (batch, channels, side, side),
            size,
            size,
            lambda x: F.group_norm(x, 32),
            work=5,
        )


def _norm(op: str, norm: Callable[..., Tensor], dtype: str, shape: tuple[int, int]) -> MicroCase:
    rows, width = shape

    def make(bench: Bench) -> Call:
        x = bench.random(rows, width, dtype=torch_type(dtype))
        gain = bench.random(width, dtype=torch_type(dtype))
        return lambda: norm(x, (width,), gain)

    sizes = {"op": op, "dtype": dtype, "shape": f"{rows}x{width}"}
    moved = element_size(dtype) * (2 * rows * width + width)
    return MicroCase("norm", sizes, 5.0 * rows * width, moved, make)


def moves(on_cuda: bool) -> Iterator[MicroCase]:
    """Copies of all sorts: no arithmetic."""
    dtype = usual_precision(on_cuda)
    size = element_size(dtype)
    other = torch.float32 if dtype == "bf16" else torch.bfloat16
    for count in _ELEMENTS:
        yield _streamed("copy", "clone", dtype, (count,), size, size, torch.clone, work=0)
        yield _streamed("copy", "cast", dtype, (count,), size, 6 - size, _caster(other), work=0)
        if count >= 2**12:
            side = 2 ** ((count.bit_length() - 1) // 2)
            shape = (side, count // side)
            yield _streamed("copy", "transpose", dtype, shape, size, size, _transposed, work=0)
            yield _streamed("copy", "cat", dtype, shape, size, 2 * size, _doubled, work=0)
    for entries, width in ((1024, 256), (32000, 1024), (128256, 4096)):
        for rows in (1, 64, 1024, 16384):
            for op in ("embedding", "gather"):
                yield _lookup(op, dtype, entries, width, rows)


def _caster(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: x.to(dtype)


def _transposed(x: Tensor) -> Tensor:
    return x.t().contiguous()


def _doubled(x: Tensor) -> Tensor:
    return torch.cat((x, x), dim=-1)


def _lookup(op: str, dtype: str, entries: int, width: int, rows: int) -> MicroCase:
    """`rows` random rows of a table, or that many single elements of each of its columns."""

    def make(bench: Bench) -> Call:
        table = bench.random(entries, width, dtype=torch_type(dtype))
        if op == "embedding":
            ids = bench.integers(entries, rows)
            return lambda: F.embedding(ids, table)
        indices = bench.integers(entries, rows, width)
        return lambda: table.gather(0, indices)

    moved = 2.0 * rows * width * element_size(dtype) + 8.0 * rows * (width if op == "gather" else 1)
    sizes = {"op": op, "dtype": dtype, "entries": entries, "width": width, "rows": rows}
    return MicroCase("lookup", sizes, 0.0, moved, make)
