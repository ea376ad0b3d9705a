"""Operations that move bytes: elementwise, along rows, copies and look-ups, with their sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from rooftrace.measured.bench import Bench
from rooftrace.measured.suite.cases import (
    Call,
    MicroCase,
    element_size,
    torch_type,
    usual_precision,
)

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
    """An op on one tensor: it reads and writes so many bytes an element, and does `work` on it."""

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
        places = bench.integers(entries, rows, width)
        return lambda: table.gather(0, places)

    moved = 2.0 * rows * width * element_size(dtype) + 8.0 * rows * (width if op == "gather" else 1)
    sizes = {"op": op, "dtype": dtype, "entries": entries, "width": width, "rows": rows}
    return MicroCase("lookup", sizes, 0.0, moved, make)
