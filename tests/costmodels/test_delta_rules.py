"""Delta rules and linear attention: found where they are written out, equal, and priced by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rooftrace as rt
from rooftrace.costmodels.ops.cost import MATRIX
from rooftrace.costmodels.ops.price import price_ops
from rooftrace.costmodels.rewrites.smallruns import SmallRun, SmallTensor
from rooftrace.graph.graph import OpGraph
from rooftrace.tracer.recording.serving import own_ops
from tests.costmodels import recurrence_support as written
from tests.costmodels.recurrence_support import HEADS, KEY, VALUE, Recurrence
from tests.costmodels.serving_support import BATCH, TOKENS, Caches, changed, filled, run, traced

BOTH = ("gated-delta-rule", "linear-attention")
OPS = tuple(
    f"rooftrace.{name}"
    for name in (
        "delta_rule", "delta_rule_", "linear_attention", "linear_attention_", "block_attention",
    )
)  # fmt: skip


def difference(graph: OpGraph, other: OpGraph, module: nn.Module) -> float:
    """The largest relative difference of outputs; each graph has caches of its own to write."""
    worst = 0.0
    for one, two in zip(run(graph, module, Caches()), run(other, module, Caches()), strict=True):
        assert one.shape == two.shape and not one.isnan().any()
        if one.numel():
            worst = max(worst, float((one - two).abs().max() / one.abs().max().clamp(min=1e-30)))
    return worst


def rewritten(module: nn.Module, phase: str, length: int) -> tuple[OpGraph, OpGraph, list[str]]:
    graph = traced(module, phase, BATCH, length)
    result, notes = changed(graph, *BOTH)
    return graph, result, [note for note in notes if "nothing" not in note]


# -- written by hand -------------------------------------------------------------------------------

DELTA, LINEAR = "gated-delta-rule: 1 delta rule", "linear-attention: 1 linear attention"


@pytest.mark.parametrize(("phase", "length"), [("prefill", 6), ("prefill", 13), ("decode", 6)])
@pytest.mark.parametrize(
    ("kind", "note"),
    [
        (written.ByEinsum, DELTA),
        (written.Householder, DELTA),
        (written.ClampedEarly, DELTA),
        (written.Gated, LINEAR),
        (written.Retention, LINEAR),
        (written.Bonus, LINEAR),
    ],
)
def test_a_recurrence_becomes_one_op_with_the_same_results(
    kind: type[Recurrence], note: str, phase: str, length: int
) -> None:
    module = filled(kind(), torch.float64)
    graph, result, notes = rewritten(module, phase, length)
    assert notes == [note]
    (op,) = (op for op in result.ops if op.name in OPS)
    assert difference(graph, result, module) < 1e-12
    made = [result.values[i].shape for i in op.outputs]
    assert made == [(BATCH, graph.values[graph.inputs[0]].shape[1], HEADS, VALUE),
                    (BATCH, HEADS, KEY, VALUE)]  # fmt: skip


@pytest.mark.parametrize(
    "kind",
    [
        written.Bent,
        written.Squared,
        written.Clamped,
        written.Watched,
        written.BothWays,
        written.Swapped,
    ],
)
def test_what_is_no_such_recurrence_stays(kind: type[Recurrence]) -> None:
    """A bent delta, a square in it, least decays, states read elsewhere, pairs both ways, streams
    shifted."""
    graph, result, notes = rewritten(filled(kind(), torch.float64), "prefill", 9)
    assert not notes and result is graph


def test_softmax_attention_and_a_recurrent_network_stay() -> None:
    class Others(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTM(8, 8, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            y = self.cell(x)[0].unflatten(-1, (2, 4)).transpose(1, 2)
            return (y @ y.transpose(-1, -2)).softmax(-1) @ y + y

    graph = rt.trace(Others().to("meta"), torch.empty(2, 6, 8, device="meta"))
    assert changed(graph, *BOTH)[0] is graph


def test_training_stays_as_it_is() -> None:
    graph = traced(written.ByEinsum(), "training", BATCH, 6)
    assert changed(graph, *BOTH)[0] is graph


def test_heads_that_are_tiled_are_not_those_that_share_a_key() -> None:
    """Head 2 of the values has key 0 where keys are tiled, and key 1 where each serves two."""

    class Tiled(written.ByEinsum):
        def __init__(self) -> None:
            super().__init__()
            self.value = nn.Linear(written.WIDTH, 2 * HEADS * VALUE, bias=False)
            self.decay = nn.Linear(written.WIDTH, 2 * HEADS)
            self.beta = nn.Linear(written.WIDTH, 2 * HEADS)
            self.out = nn.Linear(2 * HEADS * VALUE, written.WIDTH, bias=False)

        def forward(self, ids: Tensor, memory: Any = None) -> Any:
            x = self.table(ids)
            q, k = (part(x).unflatten(-1, (HEADS, KEY)) for part in (self.query, self.key))
            v = self.value(x).unflatten(-1, (2 * HEADS, VALUE))
            q, k = self.spread(q), self.spread(torch.nn.functional.normalize(k, dim=-1))
            state = x.new_zeros(len(x), 2 * HEADS, VALUE, KEY)
            g, beta = -torch.relu(self.decay(x)), self.beta(x).sigmoid()
            return self.out(self.mix(q, k, v, g, beta, state)[0].flatten(2)) @ self.table.weight.T

        def spread(self, rows: Tensor) -> Tensor:
            return rows.repeat(1, 1, 2, 1)

    class Shared(Tiled):
        def spread(self, rows: Tensor) -> Tensor:
            return rows.repeat_interleave(2, 2)

    for kind, heads in ((Tiled, 2 * HEADS), (Shared, HEADS)):
        module = filled(kind(), torch.float64)
        graph = rt.trace(copy.deepcopy(module).to("meta"), torch.zeros(BATCH, 7, dtype=torch.long))
        result, notes = changed(graph, *BOTH)
        assert notes[0] == DELTA
        (op,) = (op for op in result.ops if op.name in OPS)
        assert result.values[op.arguments["key"].id].shape == (BATCH, 7, heads, KEY)
        assert difference(graph, result, module) < 1e-12


# -- transformers' models --------------------------------------------------------------------------

TEXT: dict[str, Any] = dict(
    vocab_size=TOKENS, hidden_size=64, intermediate_size=48, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=4, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    layer_types=[*["linear_attention"] * 3, "full_attention"],
)  # fmt: skip
EXPERTS: dict[str, Any] = dict(num_experts_per_tok=2, moe_intermediate_size=16)
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Next": dict(
        TEXT, **EXPERTS, num_experts=4, linear_num_value_heads=4, linear_num_key_heads=2,
        linear_key_head_dim=8, linear_value_head_dim=6, head_dim=16,
        shared_expert_intermediate_size=16,
    ),
    "KimiLinear": dict(TEXT, **EXPERTS, linear_num_heads=2, linear_head_dim=8, n_group=1,
                       topk_group=1, num_local_experts=4),
    "OlmoHybrid": dict(TEXT),
    "MiniMax": dict(TEXT, head_dim=8, block_size=16, num_local_experts=4, num_experts_per_tok=2),
}  # fmt: skip
CASES = [
    pytest.param("Qwen3Next", "prefill", 70, marks=pytest.mark.slow),
    ("Qwen3Next", "decode", 70),
    pytest.param("KimiLinear", "prefill", 70, marks=pytest.mark.slow),
    ("KimiLinear", "decode", 70),
    ("OlmoHybrid", "prefill", 128),
    ("OlmoHybrid", "decode", 70),
    ("MiniMax", "prefill", 40),
    ("MiniMax", "decode", 40),
]


@pytest.mark.parametrize(("family", "phase", "length"), CASES)
def test_models_of_four_authors_have_it_with_the_same_results(
    family: str, phase: str, length: int
) -> None:
    """In fp32, since they compute it in fp32 whatever their weights are."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, f"{family}Config"):
        pytest.skip(f"no {family} in this release of transformers")
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family])
    module = filled(getattr(transformers, f"{family}ForCausalLM")(config))
    graph, result, notes = rewritten(module, phase, length)
    delta, linear = "gated-delta-rule: 3 delta rules", "linear-attention: 3 linear attentions"
    assert notes == [linear if family == "MiniMax" else delta]
    assert difference(graph, result, module) < 5e-5
    assert not any(op.name == "aten.cumsum" and op.family == "attention" for op in result.ops)
    fallbacks = {a.id for a in result.assumptions if a.kind == "fallback"}
    new = [op for op in result.ops if op.name in OPS]
    assert new and not any(fallbacks & set(op.assumptions) for op in new)


@pytest.mark.slow
def test_a_long_prompt_has_it_in_every_layer_without_a_copy_of_the_state() -> None:
    """4096 tokens are 64 chunks, of which 61 stand once; 1000 end with a chunk that is not full."""
    transformers = pytest.importorskip("transformers")
    sizes = dict(FAMILIES["Qwen3Next"], num_hidden_layers=12, layer_types=None)
    with torch.device("meta"):
        config = transformers.Qwen3NextConfig(**sizes)
        module = transformers.Qwen3NextForCausalLM(config).bfloat16()
    for batch, length in ((1, 4096), (4, 1000)):
        graph = rt.trace(module, phase="prefill", batch=batch, seq=length)
        result, notes = changed(graph, *BOTH)
        assert notes[0] == "gated-delta-rule: 9 delta rules"
        ops = [op for op in result.ops if op.name in OPS]
        assert sum(map(result.times, ops)) == 9
        for op in ops:
            stream = result.values[op.arguments["key"].id]
            assert (stream.dtype, stream.shape) == ("bf16", (batch, length, 2, 8))
            assert result.values[op.outputs[1]].role == "kv"


# -- what they cost --------------------------------------------------------------------------------


def priced(op: str, *arguments: Any) -> Any:
    """The cost of one call of an op of ours on meta."""

    class Call(nn.Module):
        def forward(self, *tensors: Tensor) -> Any:
            given = iter(tensors)
            filled_in = [next(given) if isinstance(x, Tensor) else x for x in arguments]
            return getattr(own_ops(), op)(*filled_in)

    graph = rt.trace(Call(), *(x for x in arguments if isinstance(x, Tensor)))
    (cost,) = (
        cost for o, cost in zip(graph.ops, price_ops(graph)[0], strict=True) if o.name in OPS
    )
    return cost


def operands(tokens: int, beta: bool = True, channels: bool = False) -> list[Any]:
    """Two requests, 4 heads [8, 16] of values that share 2 of keys, bf16; decays in fp32."""
    made = [torch.empty(2, tokens, 2, 8), torch.empty(2, tokens, 2, 8),
            torch.empty(2, tokens, 4, 16)]  # fmt: skip
    shape = (2, tokens, 4, 8) if channels else (2, tokens, 4)
    state = torch.empty(2, 4, 8, 16, device="meta") if tokens == 1 else None
    return [
        *(x.to("meta", torch.bfloat16) for x in made),
        torch.empty(shape, device="meta"),
        torch.empty(2, tokens, 4, device="meta").bfloat16() if beta else None,
        None, state, 0.5, None, None, True, True,
    ]  # fmt: skip


def test_the_flop_of_a_prompt_are_those_of_its_chunks() -> None:
    """100 tokens are two chunks of 64 rows, for 2 requests and 4 heads: 1024 rows."""
    rows = 2 * 2 * 64 * 4
    each = 2 * 64 * 8  # k k^T
    each += 2 * 64 * 8 + 2 * 64 * 16  # w and u, by the inverse of a triangle
    each += 2 * 8 * 16 * 3  # w S, q S, k^T v
    each += 2 * 64 * 8 + 2 * 64 * 16  # q k^T, and its product with v
    assert priced("delta_rule", *operands(100)).flops(operations=MATRIX) == rows * each
    linear = 2 * 8 * 16 * 2 + 2 * 64 * 8 + 2 * 64 * 16
    assert (
        priced("linear_attention", *operands(100, beta=False)).flops(operations=MATRIX)
        == rows * linear
    )


def test_the_bytes_of_a_prompt_are_its_operands_and_what_kernels_write_for_others() -> None:
    n = 2 * 100  # tokens
    keys, values, wide = n * 2 * 8 * 2, n * 4 * 16 * 2, n * 4 * 8 * 2  # bf16; w has all heads
    decays, betas, pairs, states = n * 4 * 4, n * 4 * 2, n * 4 * 64, 2 * 4 * 2 * 8 * 16 * 2
    once = keys + keys + values + decays + betas + values + 2 * 4 * 8 * 16 * 4  # o, last state
    written = decays + 4 * pairs + 2 * pairs + wide + values + states + values  # g A T w u h v'
    again = 4 * decays + 4 * pairs + 2 * pairs + wide + 2 * values + states + 3 * keys
    assert priced("delta_rule", *operands(100)).bytes() == once + written + again


def test_a_token_reads_and_writes_its_states() -> None:
    state = 2 * 4 * 8 * 16
    cost = priced("delta_rule", *operands(1))
    assert cost.flops() == 7 * state + 3 * 2 * 4 * 16  # decay, S^T k, k v^T, S^T q; the difference
    rows = 2 * (2 * 8 + 2 * 8 + 4 * 16 + 4 * 16) * 2  # q, k, v, o
    assert cost.bytes() == 2 * 4 * state + rows + 2 * 4 * 4 + 2 * 4 * 2
    assert priced("linear_attention", *operands(1, beta=False)).flops() == 5 * state


def test_a_decay_for_each_channel_is_summed_for_each() -> None:
    """The sums are written once and read by four kernels, in fp32; the decays are read once."""
    one, each = (priced("delta_rule", *operands(64, channels=c)).bytes() for c in (False, True))
    assert each - one == 6 * (2 * 64 * 4 * (8 - 1) * 4)


def test_kernels_on_meta_have_the_shapes_of_those_on_real_tensors() -> None:
    for tokens in (1, 5):
        real = [torch.rand(x.shape).to(x.dtype) if isinstance(x, Tensor) else x
                for x in operands(tokens)]  # fmt: skip
        meta = own_ops().delta_rule(*operands(tokens))
        for one, two in zip(own_ops().delta_rule(*real), meta, strict=True):
            assert (one.shape, one.dtype) == (two.shape, two.dtype)
        into = torch.rand(2, 4, 8, 16)
        out, last = own_ops().delta_rule_(*real[:7], into, *real[7:])
        assert torch.equal(out, own_ops().delta_rule(*real)[0]) and torch.equal(into, last)


# -- small runs ------------------------------------------------------------------------------------


class Sundry(nn.Module):
    """Ops that recurrences are written with."""

    def forward(self, x: Tensor) -> Tensor:
        batch, rows, heads, width = x.shape
        y = nn.functional.pad(x.transpose(1, 2), (0, 0, 0, 2)).unflatten(2, (-1, 4))
        sums = y.cumsum(-2) - y[..., -1:, :]
        causal = torch.ones(4, 4, dtype=torch.bool, device=x.device).triu(1)
        system = (y @ y.mT).masked_fill(causal, 0) * 0.1 + torch.eye(4, device=x.device)
        solved = torch.linalg.solve_triangular(system.tril(), sums, upper=False)
        parts = torch.stack([*solved.unbind(2)], 2)
        parts[:, :, 0].mul_(2)
        first, second = parts.split(width // 2, -1)
        first = first / (first.norm(dim=-1, keepdim=True) + 1) + torch.where(
            second > 0, second, -1.0
        )
        mixed = torch.cat((first.exp(), second.reciprocal()), -1).flatten(2, 3)[:, :, :rows]
        flat = mixed.reshape(batch * heads, rows, width)
        return torch.baddbmm(flat, flat @ flat.mT, flat, beta=0.5).mean(1).squeeze()


def test_a_small_run_computes_what_torch_does() -> None:
    """Every length as in the graph, so that the numbers are those of torch."""
    x = torch.rand(2, 6, 3, 4, dtype=torch.float64)
    graph = rt.trace(Sundry(), x.to("meta"))
    (start,) = graph.inputs
    piece = SmallTensor(x.numpy().copy(), [((n, n),) for n in x.shape])
    values = SmallRun(graph, {start: piece}, 0, {}).run(graph.ops)
    expected = Sundry()(x)
    torch.testing.assert_close(torch.from_numpy(values[graph.outputs[0]].array), expected)


def test_fewer_heads_compute_the_same_for_those() -> None:
    """Batch and heads are put together and taken apart again: two of three heads are left."""

    class Scores(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.transpose(1, 2)
            return (y @ y.mT @ y).transpose(1, 2).flatten(2)

    x = torch.rand(2, 6, 3, 4, dtype=torch.float64)
    graph = rt.trace(Scores(), x.to("meta"))
    few = x[:, :, :2]
    dims = [((2, 2),), ((6, 6),), ((3, 2),), ((4, 4),)]
    known = {graph.inputs[0]: SmallTensor(few.numpy().copy(), dims)}
    values = SmallRun(graph, known, 0, {}).run(graph.ops)
    made = torch.from_numpy(values[graph.outputs[0]].array)
    torch.testing.assert_close(made, Scores()(few))
