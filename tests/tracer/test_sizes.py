"""Sizes of results that are known without torch's meta kernel, which is the oracle."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rooftrace.tracer import torch_private
from rooftrace.tracer.recording import running

pytestmark = pytest.mark.quick
aten: Any = torch.ops.aten
HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64
DTYPES = (SINGLE, HALF, DOUBLE, torch.int64, torch.bool)
SHAPES = [(8, 6, 5, 4), (2, 6), (3, 6, 1, 1), (1, 6, 7), (1, 1, 1, 9), (1, 6), (1, 6, 1, 1)]


def meta(*shape: int, dtype: torch.dtype = SINGLE) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def looks(result: Any) -> list[Any]:
    tensors = result if isinstance(result, (tuple, list)) else [result]
    return [None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors]


def outcome(run: Any, *args: Any) -> Any:
    try:
        return looks(run(*args))
    except (RuntimeError, ZeroDivisionError, IndexError, TypeError, ValueError) as error:
        return type(error)


def check(func: Any, *args: Any) -> bool:
    """Whether the result was known without the kernel; it is the kernel's in any case."""
    cache, right = running.SizeCache(), outcome(func, *args)
    assert outcome(lambda *a: cache.run(func, a, {}), *args) == right
    return isinstance(right, list) and running.known_sizes(func, args) is not None


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtypes", [(SINGLE, SINGLE), (HALF, HALF), (HALF, SINGLE), (DOUBLE,) * 2])
def test_norms_give_what_the_kernels_of_torch_give(
    shape: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    x, weight = meta(*shape, dtype=dtypes[0]), meta(shape[1], dtype=dtypes[1])
    many = x.numel() > shape[1]
    for training in (True, False):
        assert check(aten.native_batch_norm.default, x, *[weight] * 4, training, 0.1, 1e-5) == many
        stats = [weight, weight, meta(shape[1]), meta(shape[1])]
        for wanted in ([True, True, True], [True, False, True], [False, True, False]):
            back = aten.native_batch_norm_backward.default
            assert check(back, x, x, weight, *stats, training, 1e-5, wanted)
    inner = x[0, 0].numel()
    for groups in {1, 3, shape[1]} if shape[1] > 1 else {1}:
        args = (*shape[:2], inner, groups, 1e-5)
        assert check(aten.native_group_norm.default, x, weight, weight, *args)


def test_norms_of_other_layouts_and_sizes_are_left_to_the_kernel() -> None:
    x, weight = meta(2, 4, 3, 3), meta(4)
    last = x.contiguous(memory_format=torch.channels_last)
    back, eps = aten.native_batch_norm_backward.default, 1e-5
    for other in (last, x.expand(2, 4, 3, 3).transpose(2, 3), meta(2, 4, 3, 6)[..., ::2]):
        assert not check(aten.native_batch_norm.default, other, *[weight] * 4, True, 0.1, eps)
        assert not check(aten.native_group_norm.default, other, weight, weight, 2, 4, 9, 2, eps)
        for pair in ((other, x), (x, other)):
            assert not check(back, *pair, *[weight] * 5, True, eps, [True] * 3)
    for wrong in (None, meta(3), meta(8)[::2], meta(4, dtype=DOUBLE)):
        weights = [weight, wrong, weight, weight]
        assert not check(aten.native_batch_norm.default, x, *weights, True, 0.1, eps)
    assert not check(aten.native_group_norm.default, x, weight, weight, 2, 4, 9, 3, eps)
    assert not check(aten.native_group_norm.default, x, weight, weight, 4, 2, 9, 2, eps)


def test_layer_norms_give_what_the_kernels_of_torch_give() -> None:
    forward, back = aten.native_layer_norm.default, aten.native_layer_norm_backward.default
    for shape, rows in (((4, 5, 8), 2), ((4, 1, 3), 1), ((6,), 0)):
        size, stats = list(shape[rows:]), (*shape[:rows], *(1 for _ in shape[rows:]))
        for dtypes in ((SINGLE, SINGLE), (HALF, HALF), (HALF, SINGLE), (DOUBLE, DOUBLE)):
            x, weight = meta(*shape, dtype=dtypes[0]), meta(*size, dtype=dtypes[1])
            for pair in ((weight, weight), (None, None), (weight, None)):
                assert check(forward, x, size, *pair, 1e-5)
            mean = meta(*stats)
            if dtypes[0] != DOUBLE:
                for wanted in ([True, True, True], [True, False, True], [False, True, False]):
                    assert check(back, x, x, size, mean, mean, weight, weight, wanted)
    x, weight = meta(4, 5, 8), meta(8)
    assert not check(forward, x.transpose(0, 1), [8], weight, weight, 1e-5)
    assert not check(forward, x, [5, 4], meta(5, 4), meta(5, 4), 1e-5)
    assert not check(back, x, x, [8], meta(4, 5), meta(4, 5), weight, weight, [True] * 3)
    assert not check(back, x, x, [8], *[meta(4, 5, 1)] * 2, None, None, [True, False, False])


def test_products_give_what_the_kernels_of_torch_give() -> None:
    a, b = meta(4, 5), meta(5, 6)
    for left in (a, meta(5, 4).t(), meta(4, 10)[:, ::2], meta(1, 5), meta(0, 5)):
        for right in (b, meta(6, 5).t()):
            assert check(aten.mm.default, left, right)
            assert check(aten.bmm.default, left[None], right[None])
            sizes = (left.shape[0], 6)
            for bias in (meta(6), meta(*sizes), meta(6, sizes[0]).t(), meta(1, 6), meta(1)):
                assert check(aten.addmm.default, bias, left, right)
    assert not check(aten.mm.default, a, meta(4, 5))
    assert not check(aten.mm.default, a, meta(5, 6, dtype=HALF))
    assert not check(aten.bmm.default, meta(2, 4, 5), meta(3, 5, 6))
    assert not check(aten.addmm.default, meta(7), a, b)
    square = meta(4, 4, 4)  # each op refuses matrices of the other's rank
    assert not check(aten.mm.default, square, square)
    assert not check(aten.bmm.default, square[0], square[0])
    assert not check(aten.addmm.default, meta(4), square, square)


def test_joined_tensors_have_the_layout_that_torch_gives_them() -> None:
    draw = random.Random(0)
    for _ in range(60):
        shape = [draw.choice((1, 2, 3, 5)) for _ in range(draw.randrange(1, 6))]
        dim = draw.randrange(-len(shape), len(shape))
        others = [[*shape] for _ in range(draw.choice((1, 2, 3)))]
        for other in others:
            other[dim] = draw.choice((1, 2, 4))
        plain = [meta(*other) for other in others]
        alike = min(map(min, others)) > 1
        assert check(aten.cat.default, plain, dim) == alike
        if len(shape) == 4:
            last = [t.contiguous(memory_format=torch.channels_last) for t in plain]
            check(aten.cat.default, [*plain, *last], dim)
    assert not check(aten.cat.default, [meta(2, 3), meta(2, 3, dtype=HALF)], 0)
    assert not check(aten.cat.default, [])
    assert not check(aten.cat.default, [meta(2, 3), meta(3, 2)], 0)
    assert not check(aten.cat.default, [meta(2, 3), meta(2, 3)], 2)
    assert not check(aten.cat.default, [meta(2, 3), meta(0)], 0)


def pointwise() -> Iterator[Any]:
    """Torch's ops on elements that write to none of their arguments."""
    for name in sorted(torch_private.all_op_names()):
        space, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        op = getattr(getattr(aten, packet, None), overload or "default", None)
        if space != "aten" or op is None or torch.Tag.pointwise not in op.tags:
            continue
        if not op._schema.is_mutable and not any(r.alias_info for r in op._schema.returns):
            yield op


def drawn(draw: random.Random, op: Any) -> list[Any] | None:
    """Arguments of random sizes and precisions; None where one is neither tensor nor number."""
    shape, dtype = [draw.choice((1, 2, 3)) for _ in range(draw.randrange(5))], draw.choice(DTYPES)
    numbers = {"Scalar": (2, 2.5, True), "number": (2, 2.5, True), "float": (0.5,), "int": (1, 2)}
    args: list[Any] = []
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if argument.kwarg_only or (argument.has_default_value() and kind != "Tensor"):
            break
        if kind == "Tensor":
            begin = draw.randrange(len(shape) + 1) if draw.random() < 0.3 else 0
            sizes = [1 if draw.random() < 0.1 else size for size in shape[begin:]]
            other = meta(*sizes, dtype=dtype if draw.random() < 0.8 else draw.choice(DTYPES))
            args.append(other.transpose(0, -1) if sizes and draw.random() < 0.1 else other)
        elif kind in numbers:
            args.append(draw.choice(numbers[kind]))
        else:
            return None
    return args


def test_ops_on_elements_give_what_the_kernels_of_torch_give() -> None:
    draw, known = random.Random(0), 0
    calls = [(op, args) for op in pointwise() for _ in range(4) if (args := drawn(draw, op))]
    for op, args in calls:
        known += check(op, *args)
    assert known > len(calls) / 2
    assert len({op for op, _ in calls}) > 150
