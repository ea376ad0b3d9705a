"""Reductions, softmax, norms, gradients: textbook code run on numbers that count what is done.

Each test runs the textbook on counting numbers, holds its values against torch, and its count
against the rule.  So the count belongs to code that is known to compute the right thing.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.costmodels.rules_support import cost, index, meta
from tests.releases import needs_torch

pytestmark = pytest.mark.quick

EPS = 1e-5


class Counter:
    """Makes numbers and counts what is done with them."""

    def __init__(self) -> None:
        self.flops = 0

    def row(self, values) -> list[Number]:
        return [Number(float(v), self) for v in values]


class Number:
    """A float whose arithmetic, comparisons and functions are counted."""

    def __init__(self, value: float, counter: Counter) -> None:
        self.value, self.counter = value, counter

    def _make(self, value: float) -> Number:
        self.counter.flops += 1
        return Number(value, self.counter)

    def __add__(self, o):
        return self._make(self.value + getattr(o, "value", o))

    def __sub__(self, o):
        return self._make(self.value - getattr(o, "value", o))

    def __mul__(self, o):
        return self._make(self.value * getattr(o, "value", o))

    def __truediv__(self, o):
        return self._make(self.value / getattr(o, "value", o))

    def larger(self, o):
        return self._make(max(self.value, o.value))

    def exp(self):
        return self._make(math.exp(self.value))

    def log(self):
        return self._make(math.log(self.value))

    def sqrt(self):
        return self._make(math.sqrt(self.value))

    def rsqrt(self):
        return self._make(self.value**-0.5)


def summed(row):
    total = row[0]
    for x in row[1:]:
        total = total + x
    return total


def largest(row):
    best = row[0]
    for x in row[1:]:
        best = best.larger(x)
    return best


def mean_of(row):
    return summed(row) / len(row)


def differences(row):
    mean = mean_of(row)
    return [x - mean for x in row]


def variance(row, correction=1):
    return summed([d * d for d in differences(row)]) / (len(row) - correction)


def logsumexp(row):
    top = largest(row)
    return summed([(x - top).exp() for x in row]).log() + top


def softmax(row):
    top = largest(row)
    parts = [(x - top).exp() for x in row]
    total = summed(parts)
    return [p / total for p in parts]


def log_softmax(row):
    top = largest(row)
    shifted = [x - top for x in row]
    total = summed([x.exp() for x in shifted]).log()
    return [x - total for x in shifted]


def running(combine):
    def scan(row):
        out = [row[0]]
        for x in row[1:]:
            out.append(combine(out[-1], x))
        return out

    return scan


def norm2(row):
    return summed([x * x for x in row]).sqrt()


ROWS = {
    "sum": (summed, lambda x: x.sum(1)),
    "mean": (mean_of, lambda x: x.mean(1)),
    "amax": (largest, lambda x: x.amax(1)),
    "max": (largest, lambda x: x.max(1)[0]),
    "argmax": (
        lambda row: [
            Number(max(range(len(row)), key=lambda i: row[i].value), row[0].counter)
            for _ in [largest(row)]
        ],
        lambda x: x.argmax(1, keepdim=True),
    ),
    "var": (variance, lambda x: x.var(1)),
    "std": (lambda r: variance(r).sqrt(), lambda x: x.std(1)),
    "var_mean": (variance, lambda x: torch.var_mean(x, 1)[0]),
    "logsumexp": (logsumexp, lambda x: x.logsumexp(1)),
    "linalg_vector_norm": (norm2, lambda x: torch.linalg.vector_norm(x, dim=1)),
    "prod": (lambda r: running(Number.__mul__)(r)[-1], lambda x: x.prod(1)),
    "_softmax": (softmax, lambda x: x.softmax(1)),
    "_log_softmax": (log_softmax, lambda x: x.log_softmax(1)),
    "cumsum": (running(Number.__add__), lambda x: x.cumsum(1)),
    "cumprod": (running(Number.__mul__), lambda x: x.cumprod(1)),
    "cummax": (running(Number.larger), lambda x: x.cummax(1)[0]),
}


@pytest.mark.parametrize("shape", [(3, 7), (5, 1), (1, 16)])
@pytest.mark.parametrize("name", ROWS)
def test_rows(name, shape):
    textbook, function = ROWS[name]
    if shape[1] == 1 and name in ("var", "std", "var_mean"):
        return  # one value has no variance
    x = torch.rand(shape, dtype=torch.float64) + 0.5
    counter = Counter()
    rows = [textbook(counter.row(row)) for row in x.tolist()]
    values = [[n.value for n in r] if isinstance(r, list) else r.value for r in rows]
    assert torch.allclose(torch.tensor(values, dtype=torch.float64), function(x).double())
    assert cost(lambda: function(meta(*shape)), name).flops() == counter.flops


def test_cumsum_adds_once_per_element_after_the_first_along_any_dim():
    done = 0
    for _a in range(3):
        for _c in range(15):
            for _b in range(1, 8):
                done += 1
    assert cost(lambda: meta(3, 8, 15).cumsum(1)).flops() == done


def test_a_softmax_reads_and_writes_once():
    assert cost(lambda: meta(64, 128).softmax(-1)).bytes() == 2 * 4 * 64 * 128


def test_softmax_gradients():
    x = torch.rand(3, 7, dtype=torch.float64, requires_grad=True)
    g = torch.rand(3, 7, dtype=torch.float64)
    for name, function in (
        ("_softmax_backward_data", torch.softmax),
        ("_log_softmax_backward_data", torch.log_softmax),
    ):
        y = function(x, 1)
        (expected,) = torch.autograd.grad(y, x, g)
        counter, found = Counter(), []
        for yr, gr in zip(y.tolist(), g.tolist(), strict=True):
            ys, gs = counter.row(yr), counter.row(gr)
            if "log" in name:
                total = summed(gs)
                found.append([(b - a.exp() * total).value for a, b in zip(ys, gs, strict=True)])
            else:
                total = summed([a * b for a, b in zip(ys, gs, strict=True)])
                found.append([(a * (b - total)).value for a, b in zip(ys, gs, strict=True)])
        assert torch.allclose(torch.tensor(found, dtype=torch.float64), expected)
        out = function(meta(3, 7, grad=True), 1)
        assert cost(lambda out=out: out.backward(meta(3, 7)), name).flops() == counter.flops


# -- norms -----------------------------------------------------------------------------------------


def standardised(row):
    ds = differences(row)
    rstd = (summed([d * d for d in ds]) / len(row) + EPS).rsqrt()
    return [d * rstd for d in ds]


@pytest.mark.parametrize("affine", [False, True])
def test_layer_norm(affine):
    x = torch.rand(4, 6, dtype=torch.float64)
    w, b = torch.rand(6, dtype=torch.float64), torch.rand(6, dtype=torch.float64)
    counter, found = Counter(), []
    for row in x.tolist():
        ys = standardised(counter.row(row))
        if affine:
            ys = [y * p + q for y, p, q in zip(ys, w.tolist(), b.tolist(), strict=True)]
        found.append([y.value for y in ys])
    weights = (w, b) if affine else (None, None)
    assert torch.allclose(
        torch.tensor(found, dtype=torch.float64), F.layer_norm(x, (6,), *weights, eps=EPS)
    )
    metas = (meta(6), meta(6)) if affine else (None, None)
    call = lambda: F.layer_norm(meta(4, 6), (6,), *metas)  # noqa: E731
    assert cost(call, "native_layer_norm").flops() == counter.flops


def layer_norm_backward_textbook(x, g, w, counter):
    """dx, dw, db of layer norm for rows x and incoming rows g, statistics given."""
    n, dxs, dws, dbs = len(x[0]), [], None, None
    for xr, gr in zip(x, g, strict=True):
        mean = sum(xr) / n
        rstd = (sum((v - mean) ** 2 for v in xr) / n + EPS) ** -0.5
        xs, gs = counter.row(xr), counter.row(gr)
        xhat = [(v - mean) * rstd for v in xs]
        hs = [a * b for a, b in zip(gs, w, strict=True)]
        s1 = summed(hs) / n
        s2 = summed([a * b for a, b in zip(hs, xhat, strict=True)]) / n
        dxs.append([((a - s1 - b * s2) * rstd).value for a, b in zip(hs, xhat, strict=True)])
        dw = [a * b for a, b in zip(gs, xhat, strict=True)]
        dws = dw if dws is None else [a + b for a, b in zip(dws, dw, strict=True)]
        dbs = gs if dbs is None else [a + b for a, b in zip(dbs, gs, strict=True)]
    return dxs, [v.value for v in dws], [v.value for v in dbs]


def test_layer_norm_backward():
    x = torch.rand(4, 6, dtype=torch.float64, requires_grad=True)
    w = torch.rand(6, dtype=torch.float64, requires_grad=True)
    b = torch.rand(6, dtype=torch.float64, requires_grad=True)
    g = torch.rand(4, 6, dtype=torch.float64)
    counter = Counter()
    found = layer_norm_backward_textbook(x.tolist(), g.tolist(), w.tolist(), counter)
    expected = torch.autograd.grad(F.layer_norm(x, (6,), w, b, eps=EPS), (x, w, b), g)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.allclose(torch.tensor(ours, dtype=torch.float64), theirs)
    out = F.layer_norm(meta(4, 6, grad=True), (6,), meta(6, grad=True), meta(6, grad=True))
    assert (
        cost(lambda: out.backward(meta(4, 6)), "native_layer_norm_backward").flops()
        == counter.flops
    )


def test_group_norm_is_layer_norm_over_the_values_of_a_group():
    """2 images x 3 groups of 2 channels x 16 pixels: 6 rows of 32."""
    x, w = meta(2, 6, 4, 4), meta(6)
    found = cost(lambda: F.group_norm(x, 3, w, w), "native_group_norm")
    rows = cost(lambda: F.layer_norm(meta(6, 32), (32,), meta(32), meta(32)), "native_layer_norm")
    assert found.flops() == rows.flops()


def test_batch_norm_in_training_and_evaluation():
    x = torch.rand(3, 2, 4, dtype=torch.float64)
    w, b = torch.rand(2, dtype=torch.float64), torch.rand(2, dtype=torch.float64)
    mean, var = torch.rand(2, dtype=torch.float64), torch.rand(2, dtype=torch.float64) + 1
    train, evaluate = Counter(), Counter()
    rows, fixed = [], []
    for c in range(2):
        values = x[:, c].flatten().tolist()
        rows.append(
            [(y * w[c].item() + b[c].item()).value for y in standardised(train.row(values))]
        )
        rstd = (evaluate.row([var[c]])[0] + EPS).rsqrt()
        fixed.append(
            [
                ((v - mean[c].item()) * rstd * w[c].item() + b[c].item()).value
                for v in evaluate.row(values)
            ]
        )
        r, s = train.row([mean[c]])[0], train.row([1.0])[0]
        r * 0.9 + s * 0.1  # running mean
        r * 0.9 + (s * (12 / 11)) * 0.1  # running variance, made unbiased
    expected = F.batch_norm(x, None, None, w, b, training=True, eps=EPS).transpose(0, 1).flatten(1)
    assert torch.allclose(torch.tensor(rows, dtype=torch.float64), expected)
    still = F.batch_norm(x, mean, var, w, b, eps=EPS).transpose(0, 1).flatten(1)
    assert torch.allclose(torch.tensor(fixed, dtype=torch.float64), still)
    m = meta(2)
    call = lambda training: cost(  # noqa: E731
        lambda: F.batch_norm(meta(3, 2, 4), m, m.clone(), m, m, training), "native_batch_norm"
    )
    assert call(True).flops() == train.flops
    assert call(False).flops() == evaluate.flops


def test_batch_norm_backward():
    x = torch.rand(5, 2, 3, dtype=torch.float64, requires_grad=True)
    w = torch.rand(2, dtype=torch.float64, requires_grad=True)
    b = torch.rand(2, dtype=torch.float64, requires_grad=True)
    g = torch.rand(5, 2, 3, dtype=torch.float64)
    counter, dxs, dws, dbs, n = Counter(), [], [], [], 15
    for c in range(2):
        xr, gr = x[:, c].flatten().tolist(), g[:, c].flatten().tolist()
        mean = sum(xr) / n
        rstd = Number((sum((v - mean) ** 2 for v in xr) / n + EPS) ** -0.5, counter)
        gs = counter.row(gr)
        ds = [v - mean for v in counter.row(xr)]
        s1 = summed(gs)
        s2 = summed([a * d for a, d in zip(gs, ds, strict=True)])
        mean_g, k, scale = s1 / n, s2 * (rstd * rstd) / n, rstd * w[c].item()
        dxs.append([((a - mean_g - d * k) * scale).value for a, d in zip(gs, ds, strict=True)])
        dws.append((s2 * rstd).value)
        dbs.append(s1.value)
    expected = torch.autograd.grad(F.batch_norm(x, None, None, w, b, True, eps=EPS), (x, w, b), g)
    assert torch.allclose(
        torch.tensor(dxs, dtype=torch.float64), expected[0].transpose(0, 1).flatten(1)
    )
    assert torch.allclose(torch.tensor(dws, dtype=torch.float64), expected[1])
    assert torch.allclose(torch.tensor(dbs, dtype=torch.float64), expected[2])
    p = lambda: meta(2, grad=True)  # noqa: E731
    out = F.batch_norm(meta(5, 2, 3, grad=True), None, None, p(), p(), True)
    assert (
        cost(lambda: out.backward(meta(5, 2, 3)), "native_batch_norm_backward").flops()
        == counter.flops
    )


@needs_torch(2, 11, "the fused backward of an RMS norm")
def test_rms_norm_and_its_gradient():
    x = torch.rand(4, 6, dtype=torch.float64, requires_grad=True)
    w = torch.rand(6, dtype=torch.float64, requires_grad=True)
    g = torch.rand(4, 6, dtype=torch.float64)
    forward, backward, ys, dxs, dws = Counter(), Counter(), [], [], None
    for xr, gr in zip(x.tolist(), g.tolist(), strict=True):
        row = forward.row(xr)
        rstd = (summed([v * v for v in row]) / 6 + EPS).rsqrt()
        ys.append([(v * rstd * p).value for v, p in zip(row, w.tolist(), strict=True)])
        gs = backward.row(gr)
        xhat = [v * rstd.value for v in backward.row(xr)]
        hs = [a * p for a, p in zip(gs, w.tolist(), strict=True)]
        s = summed([a * v for a, v in zip(hs, xhat, strict=True)]) / 6
        dxs.append([((a - v * s) * rstd.value).value for a, v in zip(hs, xhat, strict=True)])
        dw = [a * v for a, v in zip(gs, xhat, strict=True)]
        dws = dw if dws is None else [a + v for a, v in zip(dws, dw, strict=True)]
    y = F.rms_norm(x, (6,), w, EPS)
    assert torch.allclose(torch.tensor(ys, dtype=torch.float64), y)
    dx, dweight = torch.autograd.grad(y, (x, w), g)
    assert torch.allclose(torch.tensor(dxs, dtype=torch.float64), dx)
    assert torch.allclose(torch.tensor([v.value for v in dws], dtype=torch.float64), dweight)
    fused, fused_backward = torch.ops.aten._fused_rms_norm, torch.ops.aten._fused_rms_norm_backward
    from rooftrace.costmodels.rules.norm import rms_norm, rms_norm_backward
    from tests.costmodels.rules_support import view_of

    m, p = meta(4, 6), meta(6)
    ahead = view_of(fused.default, (m, [6], p, EPS), {}, (meta(4, 6), meta(4, 1)))
    assert rms_norm(ahead).flops() == forward.flops
    assert rms_norm(ahead).bytes() == 4 * (24 + 6 + 24 + 4)
    back = view_of(
        fused_backward.default,
        (m, meta(4, 6), [6], meta(4, 1), p, [True, True]),
        {},
        (meta(4, 6), meta(6)),
    )
    assert rms_norm_backward(back).flops() == backward.flops


# -- losses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction,extra", [("none", 0), ("sum", 31), ("mean", 32)])
def test_a_loss_is_a_formula_and_a_reduction(reduction, extra):
    """(x - t)^2 is 2 flop for each of 32 values; a sum adds 31 times, a mean divides once more."""
    assert (
        cost(lambda: F.mse_loss(meta(4, 8), meta(4, 8), reduction=reduction), "mse_loss").flops()
        == 2 * 32 + extra
    )


def test_cross_entropy_reads_all_logits_once_and_one_log_probability_per_row():
    x, t = meta(16, 1000), index(16)
    nll = cost(lambda: F.cross_entropy(x, t), "nll_loss_forward")
    assert nll.bytes() == 4 * 16 + 8 * 16 + 4 + 4  # values, targets, loss and total weight
    assert nll.flops() == 16 + 16


def test_the_gradient_of_nll_writes_zeros_then_one_value_per_row():
    y = meta(16, 1000, grad=True)
    loss = F.nll_loss(y, index(16))
    found = cost(lambda: loss.backward(), "nll_loss_backward")
    assert found.bytes() == 4 * 16 * 1000 + 4 * 16 + 8 * 16 + 4 + 4
