"""Matrix products, convolutions, grouped products: against torch's counter and unrolled loops."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings, strategies as st
from msgspec.structs import replace
from torch.utils.flop_counter import FlopCounterMode

import rooftrace as rt
from tests.costmodels.rules_support import cost, meta, view

pytestmark = pytest.mark.quick

SIZE = st.integers(1, 12)
MATRIX = ("matmul", "convolution")


def torch_flops(function):
    """What FlopCounterMode says."""
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


@given(m=SIZE, k=SIZE, n=SIZE, b=SIZE)
@settings(max_examples=30, deadline=None)
def test_products_count_as_torch_counts(m, k, n, b):
    for function in (
        lambda: meta(m, k) @ meta(k, n),
        lambda: torch.addmm(meta(n), meta(m, k), meta(k, n)),
        lambda: torch.bmm(meta(b, m, k), meta(b, k, n)),
        lambda: torch.baddbmm(meta(b, m, n), meta(b, m, k), meta(b, k, n)),
        lambda: F.linear(meta(b, m, k), meta(n, k), meta(n)),
        lambda: torch.einsum("bmk,bkn->mn", meta(b, m, k), meta(b, k, n)),
    ):
        assert cost(function).flops(MATRIX) == torch_flops(function)


def test_a_product_has_the_rows_that_share_a_weight():
    (mm,) = cost(lambda: meta(7, 5) @ meta(5, 3)).work
    (bmm,) = cost(lambda: torch.bmm(meta(4, 7, 5), meta(4, 5, 3))).work
    assert (mm.rows, bmm.rows) == (7, 7)


def test_mm_moves_three_matrices():
    a, b = meta(64, 32, dtype=torch.bfloat16), meta(32, 16, dtype=torch.bfloat16)
    found = cost(lambda: a @ b)
    assert found.bytes() == 2 * (64 * 32 + 32 * 16 + 64 * 16)
    assert [w.precision for w in found.work] == ["bf16"]


def test_a_bias_is_one_vector_add_per_output():
    plain = cost(lambda: meta(7, 5) @ meta(5, 3))
    biased = cost(lambda: torch.addmm(meta(3), meta(7, 5), meta(5, 3)))
    assert biased.flops(["matmul"]) == plain.flops(["matmul"])
    assert biased.flops(["vector"]) == 7 * 3
    assert biased.bytes() == plain.bytes() + 4 * 3


def test_a_product_with_a_vector_is_vector_work():
    assert cost(lambda: meta(7, 5) @ meta(5)).flops(["vector"]) == 2 * 7 * 5
    assert torch_flops(lambda: meta(7, 5) @ meta(5)) == 0


def test_a_complex_product_is_four_real_ones():
    a, b = meta(7, 5, dtype=torch.complex64), meta(5, 3, dtype=torch.complex64)
    assert cost(lambda: a @ b).flops(["matmul"]) == 4 * 2 * 7 * 5 * 3


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [(torch.int8, "int8"), (torch.uint8, "int8"), (torch.int32, "fp32"), (torch.int64, "fp32")],
)
def test_products_of_whole_numbers_are_no_zero(dtype, precision):
    a, b = meta(7, 5).to(dtype), meta(5, 3).to(dtype)
    found = cost(lambda: a @ b)
    assert {work.precision for work in found.work} == {precision}
    assert found.flops(["matmul"]) == torch_flops(lambda: a @ b) == 2 * 7 * 5 * 3


def test_int8_and_fp8_products_keep_their_precision():
    a = meta(32, 16, dtype=torch.int8)
    b = meta(16, 8, dtype=torch.int8)
    (work,) = cost(lambda: torch._int_mm(a, b)).work
    assert (work.operation, work.precision) == ("matmul", "int8")
    x, w = meta(32, 16).to(torch.float8_e4m3fn), meta(16, 16).to(torch.float8_e4m3fn).t()
    found = cost(
        lambda: torch._scaled_mm(x, w, meta(1), meta(1), out_dtype=torch.bfloat16), "_scaled_mm"
    )
    (work,) = (w for w in found.work if w.operation == "matmul")
    assert (work.precision, found.work[work]) == ("fp8_e4m3", 2 * 32 * 16 * 16)


# -- convolutions ----------------------------------------------------------------------------------


@st.composite
def convolutions(draw):
    dims = draw(st.integers(1, 3))
    groups = draw(st.integers(1, 3))
    kernel = tuple(draw(st.integers(1, 3)) for _ in range(dims))
    return {
        "x": (
            draw(st.integers(1, 3)),
            groups * draw(st.integers(1, 3)),
            *(draw(st.integers(7, 9)) for _ in range(dims)),
        ),
        "out": groups * draw(st.integers(1, 3)),
        "kernel": kernel,
        "groups": groups,
        "stride": draw(st.integers(1, 2)),
        "padding": draw(st.integers(0, 1)),
        "dilation": draw(st.integers(1, 2)),
        "bias": draw(st.booleans()),
        "transposed": draw(st.booleans()),
    }


def convolve(c):
    channels = (
        (c["x"][1], c["out"] // c["groups"])
        if c["transposed"]
        else (c["out"], c["x"][1] // c["groups"])
    )
    weight = meta(*channels, *c["kernel"], grad=True)
    x = meta(*c["x"], grad=True)
    dims = len(c["kernel"])
    bias = meta(c["out"], grad=True) if c["bias"] else None
    return torch.convolution(
        x,
        weight,
        bias,
        [c["stride"]] * dims,
        [c["padding"]] * dims,
        [c["dilation"]] * dims,
        c["transposed"],
        [0] * dims,
        c["groups"],
    )


@given(convolutions())
@settings(max_examples=60, deadline=None)
def test_convolutions_count_as_torch_counts(c):
    found = cost(lambda: convolve(c))
    assert found.flops(MATRIX) == torch_flops(lambda: convolve(c))
    if c["bias"]:
        assert found.flops(["vector"]) == convolve(c).numel()


@given(convolutions())
@settings(max_examples=60, deadline=None)
def test_convolution_gradients_count_as_torch_counts(c):
    assume(c["groups"] == 1)
    out = convolve(c)
    backward = lambda: torch.autograd.backward(out, torch.empty_like(out), retain_graph=True)  # noqa: E731
    assert cost(backward, "convolution_backward").flops(MATRIX) == torch_flops(backward)


@given(convolutions())
@settings(max_examples=30, deadline=None)
def test_both_convolution_gradients_are_twice_the_forward_with_any_groups(c):
    """torch counts the weight gradient of a grouped convolution `groups` times too high (2.13)."""
    out = convolve(c)
    backward = lambda: torch.autograd.backward(out, torch.empty_like(out), retain_graph=True)  # noqa: E731
    forward = cost(lambda: convolve(c)).flops(MATRIX)
    assert cost(backward, "convolution_backward").flops(MATRIX) == 2 * forward
    assert torch_flops(backward) == forward + c["groups"] * forward


def test_a_convolution_is_counted_by_its_taps():
    """Multiply-adds of a plain loop, padding counted as data."""
    done = 0
    for _image in range(2):
        for _out in range(6):
            for _position in range(5 * 5):
                done += 4 // 2 * 3 * 3
    found = cost(lambda: F.conv2d(meta(2, 4, 5, 5), meta(6, 2, 3, 3), padding=1, groups=2))
    assert found.flops() == 2 * done
    (work,) = found.work
    assert (work.operation, work.rows) == ("convolution", 2 * 5 * 5)


def test_a_convolution_moves_input_weight_and_output():
    found = cost(lambda: F.conv2d(meta(2, 4, 8, 8), meta(6, 4, 3, 3)))
    assert found.bytes() == 4 * (2 * 4 * 8 * 8 + 6 * 4 * 3 * 3 + 2 * 6 * 6 * 6)


def test_only_wanted_convolution_gradients_count():
    weight = meta(6, 4, 3, 3, grad=True)
    out = F.conv2d(meta(2, 4, 8, 8), weight)  # the input needs no gradient, as in a first layer
    found = cost(lambda: out.backward(torch.empty_like(out)), "convolution_backward")
    assert found.flops() == 2 * (2 * 6 * 6) * (6 * 4 * 3 * 3)
    assert found.bytes() == 4 * (2 * 6 * 6 * 6 + 2 * 4 * 8 * 8 + 6 * 4 * 3 * 3)


# -- grouped products ------------------------------------------------------------------------------


@given(groups=st.integers(1, 6), per=st.integers(1, 5), k=st.integers(1, 4), n=st.integers(1, 4))
@settings(max_examples=20, deadline=None)
def test_a_grouped_product_is_a_loop_of_products(groups, per, k, n):
    k, n, bf16 = 16 * k, 16 * n, torch.bfloat16
    rows, weights = groups * per, meta(groups, k, n, dtype=bf16)
    x = meta(rows, k, dtype=bf16)
    offsets = meta(groups, dtype=torch.int32)
    whole = cost(lambda: torch._grouped_mm(x, weights, offsets), "_grouped_mm")
    loop = cost(lambda: [meta(per, k, dtype=bf16) @ meta(k, n, dtype=bf16) for _ in range(groups)])
    # A grouped product asks for aligned rows, so its work does not say where they lie.
    assert whole.work == {replace(work, lined=""): flop for work, flop in loop.work.items()}
    assert whole.bytes() == loop.bytes() + 4 * groups  # the offsets


def test_rows_behind_the_last_group_do_not_count():
    """Rows 6 to 9 belong to no group: a loop over the groups never meets them."""
    x, w = meta(10, 16, dtype=torch.bfloat16), meta(3, 16, 32, dtype=torch.bfloat16)
    sizes = [4, 0, 2]
    done = sum(2 * 16 * 32 for size in sizes for _row in range(size))

    class Experts(torch.nn.Module):
        def forward(self, x, w, offsets):
            return torch._grouped_mm(x, w, offsets)

    graph = rt.trace(Experts(), x, w, torch.tensor([4, 4, 6], dtype=torch.int32))
    assert rt.plan(graph, "eager").total.flops() == done


def test_an_activation_behind_a_product_is_vector_work():
    """relu is a comparison; gelu what the op of that name costs."""
    bias, x, w = meta(3), meta(7, 5), meta(5, 3)
    plain = cost(lambda: torch.addmm(bias, x, w)).flops(["vector"])
    fused = lambda gelu: cost(  # noqa: E731
        lambda: torch._addmm_activation(bias, x, w, use_gelu=gelu), "_addmm_activation"
    ).flops(["vector"])
    alone = cost(lambda: F.gelu(meta(7, 3), approximate="tanh")).flops(["vector"])
    assert (fused(False) - plain, fused(True) - plain) == (7 * 3, alone)


def test_groups_without_rows_are_not_read():
    bf16 = torch.bfloat16
    x, w, offsets = (
        meta(4, 16, dtype=bf16),
        meta(64, 16, 32, dtype=bf16),
        meta(64, dtype=torch.int32),
    )
    call = lambda: torch._grouped_mm(x, w, offsets)  # noqa: E731
    others = 2 * (4 * 16 + 4 * 32) + 4 * 64
    assert (
        cost(call, "_grouped_mm").bytes() == others + 2 * 4 * 16 * 32
    )  # at most one group per row
    two = cost(call, "_grouped_mm", groups_touched=2)
    assert two.bytes() == others + 2 * 2 * 16 * 32
    assert [(work.rows, flop) for work, flop in two.work.items()] == [(2, 2 * 4 * 16 * 32)]


def test_the_weight_gradient_of_a_grouped_product_counts_every_row_once():
    bf16 = torch.bfloat16
    x, dy = meta(96, 16, dtype=bf16), meta(96, 32, dtype=bf16)
    offsets = meta(4, dtype=torch.int32)
    found = cost(lambda: torch._grouped_mm(x.t(), dy, offsets), "_grouped_mm")
    assert found.flops() == 2 * 96 * 16 * 32
    assert found.bytes() == 2 * (96 * 16 + 96 * 32 + 4 * 16 * 32) + 4 * 4


@pytest.mark.parametrize(
    "shapes",
    [
        ((3, 4), (4, 5)),
        ((2, 3, 4), (4, 5)),
        ((2, 3, 4), (2, 4, 5)),
        ((6, 1, 3, 4), (2, 4, 5)),
        ((4,), (4, 5)),
        ((3, 4), (4,)),
        ((4,), (4,)),
    ],
)
def test_the_composite_matmul_counts_what_it_decomposes_to(shapes):
    a, b = (meta(*s) for s in shapes)
    out = a @ b
    from rooftrace.costmodels.rules.matmul import matmul
    from tests.costmodels.rules_support import view_of

    whole = matmul(view_of(torch.ops.aten.matmul.default, (a, b), {}, out))
    parts = cost(lambda: torch.ops.aten.matmul(a, b))
    assert whole.flops() == parts.flops()


def test_attributes_of_a_view_have_schema_names():
    op = view(lambda: F.conv2d(meta(2, 4, 8, 8), meta(6, 4, 3, 3), stride=2))
    assert (op.target, op.attribute("stride")) == ("aten.convolution.default", (2, 2))
