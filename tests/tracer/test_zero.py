"""Stages of ZeRO: results, exchanges and bytes of real processes; published bytes of a weight."""

from __future__ import annotations

import json
import math
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import rooftrace as rt
from rooftrace.errors import RequestError
from rooftrace.tracer import trace_target
from rooftrace.tracer.sharding import huggingface, zero
from tests.tracer.expert_models import MIXTRAL, needs_plans
from tests.tracer.sharded_models import (
    PROCESSES,
    allocated,
    in_fresh_interpreter,
    on_processes,
)
from tests.tracer.test_plans import model_of
from tests.tracer.test_sharded import Exchanges

pytestmark = needs_plans
LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4,
    "num_key_value_heads": 4, "num_hidden_layers": 2, "vocab_size": 128,
}  # fmt: skip
CASES = [
    (LLAMA, {"dp": 4}),
    (LLAMA, {"dp": 2, "tp": 2}),
    (LLAMA, {"dp_replicate": 2, "dp": 2}),
    (MIXTRAL, {"dp": 4, "ep": 2}),
]


def loss_of(model: Any, ids: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def ours(rank: int, config: dict[str, Any], mesh: dict[str, int], folder: str) -> None:
    """The largest error of weights that our buckets step, beside one process with all batches."""
    whole, spread = (seeded(config) for _ in range(2))
    before = {name: weight.detach().clone() for name, weight in whole.named_parameters()}
    batches = torch.randint(128, (4, 2, 6), generator=torch.Generator().manual_seed(1))
    replicas = 4 // mesh.get("tp", 1)
    (sum(loss_of(whole, ids) for ids in batches[:replicas]) / replicas).backward()
    torch.optim.SGD(whole.parameters(), lr=0.5).step()
    # The plan whose weights say what they are a part of.
    huggingface.distribute(spread, mesh, trains=True, zero=1, plan="transformers")
    shared = zero.SHARES[spread]
    with shared.exchanged(spread, late=False):
        loss_of(spread, batches[rank // mesh.get("tp", 1)]).backward()
    for part in shared.parts.values():
        part.grad = shared.sums[id(part)]
    torch.optim.SGD(shared.parts.values(), lr=0.5).step()
    shared.gather()
    errors = []
    for name, weight in spread.named_parameters():
        local: Any = weight
        if hasattr(local, "full_tensor"):
            local = local.full_tensor()
        expected = whole.get_parameter(name)
        if local.shape == expected.shape:  # experts of others are not here
            moved = (expected - before[name]).abs().max()
            errors.append(float((local - expected).abs().max() / moved))
    Path(folder, f"{rank}").write_text(json.dumps([max(errors), len(errors)]))


def seeded(config: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return model_of(config).train()


class Plain:
    """ZeRO-1 of one bucket, written down on its own: bf16 weights, fp32 gradients, Adam."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        count, rank = sum(p.numel() for p in self.parameters), dist.get_rank()
        self.flat = torch.zeros(count, dtype=torch.bfloat16)
        self.main = torch.zeros(count)
        start = 0
        for parameter in self.parameters:
            end = start + parameter.numel()
            parameter.data = self.flat[start:end].view(parameter.shape)
            view = self.main[start:end].view(parameter.shape)
            parameter.register_post_accumulate_grad_hook(lambda p, view=view: self.add(p, view))
            start = end
        each = count // PROCESSES
        self.mine = slice(rank * each, (rank + 1) * each)
        self.master = torch.zeros(each)
        self.master.grad = self.main[self.mine]
        self.adam = torch.optim.AdamW([self.master], foreach=True)

    def add(self, parameter: Tensor, view: Tensor) -> None:
        view += parameter.grad
        parameter.grad = None

    def step(self, model: Any, ids: Tensor) -> None:
        dist.all_gather_into_tensor(self.flat, self.flat[self.mine])
        loss_of(model, ids).backward()
        self.main *= 1 / PROCESSES
        dist.reduce_scatter_tensor(self.main[self.mine], self.main)
        self.adam.step()
        self.flat[self.mine] = self.master
        self.main.zero_()


def plain(rank: int, config: dict[str, Any], mesh: dict[str, int], folder: str) -> None:
    """What the other form of ZeRO-1 exchanges and holds."""
    model = model_of(config).bfloat16().train()
    states = Plain(model)
    ids = torch.zeros(1, SEQ, dtype=torch.long)
    states.step(model, ids)
    with Exchanges() as real:
        states.step(model, ids)
    # Gloo copies what it reduces, on the host; NCCL reduces in place.
    dist.all_gather_into_tensor = dist.reduce_scatter_tensor = lambda *tensors: None  # type: ignore
    peak = allocated(lambda: states.step(model, ids))
    held = sum(t.nbytes for t in (states.flat, states.main, states.master)) + 2 * 4 * len(
        states.master
    )
    Path(folder, f"{rank}").write_text(json.dumps([real.sizes, peak + held]))


SEQ = 64


def started(rank: int, run: Any, config: dict[str, Any], mesh: Any, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=PROCESSES)
    run(rank, config, mesh, folder)
    dist.barrier()  # nobody leaves while another still reads from it
    dist.destroy_process_group()


def run_all() -> None:
    """Run all cases on processes that are forked after imports, and print what they keep."""
    kept = []
    for run, config, mesh in [*((ours, *case) for case in CASES), (plain, LLAMA, {"dp": 4})]:
        model_of(config)
        kept.append([json.loads(text) for text in on_processes(started, run, config, mesh)])
    print(json.dumps(kept))


@pytest.mark.slow
@pytest.mark.subprocess
def test_real_processes_step_as_one_does_and_exchange_and_hold_what_a_trace_says() -> None:
    *errors, others = json.loads(in_fresh_interpreter(__name__, "run_all")[-1])
    assert len(errors) == len(CASES)
    for of_processes in errors:
        assert all(error < 1e-4 and weights > 10 for error, weights in of_processes)
    graph = traced(LLAMA, {"dp": 4}, SEQ)
    memory = rt.estimate(graph, execution="eager", chip="h100-sxm").memory
    for sizes, peak in others:
        assert sent(graph) == {kind: sum(each) for kind, each in sizes.items()}
        assert exchanges(graph) == Counter({kind: len(each) for kind, each in sizes.items()})
        assert memory.peak == pytest.approx(peak, rel=0.015)  # attention of a CPU


def traced(config: dict[str, Any], mesh: dict[str, int], seq: int, **how: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.json")
        file.write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))
        options = {"zero": 1, **how}
        graphs = trace_target(file, phases=["training"], mesh=mesh, seq=seq, **options)
    return next(iter(graphs.values()))


def exchanges(graph: Any, part: str | None = None) -> Counter[str]:
    made = [op for op in graph.expand().ops if op.collective]
    return Counter(op.collective.kind for op in made if part in (None, op.part))


def sent(graph: Any) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for op in graph.expand().ops:
        if op.collective:
            sizes[op.collective.kind] += op.collective.bytes
    return dict(sizes)


def test_bytes_of_a_weight_are_those_of_megatron() -> None:
    """6 + 12 / d with d replicas, of bf16 weights and fp32 gradients (Megatron Core, user guide,
    distributed optimizer); with d replicas that share all, 16 / d beside what is gathered."""
    for replicas in (2, 4, 8):
        graph = traced(LLAMA, {"dp": replicas}, 8)
        moment = rt.estimate(graph, chip="h100-sxm").memory.timeline.moments[-1]
        held = sum(moment.by_kind[kind] for kind in ("weights", "gradients", "optimizer"))
        assert held / graph.model["params"] == pytest.approx(6 + 12 / replicas, rel=0.001)


@pytest.mark.parametrize(("stage", "gathers"), [(1, 1), (2, 4), (3, 7)])
def test_each_stage_gathers_weights_as_often_as_it_drops_them(stage: int, gathers: int) -> None:
    """Of two layers, the words and the head; stage 3 gathers all but the head again."""
    graph = traced(LLAMA, {"dp": 4}, 8, zero=stage)
    weights, made = 2 * graph.model["params"], exchanges(graph)
    assert made["all_gather"] == gathers
    assert sent(graph)["reduce_scatter"] == 2 * weights  # in fp32
    assert (sent(graph)["all_gather"] > weights) == (stage == 3)


def test_a_pipeline_reduces_and_gathers_once_a_step() -> None:
    graph = traced(LLAMA, {"pp": 2, "dp": 2}, 8, microbatches=4)
    assert exchanges(graph) == exchanges(graph, "optimizer")
    assert exchanges(graph) == {"all_gather": 1, "reduce_scatter": 1}


def test_experts_are_shared_by_those_that_have_the_same() -> None:
    graph = traced(MIXTRAL, {"dp": 4, "ep": 2}, 8)
    sizes = {
        graph.groups[op.collective.group].size: op.collective.bytes
        for op in graph.expand().ops
        if op.collective and op.collective.kind == "reduce_scatter"
    }
    experts = sum(
        math.prod(value.shape)
        for value in graph.expand().values
        if value.name.endswith(("_up_proj", "down_proj"))
    )
    assert sizes[2] == 4 * experts


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"zero": 4}, "--zero 4: expected one of 1, 2, 3"),
        ({"zero": 2, "mesh": {"pp": 2, "dp": 2}}, "--zero 2 with --mesh pp=2"),
        ({"zero": 1, "mesh": {"tp": 2}}, "--zero 1: .* expected an axis dp"),
        ({"zero": 1, "optimizer": "muon"}, "--optimizer muon with --zero 1"),
    ],
)
def test_what_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestError, match=text):
        traced(LLAMA, options.pop("mesh", {"dp": 2}), 8, **options)
