"""Sizes of results that are known without torch's meta kernel, which is the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rooftrace.tracer.recording import running

pytestmark = pytest.mark.quick
aten: Any = torch.ops.aten
HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64
SHAPES = [(8, 6, 5, 4), (2, 6), (3, 6, 1, 1), (1, 6, 7), (1, 1, 1, 9), (1, 6), (1, 6, 1, 1)]


def meta(*shape: int, dtype: torch.dtype = SINGLE) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def looks(result: Any) -> list[Any]:
    tensors = result if isinstance(result, (tuple, list)) else [result]
    return [None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors]


def outcome(run: Any, *args: Any) -> Any:
    try:
        return looks(run(*args))
    except (RuntimeError, ZeroDivisionError) as error:
        return type(error)


def check(func: Any, *args: Any) -> bool:
    """Whether the result was known without the kernel; it is the kernel's in any case."""
    cache = running.SizeCache()
    assert outcome(lambda *a: cache.run(func, a, {}), *args) == outcome(func, *args)
    return running._NORMS[func](*args) is not None


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
