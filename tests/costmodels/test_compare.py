"""Our counts beside those of FlopCounterMode and fvcore, run for real on the same modules."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

import rooftrace as rt
from rooftrace.costmodels.estimates import compare, flop_counts
from rooftrace.costmodels.estimates.counters import EVERYWHERE
from rooftrace.errors import RequestError
from rooftrace.reporting.views.moduletrees import notes
from rooftrace.tracer.inputs.calls import call_inputs
from rooftrace.tracer.phases.counters import PeerCount, count_with
from tests.releases import TORCH, needs_torch

B, S, E = 2, 10, 16


class Mixed(nn.Module):
    """A linear layer, an LSTM, a norm, attention and a convolution."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(E, 2 * E)
        self.rnn = nn.LSTM(2 * E, E, batch_first=True)
        self.norm = nn.LayerNorm(E)
        self.conv = nn.Conv1d(E, 8, 3)

    def forward(self, x):
        h, _ = self.rnn(self.up(x))
        h = self.norm(h)
        return self.conv(F.scaled_dot_product_attention(h, h, h).transpose(1, 2))


class Blocks(nn.Module):
    def __init__(self, n=4):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(E, 2, 4 * E, batch_first=True) for _ in range(n)
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def on_meta(kind):
    with torch.device("meta"):
        return kind().eval()


@pytest.fixture
def x():
    return torch.empty(B, S, E, device="meta")


def by_peer(found, phase="forward"):
    return {one.peer: one for one in found if one.phase == phase}


@needs_torch(2, 11, "a trace of torch.jit with a convolution on meta")
def test_the_differences_add_up_and_each_has_its_reason(x):
    found = by_peer(rt.compare(on_meta(Mixed), x, phases=["forward"]))
    fcm, fvcore = found["flopcounter"], found["fvcore"]
    assert fcm.ratio == 1 and not fcm.differences and fcm.device == "meta"
    # fvcore: no attention, no LSTM; and it counts in multiply-adds.
    assert fvcore.peer_unit == "MAC" and fvcore.ratio < 0.5 and not fvcore.unexplained
    delta = {d.module: (d.delta, d.reason) for d in fvcore.differences}
    assert delta == {
        "": (2 * 2 * B * S * S * E, "no formula for aten::scaled_dot_product_attention"),
        "rnn": (2 * B * S * 4 * E * (2 * E + E), "no formula for aten::lstm"),
    }
    assert sum(n for n, _ in delta.values()) == fvcore.flops_matrix - fvcore.peer_matrix
    # 5 FLOP an element or so by fvcore's own convention for norms: left out of the matrix FLOPs.
    assert fvcore.peer_vector > 0


def test_on_real_tensors_flop_counter_mode_misses_the_fused_lstm():
    (one,) = rt.compare(Mixed().eval(), torch.zeros(B, S, E), peers=["flopcounter"],
                        phases=["forward"])  # fmt: skip
    assert one.device == "cpu"
    assert [(d.module, d.reason) for d in one.differences] == [
        ("rnn", "no formula for aten.mkldnn_rnn_layer")
    ]


def test_equal_layers_are_one_difference(x):
    found = by_peer(rt.compare(on_meta(Blocks), x, phases=["forward"]))
    assert found["flopcounter"].ratio == 1
    (one,) = found["fvcore"].differences
    assert (one.module, one.instances) == ("layers.*.self_attn", 4)
    assert one.delta == 4 * 2 * 2 * B * S * S * E


def test_backward_is_compared_by_op():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(E, 3 * E)

        def forward(self, x):
            q, k, v = self.qkv(x)[:, None].chunk(3, -1)
            return F.scaled_dot_product_attention(q, k, v)

    found = rt.compare(on_meta(Attention), torch.empty(B, S, E, device="meta"))
    fcm, fvcore = (by_peer(found, "training")[name] for name in ("flopcounter", "fvcore"))
    assert fvcore.error == "fvcore counts no backward" and fvcore.ratio is None
    # The fused backward computes Q K^T again; the products that ran on meta had it at hand.
    (one,) = fcm.differences
    assert one.module == EVERYWHERE and one.delta == 2 * B * S * S * E
    assert "a second time" in one.reason


def test_the_backward_of_a_whole_recurrent_network_makes_more_than_its_steps(x):
    with torch.device("meta"):
        model = nn.LSTM(E, 8, batch_first=True)
    found = rt.compare(model, x, peers=["flopcounter"], phases=["training"])
    (one,) = found[0].differences
    # Of the first hidden state, once; and of the input at every step.
    assert one.delta == 2 * B * 4 * 8 * 8 + 2 * B * S * 4 * 8 * E
    assert "makes gradients that nothing reads" in one.reason


def test_a_gap_without_a_reason_is_not_hidden(x):
    model = on_meta(Blocks)
    graph = rt.trace(model, x)
    peer = count_with("flopcounter", model, call_inputs(model, (x,), {}), "forward")
    key = max(peer.flops, key=lambda k: peer.flops[k])
    wrong = replace(peer, flops={**peer.flops, key: peer.flops[key] + 10})
    (one,) = compare(graph, wrong).differences
    assert one.delta == -10 and one.reason == ""
    assert compare(graph, wrong).unexplained == 10


@pytest.mark.parametrize(
    ("asks", "device"), [(None, "meta"), ("real", "meta, as fake tensors"), ("always", "cpu")]
)
def test_code_that_asks_for_values_runs_with_fake_tensors_or_with_real_ones(asks, device, x):
    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(E, E)

        def forward(self, x):
            if asks == "always" or (asks and not isinstance(x, FakeTensor)):
                assert not x.isnan().all()
            return self.linear(x)

    (one,) = rt.compare(on_meta(Asks), x, peers=["flopcounter"], phases=["forward"])
    assert one.device == device and one.ratio == 1 and one.flops_matrix == 2 * B * S * E * E


def test_a_peer_that_cannot_run_the_module_says_why():
    class Refuses(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3, 3))

        def forward(self, x):
            if torch.jit.is_tracing():
                raise RuntimeError("no tracing, please")
            return x @ self.weight

    (one,) = rt.compare(Refuses(), torch.zeros(2, 3), peers=["fvcore"], phases=["forward"])
    assert one.error == "on cpu: RuntimeError: no tracing, please"
    assert one.flops_matrix == 2 * 2 * 3 * 3 and one.ratio is None


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_view_of_a_parameter_in_a_module_is_counted_where_torchs_own_hooks_fail(device):
    class Probed(nn.Module):
        def __init__(self):
            super().__init__()
            self.probe = nn.Parameter(torch.ones(1, 1, E))
            self.lin = nn.Linear(E, E)
            self.rnn = nn.LSTM(E, E, batch_first=True)

        def forward(self, x):
            return self.rnn(x)[0] + self.lin(self.probe.expand(len(x), 1, E))

    with torch.device(device):
        model, x = Probed().eval(), torch.ones(B, S, E)
    words = "gradient function" if TORCH >= (2, 11) else None
    refused = pytest.raises(AssertionError, match=words)
    with refused, torch.no_grad(), FlopCounterMode(display=False):
        model(x)
    found = by_peer(rt.compare(model, x, peers=["flopcounter"]))
    one = found["flopcounter"]
    assert not one.error and "hooks of ours" in one.note and one.note in notes(one)
    # The linear layer is counted in its place; on real tensors the fused LSTM is not, and named.
    missed = 2 * B * S * 4 * E * (E + E) if device == "cpu" else 0
    assert one.flops_matrix - one.peer_matrix == missed and not one.unexplained
    assert [d.module for d in one.differences] == (["rnn"] if missed else [])
    training = by_peer(rt.compare(model, x, peers=["flopcounter"], phases=["training"]), "training")
    assert not training["flopcounter"].note  # there its own hooks work, and see backward too


def test_keyword_arguments_and_what_a_module_keeps_are_left_as_they_were():
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(E, E)
            self.calls = []

        def forward(self, *, x, scale=1):
            self.calls.append(scale)
            return self.lin(x) * scale

    model = Keeps().train()
    found = rt.compare(model, x=torch.zeros(B, E), scale=3, phases=["forward"])
    assert [one.ratio for one in found] == [1, 1]
    assert model.calls == [] and model.training and model.lin.weight.grad is None


def test_other_names_are_refused():
    with pytest.raises(RequestError, match="'thop': expected some of flopcounter, fvcore"):
        rt.compare(nn.Linear(2, 2), torch.zeros(1, 2), peers=["thop"])
    with pytest.raises(RequestError, match="expected some of"):
        rt.compare(nn.Linear(2, 2), torch.zeros(1, 2), peers=[])


def test_an_error_is_a_comparison_too(x):
    graph = rt.trace(on_meta(Blocks), x)
    one = compare(graph, PeerCount("fvcore", error="gone"))
    assert one.to_dict()["error"] == "gone" and one.flops_matrix > 0


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_counted_as_flop_counter_mode_does_on_cuda(causal):
    x = torch.randn(2, 3, 12, 8)
    q, k, v = (torch.nn.Parameter(x + i) for i in range(3))
    with FlopCounterMode(display=False) as written_out, sdpa_kernel(SDPBackend.MATH):
        F.scaled_dot_product_attention(q, k, v, is_causal=causal).sum().backward()
    with rt.capture(nn.Identity()) as ours:
        F.scaled_dot_product_attention(q, k, v, is_causal=causal).sum().backward()
    counts = {op: flops for (_, op), flops in flop_counts(ours.graph).items()}
    shape = tuple(x.shape)
    assert sorted(counts.values()) == [
        sdpa_flop_count(shape, shape, shape),
        sdpa_backward_flop_count(shape, shape, shape, shape),
    ]
    scores = 2 * 2 * 3 * 12 * 12 * 8  # computed a second time by a fused kernel alone
    assert sum(counts.values()) == written_out.get_total_flops() + scores
