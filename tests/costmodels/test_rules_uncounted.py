"""What FlopCounterMode has no formula for: against loops, and the same op taken apart."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.costmodels.rules_support import cost, meta, price, view_of, views
from tests.releases import CPU_ATTENTION_TAKES_GROUPS, TORCH

pytestmark = pytest.mark.quick

MATRIX = ("matmul", "convolution")
FLASH = "_scaled_dot_product_flash_attention_for_cpu"


def torch_flops(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def names(function):
    return {view.target.split(".")[1] for view in views(function)}


# -- attention on a CPU ----------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_on_a_cpu(heads, causal):
    query = torch.rand(2, heads[0], 24, 16, requires_grad=True)
    key, value = (torch.rand(2, heads[1], 24, 16, requires_grad=True) for _ in range(2))

    def forward():
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=causal, enable_gqa=heads[0] != heads[1]
        )

    def step():
        forward().sum().backward()

    def in_parts(function):
        with sdpa_kernel(SDPBackend.MATH):
            return torch_flops(function)

    if heads[0] == heads[1] or CPU_ATTENTION_TAKES_GROUPS:
        assert FLASH in names(forward) and f"{FLASH}_backward" in names(step)
        counted = TORCH >= (2, 15)  # since then torch has a formula for this kernel
        assert torch_flops(forward) == (in_parts(forward) if counted else 0)
    assert cost(forward).flops(MATRIX) == in_parts(forward) > 0
    assert cost(step).flops(MATRIX) == in_parts(step)


# -- recurrent networks on a CPU -------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("both", [False, True])
def test_recurrent_networks_on_a_cpu(mode, both):
    """A fused layer on a CPU counts what its time steps count on meta."""
    module = getattr(nn, mode)(12, 20, num_layers=2, bidirectional=both)
    with torch.device("meta"):
        twin = getattr(nn, mode)(12, 20, num_layers=2, bidirectional=both)
    x = torch.rand(7, 3, 12)
    with torch.no_grad():
        by_step = torch_flops(lambda: twin(x.to("meta")))
        assert cost(lambda: module(x)).flops(MATRIX) == by_step > 0
        if mode == "LSTM":
            assert "mkldnn_rnn_layer" in names(lambda: module(x))


# -- products of low precision ---------------------------------------------------------------------


def products_of_a_loop(m, k, n):
    done = 0
    for _row in range(m):
        for _column in range(n):
            done += 2 * k  # a product and an addition each
    return done


def test_products_with_packed_weights():
    int8 = meta(24, 32, dtype=torch.int8)
    half, scales = meta(16, 32, dtype=torch.bfloat16), meta(24, dtype=torch.bfloat16)
    call = lambda: torch._weight_int8pack_mm(half, int8, scales)  # noqa: E731
    assert torch_flops(call) == 0
    assert cost(call, "_weight_int8pack_mm").flops(["matmul"]) == products_of_a_loop(16, 32, 24)
    x, packed = meta(16, 512, dtype=torch.bfloat16), meta(8, 4, 32, 4, dtype=torch.int32)
    both = meta(16, 64, 2, dtype=torch.bfloat16)
    op, out = torch.ops.aten._weight_int4pack_mm.default, meta(16, 64, dtype=torch.bfloat16)
    whole = price(view_of(op, (x, packed, 32, both), {}, out))
    assert whole.flops(["matmul"]) == products_of_a_loop(16, 512, 64)


def test_products_of_eight_bit_integers():
    a, b = meta(32, 16, dtype=torch.int8), meta(16, 8, dtype=torch.int8)
    assert torch_flops(lambda: torch._int_mm(a, b)) == 0
    assert cost(lambda: torch._int_mm(a, b)).flops(["matmul"]) == products_of_a_loop(32, 16, 8)


def test_grouped_products_with_scales():
    """Groups of unequal size: every row meets the weights of its own group, once."""
    rows, k, n = [3, 0, 10, 3], 32, 16
    a = meta(sum(rows), k).to(torch.float8_e4m3fn)
    b = meta(4, n, k).to(torch.float8_e4m3fn).transpose(-2, -1)
    offsets = meta(4, dtype=torch.int32)
    args = (a, b, meta(sum(rows)), meta(4, n), offsets)
    out = meta(sum(rows), n, dtype=torch.bfloat16)
    op = torch.ops.aten._scaled_grouped_mm.default
    whole = price(view_of(op, args, {}, out))
    assert whole.flops(["matmul"]) == sum(products_of_a_loop(m, k, n) for m in rows)


# -- a loss with its product inside ----------------------------------------------------------------


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch has it from 2.13 on")
@pytest.mark.parametrize("trained", [False, True])
def test_a_loss_that_makes_its_logits_in_chunks(trained):
    from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

    x = torch.rand(32, 16, requires_grad=trained)
    w = torch.rand(100, 16, requires_grad=trained)
    target = torch.zeros(32, dtype=torch.long)

    def step(options=None):
        loss = F.linear_cross_entropy(x, w, target, options=options)
        if trained:
            loss.backward()

    chunks = LinearCrossEntropyOptions(batch_chunk_size=8)
    (whole,) = (v for v in views(lambda: step(chunks)) if v.target.startswith("torch_nn."))
    assert price(whole).flops(["matmul"]) == torch_flops(step) > 0


# -- convolutions with offsets ---------------------------------------------------------------------


def test_a_deformable_convolution_has_the_products_of_a_plain_one():
    """Its samples lie elsewhere; how many there are does not change."""
    x, w, y = meta(2, 4, 9, 9), meta(8, 2, 3, 3), meta(2, 8, 7, 7)
    offsets, mask = meta(2, 2 * 9, 7, 7), meta(2, 9, 7, 7)
    library = torch.library.Library("torchvision", "FRAGMENT")
    if not hasattr(torch.ops.torchvision, "deform_conv2d"):
        library.define(
            "deform_conv2d(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, "
            "SymInt stride_h, SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, "
            "SymInt dilation_w, SymInt groups, SymInt offset_groups, bool use_mask) -> Tensor"
        )
    op = torch.ops.torchvision.deform_conv2d.default
    args = (x, w, offsets, mask, meta(8), 1, 1, 0, 0, 1, 1, 2, 1, True)
    found = price(view_of(op, args, {}, y))
    assert found.flops(["convolution"]) == torch_flops(lambda: F.conv2d(x, w, groups=2))
