"""Attention over several processes, and attention that the policies of checkpoints name."""

from __future__ import annotations

import functools
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.distributed.tensor.placement_types import Shard
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import rooftrace as rt
from rooftrace.costmodels.ops.price import price_ops
from rooftrace.costmodels.timing import collective_seconds
from rooftrace.errors import RequestError
from rooftrace.hardware.systems import load_system
from rooftrace.reporting.commands.sweeps import lengths_in
from rooftrace.tracer import Job
from rooftrace.tracer.sharding import huggingface
from tests.tracer.expert_models import needs_plans
from tests.tracer.sharded_models import allocated, in_fresh_interpreter, on_processes

WIDTH, HEADS, SEQ = 64, 4, 128
_aten = torch.ops.aten
FLASH = _aten._scaled_dot_product_flash_attention.default


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def blocks(count: int) -> tuple[nn.Module, Tensor]:
    with torch.device("meta"):
        net = nn.Sequential(*(Block() for _ in range(count))).bfloat16()
        return net, torch.zeros(2, SEQ, WIDTH, dtype=torch.bfloat16)


def over_context(net: nn.Module, x: Tensor, mesh: Any) -> None:
    with (
        context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]),
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
    ):
        net(x).float().sum().backward()


def useful(graph: Any) -> int:
    """FLOPs of the products of scores that are not masked."""
    works = (work.items() for work in (cost.work for _, cost in attention_of(graph)))
    return sum(
        flops
        for items in works
        for work, flops in items
        if work.operation == "matmul" and work.count == "useful"
    )


def priced(graph: Any) -> list[Any]:
    flat = graph.expand()
    return list(zip(flat.ops, price_ops(flat)[0], strict=True))


def attention_of(graph: Any) -> list[Any]:
    return [(op, cost) for op, cost in priced(graph) if "attention" in op.target]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_ring_of_processes_does_the_attention_of_the_whole(ranks: int) -> None:
    net, x = blocks(2)
    with rt.tools.fake_mesh({"cp": ranks}) as mesh:
        graph = rt.trace(over_context, net, x, mesh)
    whole = rt.trace(lambda net, x: net(x).float().sum().backward(), *blocks(2))
    # Each process has a chunk from the front and its mirror image: all work alike.
    assert useful(graph) * ranks == useful(whole)
    for part in ("forward", "backward"):
        of_part = [op for op, _ in attention_of(graph) if op.part == part]
        assert len(of_part) == 2 * ranks
    assert {graph.groups[op.collective.group].axis for op in graph.ops if op.collective} == {"cp"}


def test_keys_and_values_go_around_the_ring() -> None:
    net, x = blocks(1)
    with rt.tools.fake_mesh({"cp": 4}) as mesh:
        graph = rt.trace(over_context, net, x, mesh)
    gathered = [op.collective for op in graph.ops if op.collective and op.part == "forward"]
    # Keys and values of all processes: of two sequences, in bf16.
    assert sum(c.bytes for c in gathered) == 2 * 2 * SEQ * WIDTH * 2
    assert {c.kind for c in gathered} <= {"all_gather", "all_to_all", "send", "recv"}


@pytest.mark.parametrize(("rotation", "sends"), [("allgather", 4), ("alltoall", 4 + 3 + 3)])
def test_exchanges_run_beside_attention_but_for_the_last_gradient(
    rotation: str, sends: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient of keys and values takes as many steps as there are processes, and nothing is left
    to compute beside the last; keys and values take a step less, or are gathered."""
    for name, value in (("WIDTH", 2048), ("HEADS", 16), ("SEQ", 65536)):
        monkeypatch.setitem(globals(), name, value)
    net, x = blocks(1)
    set_rotate_method(rotation)
    try:
        with rt.tools.fake_mesh({"cp": 4}) as mesh:
            graph = rt.trace(over_context, net, x, mesh)
    finally:
        set_rotate_method("allgather")
    rows = {row.kind: row for row in rt.estimate(graph, system="dgx-h100").communication}
    assert rows["send"].calls == sends
    gradient = 2 * 2 * SEQ // 4 * WIDTH * 4
    one = collective_seconds(load_system("dgx-h100"), "send", gradient, (0, 1, 2, 3)).seconds
    exposed = sum(row.exposed for row in rows.values())
    assert exposed == pytest.approx(one, rel=0.01)


def test_attention_of_sharded_heads_stays_whole() -> None:
    with rt.tools.fake_mesh({"tp": 4}) as mesh, torch.device("meta"):
        full = torch.zeros(2, HEADS, SEQ, 16, dtype=torch.bfloat16)
        heads = distribute_tensor(full, mesh, [Shard(1)])

        class Plain(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return F.scaled_dot_product_attention(x, x, x)

        graph = rt.trace(Plain(), heads)
    ((op, _),) = attention_of(graph)
    assert graph.values[op.inputs[0]].shape == (2, 1, SEQ, 16)
    assert not any(op.collective for op in graph.ops)


def policy(kept: set[Any], context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(("kept", "again"), [({FLASH}, 0), ({_aten.addmm.default}, 3)])
def test_policies_that_name_the_kernel_of_attention_are_kept_to(kept: set[Any], again: int) -> None:
    contexts = functools.partial(
        create_selective_checkpoint_contexts, functools.partial(policy, kept)
    )

    class Again(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            for block in self.inner:  # type: ignore[attr-defined]
                x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
            return x

    net, x = blocks(3)
    graph = rt.trace(Again(net), x, phase="training")
    parts = Counter(op.part for op, _ in attention_of(graph))
    assert parts == {"forward": 3, "backward": 3, **({"recompute": again} if again else {})}


# -- sequences of Hugging Face models over processes -----------------------------------------------

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 1024,
    "tie_word_embeddings": False,
}
BATCH, LENGTH = 2, 128
MESHES = ({"cp": 4}, {"dp": 2, "cp": 2})


def scores(query: Tensor, key: Tensor, scale: float | None, causal: bool) -> Tensor:
    made = query @ key.transpose(-2, -1) * (scale or query.shape[-1] ** -0.5)
    hidden = torch.ones(made.shape[-2:], dtype=torch.bool).triu(1)
    return made.masked_fill(hidden, -torch.inf) if causal else made


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """What CUDA's kernel returns, on a CPU."""
    group = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(group, 1) for t in (key, value))
    made = scores(query, key, scale, is_causal)
    none = torch.empty((), dtype=torch.long)
    out = (made.softmax(-1) @ value).transpose(1, 2).contiguous().transpose(1, 2)
    return out, made.logsumexp(-1), None, None, query.shape[2], key.shape[2], none, none, none


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    *others: Any,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    group, factor = query.shape[1] // key.shape[1], scale or query.shape[-1] ** -0.5
    wide_key, wide_value = (t.repeat_interleave(group, 1) for t in (key, value))
    shares = (scores(query, wide_key, scale, others[5]) - logsumexp[..., None]).exp()
    sums = (grad_out * out).sum(-1, keepdim=True)
    inner = shares * (grad_out @ wide_value.transpose(-2, -1) - sums) * factor
    grads = inner.transpose(-2, -1) @ query, shares.transpose(-2, -1) @ grad_out
    grad_key, grad_value = (t.unflatten(1, (-1, group)).sum(2) for t in grads)
    return inner @ wide_key, grad_key, grad_value


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, *others: Any, scale: float | None = None, **how: Any
) -> Tensor:
    """Causal attention by the op that CUDA takes; a mask of positions says no more."""
    made: Tensor = _aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, True, scale=scale
    )[0]
    return made


class Sent(TorchDispatchMode):
    """Counts exchanges by kind, with the bytes of their larger side."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented
        made = func(*args, **(kwargs or {}))
        kinds = ("all_gather", "allgather", "all_to_all", "reduce_scatter")
        kind = next((k for k in kinds if k in func.__name__), "")
        if kind and "c10d" in func.namespace:
            tensors = [t for t in (*args, made) if isinstance(t, Tensor)]
            kind = kind.replace("allgather", "all_gather").replace("all_to_all", "send")
            self.seen[f"{kind} of {max(t.nbytes for t in tensors)}"] += 1
        return made


def small_llama() -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = dict(LLAMA)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    return AutoModelForCausalLM.from_config(config).train()


def one_process(rank: int, mesh: dict[str, int], folder: str) -> None:
    """Writes the largest error of a gradient, what is sent, and the peak of a second step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    torch.manual_seed(0)
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention", flash, "CPU")
    library.impl("_scaled_dot_product_flash_attention_backward", flash_backward, "CPU")
    F.scaled_dot_product_attention = scaled_dot_product_attention  # type: ignore[assignment]
    model = small_llama()
    dp, cp = mesh.get("dp", 1), mesh["cp"]
    ids = torch.randint(1024, (dp * BATCH, LENGTH))
    labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=3)
    model(input_ids=ids, labels=ids, shift_labels=labels, use_cache=False).loss.backward()
    whole = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad()
    huggingface.distribute(model, mesh, trains=True)
    # Its rows, and of each a chunk from the front and its mirror image.
    size, place = LENGTH // (2 * cp), rank % cp
    rows = slice(rank // cp * BATCH, (rank // cp + 1) * BATCH)
    chunks = torch.arange(LENGTH).split(size)
    at = torch.cat((chunks[place], chunks[2 * cp - 1 - place]))
    part = {"input_ids": ids[rows, at].contiguous(), "use_cache": False}
    told = {"labels": part["input_ids"], "shift_labels": labels[rows, at].contiguous()}
    with huggingface.divided(model, mesh):
        placed = model.model.rotary_emb.register_forward_pre_hook(
            lambda module, args, kwargs: (args, {**kwargs, "position_ids": at[None]}),
            with_kwargs=True,
        )
        model(**part, **told).loss.backward()
        placed.remove()
        grads = {name: weight.grad.full_tensor() for name, weight in model.named_parameters()}
        error = max((grads[n] - g).abs().max() / g.abs().max() for n, g in whole.items())
        model.zero_grad()

        def again() -> None:
            outputs = model(**part, labels=part["input_ids"])
            outputs.loss.backward()

        def peak_of_a_step() -> int:
            model.zero_grad()
            return allocated(again)

        with Sent() as sent:
            again()
        # A busy thread of gloo lets go late of what it sent, so the least is a step's own.
        peak = min(peak_of_a_step() for _ in range(5))
    held = sum(weight.to_local().nbytes for weight in model.parameters())
    found = {"error": float(error), "sent": sent.seen, "peak": peak + held}
    Path(folder, str(rank)).write_text(json.dumps(found))
    dist.destroy_process_group()


def real_processes() -> None:
    """Print what each of four processes finds, for each mesh."""
    small_llama()
    for mesh in MESHES:
        print(json.dumps([json.loads(text) for text in on_processes(one_process, mesh)]))


def shared(mesh: dict[str, int], phase: str = "training", config: Any = LLAMA, **how: Any) -> Any:
    """The graph of a process that has a part of each sequence."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.json")
        path.write_text(json.dumps({"dtype": "float32", **config}))
        sizes = {"seq": LENGTH, "batch": BATCH, **how}
        return rt.trace(str(path), mesh=mesh, phase=phase, **sizes)


@needs_plans
@pytest.mark.slow
@pytest.mark.subprocess
def test_real_processes_share_sequences_as_the_trace_says() -> None:
    lines = in_fresh_interpreter(__name__, "real_processes")
    for mesh, line in zip(MESHES, lines[-2:], strict=True):
        found = json.loads(line)
        assert max(process["error"] for process in found) < 1e-5
        graph = shared(mesh, optimizer="none")
        exchanges = (op.collective for op in graph.expand().ops if op.collective)
        sent = Counter(f"{each.kind} of {each.bytes}" for each in exchanges)
        assert all(process["sent"] == sent for process in found)
        peak = rt.estimate(graph, execution="eager").memory.peak
        assert found[0]["peak"] == pytest.approx(peak, rel=0.01)


@needs_plans
def test_processes_of_cp_share_the_work_and_what_is_kept() -> None:
    over_dp, over_cp = (shared({axis: 4}, optimizer="none") for axis in ("dp", "cp"))
    assert 4 * useful(over_cp) == useful(over_dp)
    one, other = (rt.estimate(graph, execution="eager") for graph in (over_dp, over_cp))
    assert 4 * other.memory.saved == pytest.approx(one.memory.saved, rel=0.05)
    assert (one.replicas, other.replicas) == (4, 1)
    assert one.items == other.items == BATCH * LENGTH
    assert [each.text[:30] for each in over_cp.assumptions if each.kind == "plan"] == [
        "context parallelism as torch's"
    ]
    # Weights are gathered and gradients reduced alike.
    weights = [
        [op.collective for op in graph.expand().ops if op.target.startswith("c10d.")]
        for graph in (over_dp, over_cp)
    ]
    assert [(c.kind, c.bytes) for c in weights[0]] == [(c.kind, c.bytes) for c in weights[1]]


@needs_plans
def test_weights_are_shared_over_dp_and_cp() -> None:
    graph = shared({"dp_replicate": 2, "dp": 2, "cp": 2})
    by_axis = {
        (graph.groups[c.group].axis, c.kind) for op in graph.ops if (c := op.collective) is not None
    }
    assert by_axis == {
        *(("dp+cp", "all_gather"), ("dp+cp", "reduce_scatter"), ("dp_replicate", "all_reduce")),
        *(("cp", "all_gather"), ("cp", "send")),
    }


@needs_plans
def test_gradients_of_keys_go_to_the_next_process() -> None:
    graph = shared({"cp": 4, "tp": 2})
    (send,) = {op.collective for op in graph.ops if op.target.endswith("all_to_all_single.default")}
    assert (send.kind, send.peer) == ("send", 2)  # two processes of tp stand side by side
    assert graph.groups[send.group].ranks == (0, 2, 4, 6)
    # Of the keys and values of one head, in fp32, all goes over the link.
    cost = next(cost for op, cost in priced(graph) if op.collective == send)
    assert send.bytes == 2 * BATCH * LENGTH // 4 * 16 * 4
    assert sum(n for access, n in cost.traffic.items() if access.wire == "link") == send.bytes


@needs_plans
def test_a_prompt_is_shared_and_a_step_of_one_token_is_not() -> None:
    graph = shared({"cp": 4}, "prefill")
    kept = [v for v in graph.expand().values if v.role == "kv" and len(v.shape) == 4]
    assert {v.shape for v in kept} == {(BATCH, 2, LENGTH // 4, 16)}
    gathered = [op.collective for op in graph.expand().ops if op.collective]
    assert [(c.kind, c.bytes) for c in gathered] == 2 * [("all_gather", 2 * kept[0].nbytes * 4)]
    with pytest.raises(
        RequestError, match=r"--phase decode with --mesh cp=4: .* no step behind a cache"
    ):
        shared({"cp": 4}, "decode")


@needs_plans
@pytest.mark.slow
def test_stages_of_a_pipeline_share_sequences(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"dtype": "bfloat16", **LLAMA, "vocab_size": 128}))
    sizes = {"mesh": {"pp": 2, "dp": 2, "cp": 2}, "seq": 4096, "microbatches": 4}
    made = rt.report(str(path), phase="training", system="dgx-h100", **sizes)
    # One of the stages gathers no weight at its peak.
    assert "training stage 2 of 2 dp+cp reduce_scatter" in str(made)
    graphs = [made.estimate(phase).graph for phase in made.phases]
    handed = {graph.workload["handed"] for graph in graphs}
    assert handed == {0, 4096 // 2 * LLAMA["hidden_size"] * 2}


GPT_OSS = {**LLAMA, "model_type": "gpt_oss", "head_dim": 16, "num_local_experts": 4}
T5 = {"model_type": "t5", "d_model": 64, "d_kv": 16, "num_heads": 4, "vocab_size": 128}


@needs_plans
@pytest.mark.parametrize(
    ("config", "seq", "says"),
    [
        (LLAMA, 130, "--mesh cp=4: --seq 130: .* expected a multiple of 8"),
        (
            {**LLAMA, "model_type": "mistral", "sliding_window": 8},
            32,
            "MistralForCausalLM .*window",
        ),
        (GPT_OSS, 128, "attention of GptOssForCausalLM .* leave cp out"),
        (T5, 128, "T5ForConditionalGeneration takes input_ids, decoder_input_ids, labels"),
    ],
)
def test_sequences_that_cannot_be_shared_are_refused(config: Any, seq: int, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        shared({"cp": 4}, config=config, seq=seq)


def test_lengths_of_shared_sequences_are_those_that_divide() -> None:
    job = Job.of(rt.trace, "llama-3.1-8b", (), {"mesh": {"cp": 4}})
    assert lengths_in(job, "seq", range(12, 41)) == range(16, 41, 8)
    assert lengths_in(job, "batch", range(12, 41)) == range(12, 41)


@pytest.mark.parametrize(
    ("mesh", "plan", "lengths"),
    [
        ({"tp": 8}, "engines", range(16, 41, 8)),
        ({"tp": 8}, "transformers", range(12, 41)),
        ({"cp": 4, "tp": 8}, "engines", range(32, 41, 32)),
    ],
)
def test_lengths_of_a_training_over_tp_are_those_that_divide(
    mesh: dict[str, int], plan: str, lengths: range
) -> None:
    said = {"mesh": mesh, "plan": plan, "phase": "training"}
    job = Job.of(rt.trace, "llama-3.1-8b", (), said).of_one_phase()
    assert lengths_in(job, "seq", range(12, 41)) == lengths
