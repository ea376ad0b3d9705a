"""Kernels that pass over their data more than once: what they read and write is that of the single
kernels that do the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rooftrace as rt
import rooftrace.tracer.recording.recurrent
from rooftrace.costmodels.estimates import estimate
from rooftrace.costmodels.fusion import plan
from rooftrace.costmodels.ops import Cost
from rooftrace.tracer import trace
from tests.costmodels.rules_support import cost, meta

HALF = torch.float16
LONG, SHORT = (64, 3, 64, 64), (4, 3, 8, 8)  # 512 KiB and 512 bytes a channel


def _moved(found: Cost, *, write: bool) -> int:
    return sum(size for access, size in found.traffic.items() if access.write is write)


def _batch_norm(shape: tuple[int, ...], training: bool = True) -> Cost:
    x, ones = meta(*shape, dtype=HALF), meta(shape[1])
    running = (meta(shape[1]), meta(shape[1])) if not training else (None, None)
    call = torch.ops.aten.native_batch_norm
    return cost(lambda: call(x, ones, ones, *running, training, 0.1, 1e-5))


def test_batch_norm_reads_long_channels_for_the_statistics_and_again_to_apply_them():
    x = meta(*LONG, dtype=HALF)
    statistics = _moved(cost(lambda: x.sum((0, 2, 3))), write=False)
    applied = _moved(cost(lambda: x.mul(x)), write=False)
    parameters = 3 * 4  # weight and bias are one tensor here
    assert _moved(_batch_norm(LONG), write=False) == statistics + applied + parameters


def test_batch_norm_reads_short_channels_and_those_of_evaluation_once():
    for shape, training in ((SHORT, True), (LONG, False)):
        size = 2 * meta(*shape).numel()
        assert size <= _moved(_batch_norm(shape, training), write=False) < size + 100


def _batch_norm_backward(shape: tuple[int, ...], *mask: bool) -> Cost:
    x, channel = meta(*shape, dtype=HALF), meta(shape[1])
    grad, call = meta(*shape, dtype=HALF), torch.ops.aten.native_batch_norm_backward
    return cost(
        lambda: call(grad, x, channel, None, None, channel, channel, True, 1e-5, list(mask))
    )


def test_the_backward_of_batch_norm_reads_long_channels_for_its_sums_and_again_for_the_input():
    size = 2 * meta(*LONG).numel()
    sums = _moved(_batch_norm_backward(LONG, False, True, True), write=False)
    assert 2 * size <= sums < 2 * size + 100
    all_three = _moved(_batch_norm_backward(LONG, True, True, True), write=False)
    assert all_three - sums == 2 * size  # the incoming gradient and x


def test_group_norm_reads_long_groups_twice():
    x, ones = meta(2, 32, 128, 128, dtype=HALF), meta(32)
    sizes = 2 * x.numel()
    for groups, times in ((1, 2), (32, 1)):  # 1 MiB, and 32 KiB, in a group
        found = cost(lambda groups=groups: F.group_norm(x, groups, ones, ones), "native_group_norm")
        assert times * sizes <= _moved(found, write=False) < times * sizes + 200


def test_each_gradient_of_a_convolution_is_a_kernel_that_reads_the_incoming_one():
    x, weight = meta(2, 8, 10, 10), meta(6, 8, 3, 3)
    grad = meta(2, 6, 8, 8)
    rest = ([6], [1, 1], [0, 0], [1, 1], False, [0, 0], 1)

    def backward(*mask: bool) -> Cost:
        call = torch.ops.aten.convolution_backward
        return cost(lambda: call(grad, x, weight, *rest, list(mask)))

    alone = [backward(*(place == wanted for place in range(3))) for wanted in range(3)]
    together = backward(True, True, True)
    assert together.bytes() == sum(one.bytes() for one in alone)
    assert together.flops() == sum(one.flops() for one in alone)


def test_gates_of_a_recurrent_network_go_through_memory_as_in_its_unrolled_products():
    batch, steps, size, hidden = 3, 5, 7, 4
    x, states = meta(batch, steps, size, dtype=HALF), [meta(1, batch, hidden, dtype=HALF)] * 2
    weights = [meta(4 * hidden, n, dtype=HALF) for n in (size, hidden)]
    options = ("lstm", False, 1, False, True)
    found = cost(lambda: torch.ops.rooftrace.rnn(x, states, weights, *options))
    first = cost(lambda: meta(batch * steps, size, dtype=HALF) @ weights[0].t())
    step = cost(lambda: meta(batch, hidden, dtype=HALF) @ weights[1].t())
    gates = meta(batch, 4 * hidden, dtype=HALF)
    added = cost(lambda: gates + meta(batch, 4 * hidden, dtype=HALF))
    results = 2 * batch * hidden * (steps + 2)  # the output, and both states
    written = _moved(first, write=True) + steps * _moved(step, write=True)
    assert _moved(found, write=True) == written + results
    operands = 2 * (x.numel() + 2 * batch * hidden + sum(w.numel() for w in weights))
    assert abs(_moved(found, write=False) - steps * _moved(added, write=False) - operands) <= (
        2 * batch * hidden  # the two states are one tensor here
    )


def test_what_is_read_twice_is_compulsory_once():
    norm = nn.InstanceNorm2d(3, device="meta")  # batch norm that never evaluates
    x = meta(1, 3, 256, 256)
    planned = plan(trace(norm, x), "eager")
    twice = 4 * x.numel() * 3  # the statistics, the result's input, and the result
    once = 4 * x.numel() * 2
    assert 0 <= planned.bytes.total - twice < 100  # and its statistics
    assert planned.compulsory == once


def test_a_thread_for_each_position_goes_through_all_images_and_channels():
    """Four times the channels take four times as long in eager mode; four times the positions do
    not, as they are other threads.  A compiled kernel moves its bytes, whatever they are of."""
    seconds = {}
    for mode in ("eager", "compiled"):
        for channels, side in ((256, 7), (1024, 7), (256, 14)):
            x = meta(64, channels, side, side)
            step = estimate(trace(_Doubled(), x), chip="rtx-3090", execution=mode)
            seconds[mode, channels, side] = step.t_est
    eager = seconds["eager", 256, 7]
    assert 3.9 < seconds["eager", 1024, 7] / eager < 4.1
    assert 0.99 < seconds["eager", 256, 14] / eager < 1.1
    assert eager > 10 * seconds["compiled", 1024, 7]
    images = meta(64, 256, 7, 7).to(memory_format=torch.channels_last)
    last = estimate(trace(_Doubled(), images), chip="rtx-3090", execution="eager")
    assert eager > 10 * last.t_est


class _Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, scale_factor=2, mode="bilinear")


@pytest.mark.parametrize("mode", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("both", [False, True])
def test_time_steps_of_a_recurrent_network_follow_one_another(mode: str, both: bool):
    """Twice the steps, or twice the layers, take twice as long; twice the rows of tiny products and
    the other direction take no longer."""
    chip = rt.load_chip("rtx-4090")

    def seconds(steps: int, batch: int = 2, layers: int = 1) -> float:
        network = getattr(nn, mode)(64, 64, layers, bidirectional=both, device="meta")
        found = rt.estimate(network, meta(steps, batch, 64), chip=chip, execution="eager")
        (row,) = (row for row in found.rows if row.name == "rnn")
        return row.timing.t_device - row.timing.gap

    once = seconds(256)
    assert once == pytest.approx(256 * 5.6e-6, rel=0.1)
    assert seconds(512) == pytest.approx(2 * once, rel=0.05)
    assert seconds(256, layers=2) == pytest.approx(2 * once, rel=0.05)
    assert seconds(256, batch=4) == pytest.approx(once, rel=0.05)
