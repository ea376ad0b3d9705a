"""Plans of engines: the results of real processes, and what each process has and sends."""

from __future__ import annotations

import copy
import json
from collections import Counter
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import rooftrace as rt
from rooftrace.errors import RequestError
from rooftrace.tracer import Job, trace_target
from rooftrace.tracer.phases import SizedSource
from rooftrace.tracer.sharding import huggingface, plans, splitting
from tests.tracer.expert_models import DEEPSEEK, MIXTRAL, needs_plans, spread_graph
from tests.tracer.sharded_models import PROCESSES, in_fresh_interpreter, on_processes
from tests.tracer.test_calls import Runs, without_holds

pytestmark = needs_plans
QWEN: dict[str, Any] = {**MIXTRAL, "model_type": "qwen3_moe", "num_key_value_heads": 2,
                        "moe_intermediate_size": 32, "num_experts": 8, "head_dim": 16}  # fmt: skip
SHARED: dict[str, Any] = {**MIXTRAL, "model_type": "qwen2_moe", "num_key_value_heads": 4,
                          "moe_intermediate_size": 32, "num_experts": 8,
                          "shared_expert_intermediate_size": 64}  # fmt: skip
OSS: dict[str, Any] = {**MIXTRAL, "model_type": "gpt_oss", "head_dim": 16, "intermediate_size": 64,
                       "layer_types": ["full_attention"] * 2}  # fmt: skip
TIED: dict[str, Any] = {**MIXTRAL, "model_type": "gemma2", "num_key_value_heads": 4,
                        "head_dim": 16, "layer_types": ["full_attention"] * 2}  # fmt: skip
FUSED: dict[str, Any] = {**TIED, "model_type": "glm", "pad_token_id": 0}
PHI: dict[str, Any] = {**MIXTRAL, "model_type": "phi3", "pad_token_id": 0}
GPT: dict[str, Any] = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2,
                       "vocab_size": 128, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
                       "resid_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip
MULTI_QUERY: dict[str, Any] = {**GPT, "model_type": "gpt_bigcode"}
STABLE: dict[str, Any] = {**MIXTRAL, "model_type": "stablelm", "num_key_value_heads": 4}

BERT: dict[str, Any] = {**MIXTRAL, "model_type": "bert", "is_decoder": True,
                        "hidden_dropout_prob": 0.0,
                        "attention_probs_dropout_prob": 0.0}  # fmt: skip
OPT: dict[str, Any] = {**MIXTRAL, "model_type": "opt", "word_embed_proj_dim": 64, "ffn_dim": 128,
                       "dropout": 0.0, "pad_token_id": 0}  # fmt: skip


def model_of(config: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = dict(config)
    kind = AutoConfig.for_model(settings.pop("model_type"), **settings)
    return AutoModelForCausalLM.from_config(kind).eval()


def one_process(rank: int, config: dict[str, Any], mesh: dict[str, int], folder: str) -> None:
    """Compare the logits of a spread model with those of the whole one; the error is kept."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=PROCESSES)
    torch.manual_seed(0)
    model = model_of(config)
    for name, weight in model.named_parameters():
        torch.nn.init.normal_(weight, std=0.2 if weight.dim() > 1 else 1.0)
        assert name
    ids = torch.randint(128, (PROCESSES, 2, 5))[rank // mesh.get("tp", 1)]  # of each replica
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        huggingface.distribute(model, mesh, trains=False)
        spread = model(ids, use_cache=False).logits
    error = (whole - spread).abs().max() / whole.abs().max()
    Path(folder, f"{rank}").write_text(f"{error:.3e}")
    dist.barrier()  # nobody leaves while another still reads from it
    dist.destroy_process_group()


def learnt(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The losses of three steps: gradients of all weights show in the second and the third."""
    losses, optimizer = [], torch.optim.SGD(model.parameters(), lr=0.05, foreach=False)
    for _ in range(3):
        loss = model(ids, labels=ids, use_cache=False).loss
        losses.append(loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return torch.stack(losses)


def one_learner(rank: int, config: dict[str, Any], mesh: dict[str, int], folder: str) -> None:
    """Compare the losses of a spread model that learns with those of the whole one."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=PROCESSES)
    torch.manual_seed(0)
    model = model_of(config).train()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2 if weight.dim() > 1 else 1.0)
    ids = torch.randint(128, (2, 8))
    whole = learnt(copy.deepcopy(model), ids)
    said = huggingface.distribute(model, mesh, trains=True)
    assert ("and sequences (" in said) is (config is not BERT)  # it adds inputs behind its sums
    error = (whole - learnt(model, ids)).abs().max()
    Path(folder, f"{rank}").write_text(f"{error:.3e}")
    dist.barrier()  # nobody leaves while another still reads from it
    dist.destroy_process_group()


LEARNING = [  # attention of heads, latent attention and experts, one vocabulary, biases and sinks
    ({**QWEN, "model_type": "qwen2", "num_key_value_heads": 4}, {"tp": 4}),
    (DEEPSEEK, {"tp": 4}),
    (TIED, {"tp": 4}),
    (FUSED, {"tp": 4}),
    ({**OSS, "num_key_value_heads": 4}, {"tp": 4}),
    ({**SHARED, "model_type": "gpt_neox"}, {"tp": 4}),
    (GPT, {"tp": 4}),  # one product of queries, keys and values
    ({**PHI, "num_key_value_heads": 4}, {"tp": 4}),
    (STABLE, {"tp": 4}),  # code that counts heads
    (DEEPSEEK, {"tp": 4, "ep": 4}),
    ({**SHARED, "num_key_value_heads": 4}, {"tp": 4, "ep": 4}),
    (BERT, {"tp": 4}),
    (TIED, {"dp": 2, "tp": 2}),  # FSDP2 has the one weight once
]
CASES = [
    (DEEPSEEK, {"tp": 4}),
    (DEEPSEEK, {"tp": 4, "ep": 2}),
    (DEEPSEEK, {"tp": 4, "ep": 4}),
    (DEEPSEEK, {"dp": 2, "tp": 2}),
    (DEEPSEEK, {"dp": 2, "tp": 2, "ep": 4}),
    (QWEN, {"tp": 4}),
    (SHARED, {"tp": 4, "ep": 2}),
    (OSS, {"tp": 4}),
    (OSS, {"tp": 4, "ep": 2}),
    (TIED, {"tp": 4}),
    (FUSED, {"tp": 4}),
    (GPT, {"tp": 4}),
    (PHI, {"tp": 4}),
    (MULTI_QUERY, {"tp": 4}),
    (STABLE, {"tp": 4}),
    (BERT, {"tp": 4}),
    (DEEPSEEK, {"dp": 4, "etp": 4}),
    (DEEPSEEK, {"dp": 4, "ep": 2, "etp": 2}),
    (DEEPSEEK, {"dp": 2, "tp": 2, "etp": 4}),
    (OSS, {"dp": 4, "ep": 4, "etp": 1}),
    (OSS, {"dp": 2, "tp": 2, "ep": 2, "etp": 2}),
]


def all_cases() -> None:
    """Run all cases, on processes that are forked after imports, and print the largest errors."""
    largest = []
    learners = [(one_learner, *case) for case in LEARNING]
    for process, config, mesh in [*((one_process, *case) for case in CASES), *learners]:
        model_of(config)
        largest.append(max(map(float, on_processes(process, config, mesh))))
    print(json.dumps(largest))


@pytest.mark.slow
@pytest.mark.subprocess
def test_real_processes_compute_what_the_whole_model_does() -> None:
    # A fresh interpreter: groups of meshes that were there would be known to the forked ones.
    errors = json.loads(in_fresh_interpreter(__name__, "all_cases")[-1])
    assert len(errors) == len(CASES) + len(LEARNING)
    assert max(errors) < 1e-5


def sums(graph: Any) -> Counter[str]:
    """How often each module adds up its results over processes."""
    named = (op.module for op in graph.expand().ops if op.collective)
    return Counter(module.rpartition(".")[2] for module in named)


def weights(graph: Any, start: str = "model.layers.1.") -> dict[str, tuple[int, ...]]:
    """Shapes of the weights of a part, the second layer, by name."""
    values = graph.expand().values
    return {v.name.removeprefix(start): v.shape for v in values if v.name.startswith(start)}


def test_heads_and_experts_are_cut_and_one_sum_ends_a_block() -> None:
    graph = spread_graph(DEEPSEEK, {"tp": 4, "ep": 2}, "decode", 2, 5)
    shapes = weights(graph)
    assert shapes["self_attn.o_proj.weight"] == (64, 16)  # one head of 16
    assert shapes["self_attn.kv_a_proj_with_mqa.weight"] == (32, 64)  # of all heads
    assert shapes["mlp.experts.gate_up_proj"] == (8, 32, 64)  # half of 16; half of 2 x 32 channels
    assert shapes["mlp.experts.down_proj"] == (8, 64, 16)
    assert weights(graph, "model.")["embed_tokens.weight"] == (32, 64)
    # Two layers with experts and one without; embeddings and logits aside.
    assert sums(graph)["o_proj"] == 3 and sums(graph)["mlp"] == 2 and sums(graph)["down_proj"] == 1


def test_replicas_gather_their_tokens_for_experts_that_they_split() -> None:
    graph = spread_graph(DEEPSEEK, {"dp": 4, "ep": 2, "etp": 2}, "decode", 2, 5)
    shapes = weights(graph)
    assert shapes["self_attn.o_proj.weight"] == (64, 64)  # of all heads
    assert shapes["mlp.experts.down_proj"] == (8, 64, 16)  # half of 16; half of 32 channels
    assert shapes["mlp.shared_experts.down_proj.weight"] == (64, 8)  # a quarter of 32 channels
    moved = Counter((o.collective.kind, o.collective.bytes) for o in graph.ops if o.collective)
    # Two layers: four replicas, two tokens of each, 64 numbers of four bytes.
    assert moved == {(kind, 4 * 2 * 64 * 4): 2 for kind in ("all_gather", "reduce_scatter")}
    chosen = {op.facts["rows_routed"] for op in graph.ops if op.name == "aten._grouped_mm"}
    assert chosen == {4 * 2 * 4 // 2}  # four of each token; half of the experts are here


@pytest.mark.parametrize(
    ("config", "mesh", "message"),
    [
        (DEEPSEEK, {"dp": 4, "etp": 2}, "dp x cp x tp; expected ep x etp = 4, found 1 x 2"),
        ({**MIXTRAL, "model_type": "llama"}, {"dp": 4, "etp": 4}, "etp=4: splits experts, and Ll"),
        (DEEPSEEK, {"dp": 4, "ep": 3, "etp": 1}, "ep=3: experts are spread over the 4 processes"),
    ],
)
def test_a_split_of_experts_that_is_not_there_is_refused(
    config: dict[str, Any], mesh: dict[str, int], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        spread_graph(config, mesh, "decode", 2, 5)


def test_processes_share_key_heads_that_are_too_few() -> None:
    shapes = weights(spread_graph(QWEN, {"tp": 4}, "decode", 2, 5))
    assert shapes["self_attn.q_proj.weight"] == (16, 64)
    assert shapes["self_attn.k_proj.weight"] == (16, 64)  # one of two heads, on two processes
    with pytest.raises(RequestError, match=r"tp=3: 4 attention heads .* divide them are 2, 4"):
        spread_graph(QWEN, {"tp": 3}, "decode", 2, 5)


def test_attention_that_counts_its_heads_counts_those_of_a_process() -> None:
    """StableLM views [batch, length, heads, width] by its numbers, and transformers has no plan."""
    shapes = weights(spread_graph(STABLE, {"tp": 2}, "decode", 2, 5))
    assert shapes["self_attn.q_proj.weight"] == (32, 64)
    assert shapes["mlp.up_proj.weight"] == (64, 64)  # 128 channels over two processes


@pytest.mark.parametrize(
    ("config", "mesh", "name", "rows"),
    [  # heads of queries, of keys and of values; each of 16 channels
        (GPT, 2, "attn.c_attn", 2 + 2 + 2),
        (PHI, 2, "self_attn.qkv_proj", 2 + 1 + 1),
        (PHI, 4, "self_attn.qkv_proj", 1 + 1 + 1),  # two processes have the same keys
        (MULTI_QUERY, 4, "attn.c_attn", 1 + 1 + 1),
    ],
)
def test_one_product_of_queries_keys_and_values_is_cut_by_heads(
    config: dict[str, Any], mesh: int, name: str, rows: int
) -> None:
    graph = spread_graph(config, {"tp": mesh}, "decode", 2, 5)
    start = "transformer.h.1." if name.startswith("attn") else "model.layers.1."
    assert weights(graph, start)[f"{name}.weight"] == (16 * rows, 64)
    blocks = Counter(op.module.rpartition(".")[2] for op in graph.expand().ops if op.collective)
    assert blocks["c_proj"] + blocks["o_proj"] + blocks["down_proj"] == 2 * 2
    queries = {
        graph.values[op.inputs[0]].shape for op in graph.ops if op.name.endswith("attention")
    }
    assert queries == {(2, 4 // mesh, 1, 16)}


def test_a_model_without_known_blocks_is_refused() -> None:
    config = {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 128}
    with pytest.raises(RequestError, match="tp=2: MambaForCausalLM has no block that is known"):
        spread_graph(config, {"tp": 2}, "prefill", 2, 5)


def test_code_that_does_not_run_with_the_heads_of_a_process_is_named(tmp_path: Path) -> None:
    """CodeGen's attention has its heads in fours."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**GPT, "model_type": "codegen", "rotary_dim": 8}))
    with pytest.raises(RequestError, match=r"tp=2: code of CodeGen.* with the 2 attention heads"):
        trace_target(path, phases=["prefill"], mesh={"tp": 2}, seq=8)


@pytest.mark.parametrize("config", [TIED, GPT])
def test_replicas_gather_layers_twice_and_one_table_once(config: dict[str, Any]) -> None:
    """Of a table that embedding and head have, and where transformers' plan names no layer."""
    graph = spread_graph(config, {"dp": 4}, "training", 2, 8)
    model = model_of(config)
    whole, layers = (
        sum(weight.numel() * 4 for weight in part.parameters())
        for part in (model, splitting.layers_of(model))
    )
    sizes = Counter[str]()
    for op in graph.expand().ops:
        if op.collective:
            sizes[op.collective.kind] += op.collective.bytes
    assert sizes["all_gather"] == whole + layers and sizes["reduce_scatter"] == whole


@pytest.mark.parametrize("phase", ["decode", "training"])
def test_gate_and_channels_of_one_product_are_cut_each(phase: str) -> None:
    shapes = weights(spread_graph(FUSED, {"tp": 4}, phase, 2, 8))
    assert shapes["mlp.gate_up_proj.weight"] == (2 * 128 // 4, 64)
    assert shapes["mlp.down_proj.weight"] == (64, 128 // 4)


def test_training_cuts_sequences_and_words() -> None:
    """Collectives of Korthikanti et al., section 4.2, and of a loss over words that are cut."""
    graph = spread_graph({**QWEN, "num_key_value_heads": 4}, {"tp": 4}, "training", 2, 8)
    calls = Counter(op.collective.kind for op in graph.expand().ops if op.collective)
    # Two blocks in two layers, the embedding and the head; both in forward and in backward.
    assert calls["all_gather"] == calls["reduce_scatter"] == 2 * (2 * 2 + 1)
    kept = [op for op in graph.expand().ops if op.collective and op.collective.kind == "all_gather"]
    assert {op.collective.bytes for op in kept} == {2 * 8 * 64 * 4}
    assert weights(graph, "")["lm_head.weight"] == (32, 64)
    with pytest.raises(RequestError, match="tp=4: 6 positions cannot be spread"):
        spread_graph({**QWEN, "num_key_value_heads": 4}, {"tp": 4}, "training", 2, 6)


@pytest.mark.parametrize(
    "config",
    [  # positions; layers inside of a part; layers that return more; norms at both ends
        GPT,
        OPT,
        BERT,
        {**GPT, "model_type": "gptj", "rotary_dim": 8},
        {**GPT, "model_type": "bloom", "hidden_size": 64},
    ],
)
def test_stages_one_after_the_other_compute_what_the_whole_model_does(
    config: dict[str, Any],
) -> None:
    torch.manual_seed(0)
    model, ids = model_of(config), torch.randint(128, (2, 8))
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2 if weight.dim() > 1 else 1.0)
    given, numbers = {"input_ids": ids}, 0
    with torch.no_grad():
        for stage in splitting.split(model, 2):
            part = copy.deepcopy(model)
            splitting.keep(part, stage)
            result = part(**given, use_cache=False)
            given = {"inputs_embeds": result}
            numbers += sum(weight.numel() for weight in part.parameters())
        torch.testing.assert_close(result.logits, model(ids, use_cache=False).logits)
    table = model.get_input_embeddings().weight.numel() if huggingface.is_tied(model) else 0
    assert numbers == sum(weight.numel() for weight in model.parameters()) + table  # for the head


def test_a_stage_hands_on_its_own_positions(tmp_path: Path) -> None:
    """Code of GPT-2 gives what its last norm makes the shape of the whole sequence."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**GPT, "torch_dtype": "bfloat16"}))
    graphs = trace_target(path, phases=["training"], mesh={"pp": 2, "tp": 2}, seq=8)
    assert [graph.workload["handed"] for graph in graphs.values()] == [8 // 2 * 64 * 2, 0]


def test_training_sends_own_positions_to_experts_of_others() -> None:
    graph = spread_graph(DEEPSEEK, {"tp": 4, "ep": 4}, "training", 2, 8)
    moved = Counter((o.collective.kind, o.collective.bytes) for o in graph.ops if o.collective)
    # Two layers, there and back, in both directions: 2 x 2 positions to 4 experts, 64 numbers each.
    assert moved["all_to_all", 2 * 2 * 4 * 64 * 4] == 2 * 4
    # Attention of three layers, a dense MLP, two shared experts, the embedding and the head.
    whole = 2 * 8 * 64 * 4
    assert moved["all_gather", whole] == moved["reduce_scatter", whole] == 2 * (3 + 1 + 2 + 1)
    assert weights(graph)["mlp.shared_experts.down_proj.weight"] == (64, 32 // 4)


@pytest.mark.parametrize("phase", ["decode", "training"])
def test_one_weight_of_embedding_and_head_is_cut_for_both(phase: str) -> None:
    graph = spread_graph(TIED, {"tp": 4}, phase, 2, 8)
    words = {n: s for n, s in weights(graph, "").items() if n.startswith(("model.emb", "lm_head"))}
    assert words["model.embed_tokens.weight"] == (32, 64) and "lm_head.weight" not in words


def test_a_mesh_leaves_no_groups_to_the_next_one() -> None:
    """DTensor remembers the layout of a result with its mesh, and finds it for an equal one."""
    for _ in range(2):
        with rt.tools.fake_mesh({"tp": 2}) as mesh:
            whole = torch.distributed.tensor.zeros(4, device_mesh=mesh)
            assert (whole + 1).device_mesh is mesh


def test_a_model_that_is_spread_once_serves_all_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROOFTRACE_CACHE", "off")
    path, spread, distribute = tmp_path / "config.json", [0], huggingface.distribute
    path.write_text(json.dumps(QWEN))

    def counted(*args: Any, **kwargs: Any) -> str:
        spread[0] += 1
        return distribute(*args, **kwargs)

    def source(size: int) -> SizedSource:
        wanted = {"mesh": {"tp": size}, "kv": 8}
        return SizedSource(Job.of(rt.trace, str(path), (), wanted, phase="decode"), ("batch",))

    def graphs(of: SizedSource) -> list[Any]:
        return [of.graphs((batch,)) for batch in (4, 2)]

    monkeypatch.setattr(huggingface, "distribute", counted)
    apart = graphs(source(2))
    with (together := source(2)).standing():
        assert graphs(together) == apart
    assert spread == [2 + 1]
    with (none := source(3)).standing():
        for _ in range(2):  # a mesh that cannot be leaves no other behind
            with pytest.raises(RequestError, match="tp=3"):
                none.graphs((4,))
    assert not dist.is_initialized()


def test_the_last_logits_are_gathered_alone() -> None:
    graph = spread_graph(QWEN, {"tp": 4}, "prefill", 2, 5)
    all_of_them, last = (
        [op.collective.bytes for op in each.ops if op.collective and op.module == "lm_head"]
        for each in (graph, rt.plan(graph, "serving").graph)
    )
    assert all_of_them == [2 * 5 * 128 * 4] and last == [2 * 128 * 4]
    rewritten = rt.plan(graph, "serving").graph
    rewritten.verify()
    assert rewritten.values[rewritten.outputs[0]].shape == (2, 1, 128)


def test_the_plan_of_transformers_leaves_attention_whole() -> None:
    with rt.tools.fake_mesh({"tp": 4}), torch.device("meta"):
        model = model_of(DEEPSEEK)
        said = huggingface.distribute(model, {"tp": 4}, trains=False, plan="transformers")
    assert model.model.layers[1].self_attn.o_proj.weight.shape == (64, 64)
    assert "as transformers shards" in said and "self_attn.o_proj.weight" in said


@pytest.mark.parametrize("config", [MIXTRAL, DEEPSEEK])
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp": 2, "ep": 2}])
def test_the_count_of_parameters_is_that_of_the_whole_model(
    config: dict[str, Any], mesh: dict[str, int], tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    graph = trace_target(file, phases=["prefill"], mesh=mesh, seq=16)["prefill"]
    whole = sum(weight.numel() for weight in model_of(config).parameters())
    assert graph.model["params"] == whole
    assert whole / 2 < graph.model["bytes_parameters"] / 2 < whole  # of the process, in bf16
    shown = str(rt.report(graph, system="dgx-h100", execution="eager")).splitlines()[0]
    assert " parameters (" in shown and shown.endswith("in each of 2 processes), bf16")


LAYERED: dict[str, Any] = {**MIXTRAL, "num_hidden_layers": 6}
STACKS = [
    ({**DEEPSEEK, "num_hidden_layers": 7}, {"tp": 4}, 1 + 2),  # a dense layer; routed, and shared
    ({**QWEN, "num_hidden_layers": 6}, {"dp": 2, "tp": 2, "ep": 4}, 1),
    (LAYERED, {"tp": 4}, 1),
]


@pytest.mark.parametrize(("config", "mesh", "wanted"), STACKS)
def test_one_layer_of_each_kind_runs(
    config: dict[str, Any], mesh: dict[str, int], wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Activations whose Python runs are counted; the graph is that of all layers."""
    from transformers.activations import SiLUActivation

    runs, forward = Runs(), SiLUActivation.forward
    counted = partialmethod(_counted, runs, forward)
    monkeypatch.setattr(SiLUActivation, "forward", counted)
    found = spread_graph(config, mesh, "prefill", 2, 8)
    assert len(runs.modules) == wanted
    flat = spread_graph(config, mesh, "prefill", 2, 8, repeats=False)
    assert without_holds(found.expand()) == without_holds(flat)


def _counted(module: Any, runs: Runs, forward: Any, x: torch.Tensor) -> torch.Tensor:
    runs.append(module)
    result: torch.Tensor = forward(module, x)
    return result


def test_a_layer_with_a_number_of_its_own_in_a_closure_runs() -> None:
    """Functions that stand for a method are compared with all that they hold."""
    with rt.tools.fake_mesh({"tp": 4}), torch.device("meta"):
        model = model_of(LAYERED)
        huggingface.distribute(model, {"tp": 4}, trains=False)
        for number, layer in enumerate(model.model.layers):
            plans.around(layer.mlp, leave=partial(torch.mul, other=1.0 + number))
        ids = torch.zeros(2, 8, dtype=torch.long)
        graph = rt.trace(model, ids, phase="prefill").expand()
    factors = [op.arguments["other"] for op in graph.ops if op.module.endswith(".mlp")
               and op.target == "aten.mul.Tensor"]  # fmt: skip
    assert factors == [1.0 + number for number in range(6)]
