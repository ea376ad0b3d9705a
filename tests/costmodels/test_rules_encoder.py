"""Transformer layers that run as one op: against the same module taken apart."""

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.costmodels.rules_support import cost, views

pytestmark = pytest.mark.quick

MATH = SDPBackend.MATH
MATRIX = ("matmul", "convolution")


def taken_apart(function):
    """What FlopCounterMode counts, and our vector work, where the layers run op by op."""
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(MATH):
            function()
        with torch.no_grad():
            apart = cost(function)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    return counter.get_total_flops(), apart.flops(["vector"])


def whole(function, name):
    with torch.no_grad():
        assert name in {view.target.split(".")[1] for view in views(function)}
        return cost(function)


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("length", [7, 12])
def test_multi_head_attention_as_one_op(weights, length):
    module = nn.MultiheadAttention(64, 4, batch_first=True).eval()
    x = torch.ones(2, length, 64)
    call = lambda: module(x, x, x, need_weights=weights)  # noqa: E731
    found = whole(call, "_native_multi_head_attention")
    matrix, vector = taken_apart(call)
    assert found.flops(MATRIX) == matrix > 0
    assert found.flops(["vector"]) == pytest.approx(vector, rel=0.2)
    assert found.bytes() == 4 * (4 * 64 * 64 + 4 * 64 + 2 * 2 * length * 64) + weights * (
        4 * 2 * length * length  # one value, averaged over the heads
    )


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("first", [False, True])
def test_an_encoder_layer_as_one_op(activation, first):
    module = nn.TransformerEncoderLayer(
        64, 4, 128, activation=activation, norm_first=first, batch_first=True
    ).eval()
    x = torch.ones(3, 9, 64)
    found = whole(lambda: module(x), "_transformer_encoder_layer_fwd")
    matrix, vector = taken_apart(lambda: module(x))
    assert found.flops(MATRIX) == matrix > 0
    assert found.flops(["vector"]) == pytest.approx(vector, rel=0.2)
    parameters = sum(p.numel() for p in module.parameters())
    assert found.bytes() == 4 * (parameters + 2 * x.numel())
