"""Indexing, copies, pooling, recurrent networks, optimizers: expected values are sentences."""

import math

import pytest
import torch
import torch.nn.functional as F

import rooftrace.tracer.recording.recurrent  # noqa: F401  defines torch.ops.rooftrace
from rooftrace.costmodels.rules.images import adaptive_cells
from tests.costmodels.rules_support import cost, index, meta, price, view, views

pytestmark = pytest.mark.quick

BF16 = torch.bfloat16


# -- indexing --------------------------------------------------------------------------------------


def test_an_embedding_reads_the_rows_it_needs():
    table, ids = meta(50000, 64, dtype=BF16), index(2, 8)
    assert cost(lambda: F.embedding(ids, table)).bytes() == 2 * 16 * 64 + 8 * 16 + 2 * 16 * 64
    assert cost(lambda: F.embedding(ids, table), rows_touched=3).bytes() == (
        2 * 3 * 64 + 8 * 16 + 2 * 16 * 64
    )
    assert cost(lambda: F.embedding(ids, meta(4, 64, dtype=BF16))).bytes() == (
        2 * 4 * 64 + 8 * 16 + 2 * 16 * 64
    )


def test_the_gradient_of_an_embedding_zeroes_the_table_and_adds_rows():
    table = meta(1000, 64, grad=True)
    out = F.embedding(index(16), table)
    found = cost(lambda: out.sum().backward(), "embedding_dense_backward")
    zeros, gradient, rows = 4 * 1000 * 64, 4 * out.numel(), 4 * 16 * 64
    assert found.bytes() == zeros + 4 + 8 * 16 + 2 * rows  # the gradient is one expanded value
    assert found.flops() == 16 * 64
    assert gradient == rows


def test_index_reads_what_it_picks():
    x = meta(100, 20, 8)
    assert cost(lambda: x[index(5)]).bytes() == 4 * 5 * 160 + 8 * 5 + 4 * 5 * 160
    assert cost(lambda: x[:, index(5)]).bytes() == 4 * 100 * 5 * 8 + 8 * 5 + 4 * 100 * 5 * 8
    assert cost(lambda: x[index(5), index(5)]).bytes() == 4 * 5 * 8 + 2 * 8 * 5 + 4 * 5 * 8
    assert cost(lambda: x.index_select(1, index(50))).bytes() == 4 * 16000 + 8 * 50 + 4 * 40000


def test_gather_reads_one_element_each():
    x = meta(100, 20)
    assert cost(lambda: x.gather(1, index(100, 2))).bytes() == 4 * 200 + 8 * 200 + 4 * 200
    assert cost(lambda: x.gather(1, index(100, 90))).bytes() == 4 * 2000 + 8 * 9000 + 4 * 9000


def test_index_put_in_place_writes_only_the_rows_it_names():
    x, values = meta(1000, 64), meta(5, 64)

    def put(accumulate):
        return cost(lambda: x.index_put_((index(5),), values, accumulate))

    assert put(False).bytes() == 4 * 5 * 64 + 8 * 5 + 4 * 5 * 64
    assert put(True).bytes() == put(False).bytes() + 4 * 5 * 64
    assert put(True).flops() == 5 * 64
    copied = cost(lambda: x.index_put((index(5),), values))
    assert copied.bytes() == put(False).bytes() + 2 * 4 * 1000 * 64


def test_index_add_reads_and_writes_the_rows_it_adds_to():
    found = cost(lambda: meta(1000, 64).index_add_(0, index(5), meta(5, 64)))
    assert found.bytes() == 4 * 5 * 64 + 8 * 5 + 2 * 4 * 5 * 64
    assert found.flops() == 5 * 64


def test_scatter_in_place_writes_one_element_each():
    found = cost(lambda: meta(100, 20).scatter_(1, index(100, 2), meta(100, 2)))
    assert found.bytes() == 4 * 200 + 8 * 200 + 4 * 200 and found.flops() == 0
    part = cost(lambda: meta(100, 20).scatter_(1, index(100, 2), meta(100, 20)))
    assert part.bytes() == found.bytes()  # what the index does not reach is not read


# -- copies ----------------------------------------------------------------------------------------


def test_copies():
    x = meta(64, 64)
    assert cost(lambda: x.to(BF16)).bytes() == 4 * 4096 + 2 * 4096
    assert cost(lambda: x[:1].expand(64, 64).contiguous()).bytes() == 4 * 64 + 4 * 4096
    assert cost(lambda: torch.cat([x, x[:32]])).bytes() == 4 * (4096 + 2048) * 2
    assert cost(lambda: x.repeat(3, 1)).bytes() == 4 * 4096 + 3 * 4 * 4096
    assert cost(lambda: x.copy_(meta(64))).bytes() == 4 * 64 + 4 * 4096
    assert cost(lambda: F.pad(x, (1, 1))).bytes() == 4 * 4096 + 4 * 64 * 66


def test_fills_only_write_and_allocations_do_nothing():
    assert cost(lambda: meta(64).zero_()).bytes() == 4 * 64
    assert cost(lambda: meta(64).normal_()).bytes() == 4 * 64
    assert cost(lambda: torch.zeros_like(meta(64))).bytes() == 4 * 64
    assert cost(lambda: torch.arange(64, device="meta")).bytes() == 8 * 64
    assert cost(lambda: torch.empty_like(meta(64))).bytes() == 0


def test_views_are_free():
    x = meta(8, 8)
    found = views(
        lambda: [x.t(), x.view(64), x[2], x.unsqueeze(0), x.expand(2, 8, 8), x.split(4), x.detach()]
    )
    assert len({op.target for op in found}) == 7
    assert all(not price(op).traffic for op in found)


def test_the_gradient_of_a_slice_is_zeros_and_a_copy():
    x = meta(100, 8, grad=True)
    y = x[:10]
    found = cost(lambda: y.backward(meta(10, 8)), "slice_backward")
    assert found.bytes() == 4 * 10 * 8 + 4 * 100 * 8 + 4 * 10 * 8


def test_dropout_writes_its_mask():
    found = cost(
        lambda: torch.native_dropout(meta(64, 64, dtype=BF16), 0.1, True), "native_dropout"
    )
    assert found.bytes() == 2 * 4096 + 2 * 4096 + 4096


def test_long_rows_are_sorted_in_four_passes():
    """32-bit keys, 8 bits a pass: keys and 64-bit indices move three times more, both ways."""
    short, long = meta(2, 4096), meta(2, 8192)
    assert cost(lambda: short.sort()).bytes() == 4 * 8192 + (4 + 8) * 8192
    assert (
        cost(lambda: long.sort()).bytes() == 4 * 16384 + (4 + 8) * 16384 + 3 * 2 * (4 + 8) * 16384
    )


# -- pooling and resampling ------------------------------------------------------------------------


def test_pooling_compares_and_adds_within_its_windows():
    x, out = meta(2, 3, 8, 8), 2 * 3 * 4 * 4
    assert cost(lambda: F.max_pool2d(x, 2)).flops() == 3 * out
    assert cost(lambda: F.avg_pool2d(x, 2)).flops() == 4 * out
    assert cost(lambda: F.avg_pool2d(x, 2)).bytes() == 4 * (2 * 3 * 64 + out)


@pytest.mark.parametrize("n,m", [(7, 3), (8, 4), (5, 5), (3, 7), (224, 7)])
def test_adaptive_windows_hold_the_cells_that_torch_averages(n, m):
    """The gradient of a sum marks each cell once per window, divided by the window's size."""
    x = torch.ones(1, 1, n, 1, dtype=torch.float64, requires_grad=True)
    y = F.adaptive_avg_pool2d(x, (m, 1))
    cells = 0
    for i in range(m):
        (g,) = torch.autograd.grad(y[0, 0, i, 0], x, retain_graph=True)
        cells += int((g != 0).sum())
    assert adaptive_cells(n, m) == cells
    found = cost(lambda: torch.ops.aten._adaptive_avg_pool2d(meta(2, 3, n, 4), [m, 4]))
    assert found.flops() == 2 * 3 * cells * 4


def test_resampling_weighs_its_taps():
    x = meta(1, 2, 4, 4)
    out = 2 * 8 * 8
    for mode, taps in (("bilinear", 4), ("bicubic", 16)):
        found = cost(lambda mode=mode: F.interpolate(x, scale_factor=2, mode=mode))
        assert found.flops() == (2 * taps - 1) * out
    assert cost(lambda: F.interpolate(x, scale_factor=2)).flops() == 0


def test_fft_is_five_n_log_n():
    z = meta(4, 256, dtype=torch.complex64)
    assert cost(lambda: torch.fft.fft(z)).flops() == 4 * 5 * 256 * 8
    assert cost(lambda: torch.fft.rfft(meta(4, 256))).flops() == 4 * 5 * 256 * 8 // 2
    assert cost(lambda: torch.fft.irfft(meta(4, 129, dtype=torch.complex64))).flops() == (
        4 * 5 * 256 * 8 // 2
    )


def test_factorisations_have_their_leading_terms():
    a = meta(2, 30, 30)
    assert cost(lambda: torch.linalg.cholesky_ex(a)).flops() == 2 * 30**3 // 3
    assert cost(lambda: torch.linalg.lu_factor_ex(a)).flops() == 2 * 2 * 30**3 // 3
    assert cost(lambda: torch.linalg.solve_triangular(a, meta(2, 30, 5), upper=True)).flops() == (
        2 * 30 * 30 * 5
    )


# -- recurrent networks ----------------------------------------------------------------------------


def parameters(gates, size, hidden, layers, directions, biases):
    out = []
    for layer in range(layers):
        for _ in range(directions):
            width = size if layer == 0 else hidden * directions
            out += [meta(gates * hidden, width), meta(gates * hidden, hidden)]
            out += [meta(gates * hidden)] * 2 if biases else []
    return out


MODES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_a_recurrent_network_is_its_unrolled_products(mode, layers, directions):
    batch, steps, size, hidden, gates = 3, 5, 7, 4, MODES[mode]
    states = [meta(layers * directions, batch, hidden)] * (2 if mode == "lstm" else 1)
    params = parameters(gates, size, hidden, layers, directions, True)
    options = (mode, True, layers, directions == 2, True)
    x = meta(batch, steps, size)
    call = lambda: torch.ops.rooftrace.rnn(x, states, params, *options)  # noqa: E731
    done = 0
    for layer in range(layers):
        width = size if layer == 0 else hidden * directions
        for _direction in range(directions):
            for _step in range(steps):
                done += cost(
                    lambda width=width: [
                        meta(batch, width) @ meta(width, gates * hidden),
                        meta(batch, hidden) @ meta(hidden, gates * hidden),
                    ]
                ).flops(["matmul"])
    found = cost(call)
    assert found.flops(["matmul"]) == done
    assert {w.rows for w in found.work if w.operation == "matmul"} == {batch * steps, batch}
    out = call()
    back = lambda: torch.ops.rooftrace.rnn_backward(  # noqa: E731
        [torch.empty_like(out[0]), None, None], x, states, params, out[0], *options
    )
    assert cost(back).flops(["matmul"]) == 2 * done


def test_an_lstm_step_counts_its_gates():
    """Per hidden value: 4 gates of 1 + 2 bias adds, 3 sigmoids of 4, 2 tanh, c' 3, h' 1."""
    states = [meta(1, 3, 4)] * 2
    found = cost(
        lambda: torch.ops.rooftrace.rnn(
            meta(3, 5, 7), states, parameters(4, 7, 4, 1, 1, True), "lstm", True, 1, False, True
        )
    )
    assert found.flops(["vector"]) == 3 * 5 * 4 * (4 * (1 + 2) + 3 * 4 + 2 + 3 + 1)


def test_a_recurrent_network_reads_its_weights_once():
    params = parameters(4, 7, 4, 1, 1, True)
    states = [meta(1, 3, 4), meta(1, 3, 4)]
    found = cost(
        lambda: torch.ops.rooftrace.rnn(meta(3, 5, 7), states, params, "lstm", True, 1, False, True)
    )
    weights = 16 * 7 + 16 * 4 + 16  # the two biases are one tensor here
    gates = 3 * 5 * 4 * 4  # of each of two products: written, and read
    assert found.bytes() == 4 * (3 * 5 * 7 + 2 * 12 + weights + 3 * 5 * 4 + 2 * 12 + 4 * gates)


# -- optimizers ------------------------------------------------------------------------------------


def stepped(optimizer, **options):
    parameters = [torch.nn.Parameter(meta(64, 64)), torch.nn.Parameter(meta(64))]
    for p in parameters:
        p.grad = torch.empty_like(p)
    made = optimizer(parameters, **options)
    made.step()  # makes the states
    return made


def test_foreach_ops_stream_their_lists():
    xs, ys = [meta(64, 64), meta(64)], [meta(64, 64), meta(64)]
    n = 64 * 64 + 64
    found = cost(lambda: torch._foreach_add_(xs, ys))
    assert found.bytes() == 4 * (n + n + n) and found.flops() == n
    assert (
        cost(lambda: torch._foreach_addcdiv_(xs, ys, [meta(64, 64), meta(64)], 2.0)).flops()
        == 3 * n
    )
    assert cost(lambda: torch._foreach_copy_(xs, ys)).bytes() == 4 * (n + n)
    assert cost(lambda: torch._foreach_zero_(xs)).bytes() == 4 * n
    assert cost(lambda: torch._foreach_sqrt(xs)).bytes() == 4 * (n + n)


def test_both_forms_of_adamw_do_the_same_arithmetic():
    single = cost(stepped(torch.optim.AdamW, foreach=False).step)
    foreach = cost(stepped(torch.optim.AdamW, foreach=True).step)
    n = 64 * 64 + 64
    # Ten passes or so over the parameters; foreach divides by a list where the other folds a
    # number.
    assert abs(single.flops() - foreach.flops()) <= 2 * n
    assert abs(foreach.flops() / n - 14) <= 2


def test_fused_adamw_is_one_pass():
    n = 64 * 64
    lists = [[meta(64, 64)] for _ in range(4)]
    from rooftrace.costmodels.rules.optimizer import fused_adam
    from tests.costmodels.rules_support import view_of

    op = torch.ops.aten._fused_adamw_.default
    options = {
        "lr": 1e-3,
        "beta1": 0.9,
        "beta2": 0.99,
        "weight_decay": 0.1,
        "eps": 1e-8,
        "amsgrad": False,
        "maximize": False,
    }
    found = fused_adam(view_of(op, (*lists, [], [meta()]), options, None))
    assert found.bytes() == 4 * (4 * n + 3 * n) + 4  # p, g, m, v in; p, m, v out; the step
    assert found.flops() == 14 * n


@pytest.mark.parametrize(
    "name", ["AdamW", "Adam", "SGD", "Adagrad", "RMSprop", "Adamax", "NAdam", "RAdam"]
)
@pytest.mark.parametrize("foreach", [False, True])
def test_every_op_of_an_optimizer_has_a_rule(name, foreach):
    made = stepped(getattr(torch.optim, name), foreach=foreach)
    assert cost(made.step).bytes() >= 3 * 4 * (64 * 64 + 64)  # parameters in and out, gradients in


# -- collectives -----------------------------------------------------------------------------------


def test_a_ring_sends_its_share():
    from rooftrace.costmodels.ops.opview import OpView, Slot
    from rooftrace.costmodels.rules.collective import all_gather, all_reduce

    part = view(lambda: meta(1024) + 1).inputs[0]
    whole = view(lambda: meta(8192) + 1).inputs[0]
    args = (("input", Slot(0)), ("group_size", 8))
    gathered = all_gather(
        OpView("_c10d_functional.all_gather_into_tensor.default", (part,), (whole,), args)
    )
    assert gathered.bytes("link") == 7 * 4 * 1024
    reduced = all_reduce(OpView("_c10d_functional.all_reduce.default", (part,), (part,), args[:1]))
    assert reduced.bytes("link") == 2 * 4 * 1024  # the size of the group is not known: its bound
    assert math.isclose(reduced.flops(), 1024)


def ring(n: int, parts: list[int], add: bool) -> tuple[int, int]:
    """Bytes that device 0 sends, and the parts that it adds, while n devices pass parts around."""
    sent = added = 0
    for step in range(n - 1):
        sent += parts[-step % n]
        added += add
    return sent, added


@pytest.mark.parametrize("n", [1, 2, 8])
@pytest.mark.parametrize(
    ("name", "arguments", "rounds"),
    [
        ("c10d.allreduce_", ("tensors",), 2),
        ("c10d._allgather_base_", ("output_tensor", "input_tensor"), 1),
        ("c10d._reduce_scatter_base_", ("output_tensor", "input_tensor"), 1),
        ("c10d.alltoall_base_", ("output", "input"), 1),
        ("c10d.broadcast_", ("tensors",), 1),
        ("_dtensor.shard_dim_alltoall", ("input",), 1),
        ("_c10d_functional_autograd.reduce_scatter_tensor", ("input",), 1),
    ],
)
def test_collectives_send_what_a_ring_sends(name, arguments, rounds, n):
    from rooftrace.costmodels.ops.opview import OpView, Slot, find_rule

    whole = view(lambda: meta(8 * 1024) + 1).inputs[0]
    args = tuple((word, Slot(i)) for i, word in enumerate(arguments))
    facts = (("group_size", n),)
    buffers = (whole,) * len(args)
    cost = find_rule(f"{name}.default").price(
        OpView(f"{name}.default", buffers, (whole,), args, facts)
    )
    sent, _ = ring(n, [4 * 8 * 1024 // n] * n, add=False)
    assert cost.bytes("link") == rounds * sent


def test_every_collective_of_torch_has_a_rule_or_moves_nothing():
    from rooftrace.costmodels.ops.opview import find_rule

    spaces = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
    names = getattr(torch._C, "_dispatch_get_all_op_names", list)()
    found = {n.split(".")[0].replace("::", ".") for n in names if n.partition("::")[0] in spaces}
    assert {n for n in found if find_rule(f"{n}.default") is None} <= {
        "_dtensor.mesh_get_process_group"  # hands out a handle
    }
