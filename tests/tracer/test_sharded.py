"""What modules over many processes exchange, beside torch's own count on real tensors."""

import contextlib
import functools
import math
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rooftrace as rt
from rooftrace.costmodels.timing import StageCost, pipelined
from rooftrace.hardware.systems import load_system
from rooftrace.tracer import Options
from rooftrace.tracer.inputs import Inputs
from rooftrace.tracer.phases.running import trace_phases
from tests.conftest import mostly_heavy
from tests.tracer.sharded_models import (
    BATCH,
    LAYERS,
    MICROBATCHES,
    SEQ,
    WAYS,
    WIDTH,
    WORDS,
    Net,
    allocated,
    fsdp,
    low,
    piped,
    sp,
    step,
    tp,
)

KINDS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
}


def kind_of(name: str) -> str:
    """ "all_gather" for "_allgather_base_" and "all_gather_into_tensor"."""
    plain = name.replace("_", "")
    return next(kind for text, kind in KINDS.items() if text in plain)


def exchanged(graph: Any, part: str | None = None) -> Counter[str]:
    made = (op for op in graph.expand().ops if op.collective)
    return Counter(op.collective.kind for op in made if part in (None, op.part))


ON_HOST = {"dp": 4}, functools.partial(low, offload_policy=CPUOffloadPolicy(False)), False


@pytest.mark.parametrize("way", [*(way for way in WAYS if way != "ddp"), "fsdp-host"])
def test_as_many_collectives_as_torch_counts_on_real_tensors(way: str) -> None:
    sizes, spread, again = WAYS.get(way, ON_HOST)
    with rt.tools.fake_mesh(sizes) as mesh:
        with torch.device("meta"):
            net = spread(Net(again=again), mesh)
            ids = torch.zeros(BATCH, SEQ, dtype=torch.long)
        graph = rt.trace(step, net, ids)
    with rt.tools.fake_mesh(sizes) as mesh:
        real = spread(Net(again=again), mesh)
        ids = torch.randint(WORDS, (BATCH, SEQ))
        with CommDebugMode() as debug:
            step(real, ids)
        counts: Counter[str] = Counter()
        for packet, calls in debug.get_comm_counts().items():
            counts[kind_of(packet._qualified_op_name.split("::")[-1])] += calls
    assert counts
    assert exchanged(graph) == counts


class Exchanges(TorchDispatchMode):
    """Bytes of the whole buffers that real tensors exchange, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[str, list[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._opname.strip("_")
            kind = name if name in ("send", "recv") else kind_of(name)
            tensors = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
            self.sizes.setdefault(kind, []).append(max(t.nbytes for t in tensors))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(
    ("schedule", "rank"),
    [
        ("Schedule1F1B", 0),
        *(
            pytest.param(schedule, rank, marks=pytest.mark.heavy)
            for schedule, rank in (
                ("Schedule1F1B", 3),
                ("ScheduleGPipe", 0),
                ("ScheduleInterleaved1F1B", 0),
                ("ScheduleInterleaved1F1B", 3),
            )
        ),
    ],
)
def test_a_pipeline_of_torchs_exchanges_and_holds_what_it_does_on_real_tensors(
    schedule: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.pipelining import _utils

    sizes = {"pp": 2, "dp": 2}
    with rt.tools.fake_mesh(sizes, rank) as mesh:
        _, pieces, run = piped(mesh, schedule, "meta")
        graph = rt.trace(run, *pieces)
    with rt.tools.fake_mesh(sizes, rank) as mesh:
        made, pieces, run = piped(mesh, schedule, "cpu")

        def agreed(stages: Any, *others: Any) -> None:
            for stage in stages:
                stage._inference_mode = _utils.InferenceMode.STATIC

        monkeypatch.setattr(made, "_warmup_p2p", agreed)
        run(*pieces)
        for piece in pieces:
            piece.zero_grad()
        with Exchanges() as real:
            peak = allocated(lambda: run(*pieces))
    assert {kind: (calls, sent(graph, kind)) for kind, calls in exchanged(graph).items()} == {
        kind: (len(sizes), sum(sizes)) for kind, sizes in real.sizes.items()
    }
    groups = len(pieces) * 2
    assert len(real.sizes["all_gather"]) == (MICROBATCHES + 1) * groups
    assert len(real.sizes["reduce_scatter"]) == groups
    held = sum(p.to_local().nbytes for piece in pieces for p in piece.parameters())
    # Buffers for what is received stay from the first step on: one for each microbatch and peer.
    given = (1 + (3 if len(pieces) > 1 else 1)) * 2 * MICROBATCHES * SEQ * WIDTH * 4
    ours = rt.estimate(graph, execution="eager").memory.peak
    assert ours == pytest.approx(peak + held + given, rel=0.01)


def test_a_stage_that_is_walked_holds_and_exchanges_what_torchs_schedule_does() -> None:
    hidden = torch.zeros(2, SEQ, WIDTH, device="meta", requires_grad=True)
    with rt.tools.fake_mesh({"pp": 2, "dp": 2}) as mesh:
        _, pieces, run = piped(mesh, "Schedule1F1B", "meta")
        whole = rt.trace(run, *pieces)
        plain = Options(optimizer="none")
        made = trace_phases(pieces[0], Inputs(args=(hidden,)), ("training",), plain, behind=True)
    stage = made["training"]
    cost = StageCost.of(rt.estimate(stage, execution="eager"))
    system = load_system("dgx-h100")
    pipe = pipelined({0: cost, 1: cost}, "1f1b", MICROBATCHES, hidden.nbytes, system)
    once, each = exchanged(stage, "optimizer"), exchanged(stage, "backward")
    counts = exchanged(whole)
    assert exchanged(stage, "forward") == Counter()
    assert counts["reduce_scatter"] == once["reduce_scatter"]
    assert counts["all_gather"] == (MICROBATCHES + 1) * each["all_gather"]
    # The schedule also holds the rest of the batch, and what it receives.
    more = (2 * MICROBATCHES - 1) * hidden.nbytes
    assert pipe.peaks[0] + more == pytest.approx(
        rt.estimate(whole, execution="eager").memory.peak, rel=0.03
    )


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """A real process group, of this process only."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def real_buckets(net: nn.Module, ids: Tensor, **how: Any) -> list[int]:
    """Bytes of the buckets that DistributedDataParallel reduces in its third step, in order."""
    wrapped = nn.parallel.DistributedDataParallel(net, **how)
    buckets: list[int] = []

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        buckets.append(bucket.buffer().nbytes)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    wrapped.register_comm_hook(None, hook)
    for _ in range(3):
        buckets.clear()
        step(wrapped, ids)
    return buckets


@pytest.mark.parametrize(
    "how", [{"bucket_cap_mb": 0.02}, {"bucket_cap_mb": 0.1, "gradient_as_bucket_view": True}, {}]
)
def test_buckets_of_ddp_are_those_of_a_real_reducer(how: dict[str, Any], tmp_path: Path) -> None:
    with alone(tmp_path):
        real = real_buckets(Net(layers=5), torch.randint(WORDS, (BATCH, SEQ)), **how)
    with rt.tools.fake_mesh({"dp": 4}), torch.device("meta"):
        wrapped = nn.parallel.DistributedDataParallel(Net(layers=5), **how)
        graph = rt.trace(step, wrapped, torch.zeros(BATCH, SEQ, dtype=torch.long))
    assert [op.collective.bytes for op in graph.expand().ops if op.collective] == real
    assert set(exchanged(graph)) == {"all_reduce"}


def test_gradients_that_are_accumulated_without_sync_are_not_exchanged(tmp_path: Path) -> None:
    def accumulated(net: nn.Module, ids: Tensor) -> None:
        with net.no_sync():
            step(net, ids)
        step(net, ids)

    def never(net: nn.Module, ids: Tensor) -> None:
        with net.no_sync():
            step(net, ids)

    ids = torch.zeros(BATCH, SEQ, dtype=torch.long)
    with alone(tmp_path):
        wrapped = nn.parallel.DistributedDataParallel(Net())
        counts = [exchanged(rt.trace(run, wrapped, ids)) for run in (step, accumulated, never)]
        assert [count["all_reduce"] for count in counts] == [1, 1, 0]
        step(wrapped, ids)  # the wrapper has its own reducer again
        assert all(p.grad is not None for p in wrapped.parameters())


class Beside(nn.Module):
    """A replicated part, and another that is not."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.inner = nn.parallel.DistributedDataParallel(Net())
        self.last = nn.Linear(WORDS, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.inner(ids))


def test_a_replicated_part_of_a_module_exchanges_its_gradients_only() -> None:
    with rt.tools.fake_mesh({"dp": 4}) as mesh, torch.device("meta"):
        module = Beside(mesh)
        graph = rt.trace(module, torch.zeros(2, 4, dtype=torch.long), phase="training")
    sent = [op.collective.bytes for op in graph.expand().ops if op.collective]
    assert sent == [4 * sum(p.numel() for p in module.inner.parameters())]


def hooked(net: nn.Module, hook: str, iteration: int) -> nn.Module:
    """A wrapper whose gradients are exchanged by a hook of torch's, at this step."""
    wrapped = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.02)
    if hook == "fp16":
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return wrapped
    state = powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=3)
    state.iter = iteration
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return wrapped


def exchanged_by(hook: str) -> list[int]:
    """Bytes that a hook exchanges in a step on the meta device, the same at each trace."""
    with rt.tools.fake_mesh({"dp": 4}), torch.device("meta"):
        wrapped = hooked(Net(), hook, 4)
        ids = torch.zeros(BATCH, SEQ, dtype=torch.long)
        graphs = [rt.trace(step, wrapped, ids), rt.trace(wrapped, ids, phase="training")]
        graphs.append(rt.trace(step, wrapped, ids))  # the hook's state is as it was
    made = [[op.collective.bytes for op in g.expand().ops if op.collective] for g in graphs]
    assert sorted(made[0]) == sorted(made[1]) == sorted(made[2])
    for graph in graphs:
        kinds = [a.kind for a in graph.assumptions if "_hook exchanges" in a.text]
        assert kinds == ["communication"]
    return made[0]


def test_a_hook_on_gradients_exchanges_what_it_does_in_a_real_reducer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: list[int] = []
    reduce = dist.all_reduce

    def noted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        real.append(tensor.nbytes)
        return reduce(tensor, *args, **kwargs)

    ids = torch.randint(WORDS, (BATCH, SEQ))
    with alone(tmp_path), monkeypatch.context() as patched:
        wrapped = hooked(Net(), "fp16", 0)
        patched.setattr(dist, "all_reduce", noted)
        for _ in range(5):
            real.clear()
            step(wrapped, ids)
    assert sorted(exchanged_by("fp16")) == sorted(real)


def test_powersgd_exchanges_two_factors_of_each_matrix() -> None:
    """P [n, r] and Q [m, r] of a matrix [n, m] where both are half of it at most, else all of it
    (Vogels et al., arXiv:1905.13727).  A real reducer on gloo hangs now and then: its hook waits
    inside of a callback."""
    rank, total = 2, 0
    with torch.device("meta"):
        shapes = [(p.shape[0], p.numel() // p.shape[0]) for p in Net().parameters()]
    for rows, columns in shapes:
        factors = (rows + columns) * rank
        total += factors if 2 * factors < rows * columns else rows * columns
    assert sum(exchanged_by("power")) == 4 * total


def test_processes_tell_each_other_which_gradients_they_have() -> None:
    """c10d's reducer sums a map of one int32 for each parameter (reducer.cpp)."""
    with rt.tools.fake_mesh({"dp": 4}), torch.device("meta"):
        wrapped = nn.parallel.DistributedDataParallel(Net(), find_unused_parameters=True)
        graph = rt.trace(step, wrapped, torch.zeros(BATCH, SEQ, dtype=torch.long))
    sizes = [op.collective.bytes for op in graph.expand().ops if op.collective]
    assert sizes == [
        4 * sum(p.numel() for p in wrapped.parameters()),
        4 * len(list(wrapped.parameters())),
    ]


class Turned(nn.Module):
    """Rows become columns, over the processes of a mesh."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh, self.inner = mesh, nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        rows = DTensor.from_local(self.inner(x), self.mesh, [Shard(0)])
        return rows.redistribute(self.mesh, [Shard(1)]).to_local() * 2


def test_other_shards_of_a_tensor_are_exchanged_and_not_gathered() -> None:
    """Each process sends its shard once: 16 of 128 rows, there and back."""
    with rt.tools.fake_mesh({"tp": 8}) as mesh, torch.device("meta"):
        graph = rt.trace(Turned(mesh), torch.zeros(16, 64), phase="training")
    made = [op.collective for op in graph.expand().ops if op.collective]
    assert [(c.kind, c.bytes) for c in made] == [("all_to_all", 16 * 64 * 4)] * 2


def test_flat_weights_are_refused() -> None:
    refused = pytest.raises(rt.types.RequestError, match=r"FSDP1.*fully_shard")
    with refused, rt.tools.fake_mesh({"dp": 4}) as mesh:
        FullyShardedDataParallel(nn.Linear(8, 8), device_mesh=mesh)
    with rt.tools.fake_mesh({"dp": 4}):
        net = FullyShardedDataParallel(nn.Linear(8, 8), device_id=torch.device("cpu"))
        with refused:
            rt.trace(net, torch.zeros(2, 8), phase="training")


@pytest.mark.parametrize("phase", ["training", None])
def test_weights_that_stay_on_the_host_are_copied_and_take_no_memory(phase: str | None) -> None:
    """The exchanges are those without the policy; a shard goes to the device before each gather,
    and its gradient back.  The optimizer runs on the host."""
    made = []
    for policy in (OffloadPolicy(), CPUOffloadPolicy(pin_memory=False)):
        with rt.tools.fake_mesh({"dp": 4}) as mesh, torch.device("meta"):
            net = fsdp(Net(), mesh, offload_policy=policy)
            ids = torch.zeros(BATCH, SEQ, dtype=torch.long)
            graph = rt.trace(net, ids, phase=phase) if phase else rt.trace(step, net, ids)
            shards = sum(p.to_local().nbytes for p in net.parameters())
        made.append(graph.expand())
    plain, offloaded = made
    exchanged = [[(o.part, o.collective) for o in g.ops if o.collective] for g in made]
    assert exchanged[0] == exchanged[1]
    before, after = (rt.estimate(graph, "h100-sxm").memory for graph in made)
    assert before.gradients == shards and after.gradients == after.optimizer == 0
    assert before.weights - after.weights == shards
    assert (before.optimizer > 0) == (phase is not None)
    there = [o for o in offloaded.ops if o.name == "rooftrace.to_host"]
    assert sum(offloaded.values[o.inputs[0]].nbytes for o in there) == shards
    gathers = sum(o.name == "rooftrace.from_host" for o in offloaded.ops)
    assert gathers >= len(there)
    assert not any("_host" in o.name for o in plain.ops)
    assert all(o.kind == "view" for o in offloaded.ops if o.part == "optimizer")
    assert ("memory of the host" in " ".join(a.text for a in offloaded.assumptions)) == bool(phase)


@functools.cache
def sharded(way: str, layers: int = LAYERS, phase: str = "training") -> Any:
    """The graph of a model spread in one of the ways, on meta."""
    sizes, spread, again = WAYS[way]
    with rt.tools.fake_mesh(sizes) as mesh, torch.device("meta"):
        net = spread(Net(layers, again), mesh)
        return rt.trace(net, torch.zeros(BATCH, SEQ, dtype=torch.long), phase=phase)


def sent(graph: Any, kind: str) -> int:
    return sum(
        op.collective.bytes
        for op in graph.expand().ops
        if op.collective and op.collective.kind == kind
    )


@pytest.mark.parametrize(("way", "width"), [("fsdp", 4), ("fsdp-bf16", 2)])
def test_bytes_of_fsdp_are_those_of_its_closed_form(way: str, width: int) -> None:
    with torch.device("meta"):
        net = Net()
    whole = sum(p.numel() for p in net.parameters())
    blocks = sum(p.numel() for p in net.blocks.parameters())
    graph = sharded(way)
    # Forward gathers all; backward gathers the blocks again, as the root keeps its own weights.
    assert sent(graph, "all_gather") == width * (whole + blocks)
    assert sent(graph, "reduce_scatter") == 4 * whole
    assert sent(sharded(way, phase="forward"), "all_gather") == width * whole


def test_weights_that_are_kept_are_gathered_once() -> None:
    whole = sum(p.numel() for p in Net().parameters())
    assert sent(sharded("fsdp-kept"), "all_gather") == 4 * whole


def test_replicas_of_shards_reduce_a_shard_each() -> None:
    whole = sum(p.numel() for p in Net().parameters())
    graph = sharded("hsdp")
    assert sent(graph, "all_reduce") == 4 * whole // 4
    axes = {
        graph.groups[op.collective.group].axis: op.collective.kind
        for op in graph.ops
        if op.collective
    }
    assert set(axes) == {"shard", "replicate"}
    assert axes["replicate"] == "all_reduce"


@pytest.mark.parametrize("way", WAYS)
def test_local_weights_times_ranks_over_replicas_are_the_whole(way: str) -> None:
    sizes, spread, _ = WAYS[way]
    graph = sharded(way)
    with rt.tools.fake_mesh(sizes) as mesh, torch.device("meta"):
        net = spread(Net(), mesh)
        net = getattr(net, "module", net)
        parts = {name: parts_of(parameter) for name, parameter in net.named_parameters()}
        whole = {name: 4 * parameter.numel() for name, parameter in net.named_parameters()}
    given = [v for n, v in enumerate(graph.values) if n not in graph.producers and v.name in whole]
    held = {value.name: value.nbytes for value in given if value.role == "weights"}
    assert {name: held[name] * parts[name] for name in held} == whole


def parts_of(parameter: Tensor) -> int:
    """Over how many processes a parameter is spread, by its own placements."""
    if not isinstance(parameter, DTensor):
        return 1
    places = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return math.prod(size for size, place in places if not place.is_replicate())


@pytest.mark.parametrize("spread", [tp, sp])
def test_a_mesh_of_one_is_the_plain_module(spread: Any) -> None:
    ids = torch.zeros(BATCH, SEQ, dtype=torch.long, device="meta")
    with rt.tools.fake_mesh({"tp": 1}) as mesh, torch.device("meta"):
        graphs = [rt.trace(net, ids, phase="training") for net in (spread(Net(), mesh), Net())]
    for execution in ("eager", "efficient"):
        alone, plain = (rt.estimate(graph, execution=execution) for graph in graphs)
        assert alone.flops == plain.flops
        assert alone.bytes == plain.bytes
        assert alone.memory.peak == plain.memory.peak
        assert alone.t_bound == plain.t_bound
    # A DTensor asks for views of its own, which the host issues.
    counts = [Counter(op.target for op in graph.expand().ops) for graph in graphs]
    assert not counts[1] - counts[0]
    assert set(counts[0] - counts[1]) <= {"aten.view.default"}


@pytest.mark.parametrize(
    "way", mostly_heavy(WAYS, ("fsdp-bf16", "fsdp-again", "hsdp", "sp", "ddp"))
)
def test_a_module_is_afterwards_what_it_was(way: str) -> None:
    sizes, spread, again = WAYS[way]
    with rt.tools.fake_mesh(sizes) as mesh, torch.device("meta"):
        net = spread(Net(again=again), mesh)
        ids = torch.zeros(BATCH, SEQ, dtype=torch.long)
        before = {name: (id(p), p.shape) for name, p in net.named_parameters()}
        hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in net.modules()]
        first = rt.trace(net, ids, phase="training")
        assert {name: (id(p), p.shape) for name, p in net.named_parameters()} == before
        assert [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in net.modules()] == hooks
        assert all(p.grad is None for p in net.parameters())
        again_traced = rt.trace(net, ids, phase="training")
    assert [op.target for op in first.ops] == [op.target for op in again_traced.ops]
    assert not dist.is_initialized()


def test_errors_after_a_mesh_are_shown_as_before() -> None:
    """Torch's process groups put a hook in front that names a rank, and leave it there."""
    before = sys.excepthook
    with rt.tools.fake_mesh({"dp": 2}):
        assert sys.excepthook is before
    assert sys.excepthook is before
