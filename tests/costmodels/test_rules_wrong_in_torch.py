"""Where FlopCounterMode's formulas (torch 2.13) are wrong: loops that count what is there."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from tests.costmodels.rules_support import cost, meta, price, view_of
from tests.releases import TORCH, needs_torch

pytestmark = pytest.mark.quick

aten = torch.ops.aten


def torch_flops(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def products_of_a_weight_gradient(images, channels, positions, out, groups, taps):
    """dw[o, c, t] = sum of x[n, c, p + t] dy[n, o, p], where c and o are of one group."""
    done = 0
    for _image in range(images):
        for o in range(out):
            for c in range(channels):
                if o // (out // groups) == c // (channels // groups):
                    done += positions * taps
    return done


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_weight_gradient_of_a_grouped_convolution(groups):
    """torch multiplies every input with every output channel: `groups` times too much."""
    weight = meta(8, 4 // groups, 3, 3, grad=True)
    out = F.conv2d(meta(2, 4, 9, 9), weight, groups=groups)
    backward = lambda: out.backward(torch.empty_like(out), retain_graph=True)  # noqa: E731
    true = 2 * products_of_a_weight_gradient(2, 4, 7 * 7, 8, groups, 9)
    assert cost(backward, "convolution_backward").flops() == true
    assert torch_flops(backward) == groups * true


HEADS_LAST = {
    "_flash_attention_forward": (None, None, 128, 128, 0.0, False, False),
    "_efficient_attention_forward": (None, None, None, None, None, 0.0, 0),
}


@pytest.mark.parametrize("name", HEADS_LAST)
def test_these_kernels_have_their_heads_last(name):
    """torch reads [B, S, H, E] as [B, H, S, E]: with S = 128 and H = 4 a factor of 32.

    Torch 2.15 reads those of flash attention as they are.
    """
    query, op = meta(2, 128, 4, 64), getattr(aten, name)
    args = (query, query, query, *HEADS_LAST[name])
    true = sum(2 * 2 * 64 for _batch_head in range(2 * 4) for _pair in range(128 * 128))
    found = price(view_of(op.default, args, {}, (meta(2, 128, 4, 64),)))
    assert found.flops(["matmul"]) == true
    mended = TORCH >= (2, 15) and name == "_flash_attention_forward"
    assert flop_registry[op](*args) * (1 if mended else 32) == true


def test_the_gradient_of_such_a_kernel():
    query, op = meta(2, 128, 4, 64), aten._flash_attention_backward
    sums = meta(2, 4, 128)
    args = (*[query] * 5, sums, None, None, 128, 128, 0.0, False, sums, sums)
    pairs = 2 * 4 * 128 * 128
    true = sum(2 * 64 for _product in range(4)) * pairs  # of dV, dP, dQ, dK; not of the scores
    found = price(view_of(op.default, args, {}, [query] * 3))
    assert found.flops(["matmul"]) == true
    again = found.flops(["matmul"], ["recompute"])
    assert again == 2 * 64 * pairs
    assert flop_registry[op](*args) * (1 if TORCH >= (2, 15) else 32) == true + again


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="torch has no fp4")
def test_a_byte_may_hold_two_values():
    """128 bytes of fp4 are 256 values; torch counts the bytes."""
    a = meta(64, 128, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    b = meta(32, 128, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).t()
    args = (a, b, meta(64, 16), meta(32, 16))
    op, out = aten._scaled_mm, meta(64, 32, dtype=torch.bfloat16)
    true = 2 * sum(2 * 128 for _row in range(64) for _column in range(32))
    assert price(view_of(op.default, args, {}, out)).flops(["matmul"]) == true
    assert flop_registry[op](*args, out_val=out) * 2 == true


def test_a_complex_product_is_four_real_ones():
    a, b = meta(7, 5, dtype=torch.complex64), meta(5, 3, dtype=torch.complex64)
    real = torch_flops(lambda: meta(7, 5) @ meta(5, 3))
    assert cost(lambda: a @ b).flops(["matmul"]) == 4 * real
    assert torch_flops(lambda: a @ b) == real  # as if there were no imaginary parts


@needs_torch(2, 11, "a formula for cudnn_convolution")
def test_a_cudnn_convolution_that_is_benchmarked_is_not_a_transposed_one():
    """torch takes `benchmark`, the seventh argument of cudnn_convolution, for `transposed`."""
    x, w, y = meta(2, 4, 9, 9), meta(8, 4, 3, 3), meta(2, 8, 4, 4)
    args = (x, w, [0, 0], [2, 2], [1, 1], 1, True, False, True)
    true = 2 * sum(4 * 9 for _image in range(2) for _out in range(8) for _position in range(16))
    op = aten.cudnn_convolution
    assert price(view_of(op.default, args, {}, y)).flops() == true
    assert flop_registry[op](*args, out_val=y) == true * (9 * 9) // (4 * 4)


def test_a_sparse_product_is_not_a_dense_one():
    a = torch.eye(64).to_sparse_csr()
    x = torch.ones(64, 16)
    assert torch_flops(lambda: a @ x) == 2 * 64 * 64 * 16
    assert cost(lambda: a @ x, "mm", stored=64).flops() == 2 * 64 * 16


@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_gradients_of_a_convolution(transposed):
    """The whole op counts what it takes itself apart into, which torch counts rightly."""
    x = torch.ones(2, 4, 9, 9, requires_grad=True)
    shape = (4, 6, 3, 3) if transposed else (6, 4, 3, 3)
    w = torch.ones(shape, requires_grad=True)
    y = torch.convolution(x, w, None, [1, 1], [0, 0], [1, 1], transposed, [0, 0], 1)
    options = ([1, 1], [0, 0], [1, 1], transposed, [0, 0], 1)
    for given in ((x, w, None), (x, None, None), (None, w, None)):
        args = (*given, y.detach(), w.detach(), x.detach(), *options, [True, True, True])
        apart = torch_flops(lambda args=args: aten._convolution_double_backward(*args))
        shapes = [torch.empty_like(t) for t in (y, x, w)]
        op = view_of(aten._convolution_double_backward.default, args, {}, shapes)
        assert price(op).flops(["convolution"]) == apart > 0


def test_a_product_with_an_output_type_of_its_own():
    """torch's formulas for addmm and bmm fail: the type is taken for the shape of the output.

    That holds until torch 2.15.
    """
    low = {"dtype": torch.bfloat16}
    c, a, b = meta(7, 3), meta(7, 5, **low), meta(5, 3, **low)
    calls = [lambda: torch.bmm(a[None], b[None], out_dtype=torch.float32)]
    if torch.__version__ >= (2, 13):  # before, its kernel for meta multiplies by the type
        calls.append(lambda: torch.addmm(c, a, b, out_dtype=torch.float32))
    for call in calls:
        true = sum(2 * 5 for _output in range(7 * 3))
        if TORCH >= (2, 15):
            assert torch_flops(call) == true
        else:
            with pytest.raises(TypeError, match="out_shape"):
                torch_flops(call)
        assert cost(call).flops(["matmul"]) == true
