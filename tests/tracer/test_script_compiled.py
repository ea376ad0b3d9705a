"""torch.compile in scripts: every form runs as it is written, and what it compiles is priced so."""

from pathlib import Path

import pytest
import torch

import rooftrace as rt
from rooftrace.costmodels.estimates import Estimate, ScriptCost
from rooftrace.costmodels.fusion import usual_execution
from rooftrace.errors import RequestError
from rooftrace.graph import marks

if torch.cuda.is_available():
    pytest.skip("a GPU answers for itself", allow_module_level=True)

HEAD = """
import functools, threading
import torch
import torch.nn.functional as F
from torch import compile as early, nn
"""

FORMS = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)
    def forward(self, x):
        return self.b(torch.relu(self.a(x)))
    def other(self, x):
        return self.forward(x)

def step(call, net, optimizer_step=None):
    opt = torch.optim.AdamW(net.parameters())
    call(torch.randn(4, 32, device="cuda")).sum().backward()
    (opt.step if optimizer_step is None else optimizer_step(opt.step))()

def optimize(*args, **kwargs):
    return lambda net: torch._dynamo.optimize(*args, **kwargs)(net)

def in_place(net):
    net.compile(mode="max-autotune", fullgraph=True, dynamic=False)
    return net

def by_forward(net):
    net.forward = torch.compile(net.forward, fullgraph=True)
    return net

def refuses(graph, inputs):
    raise AssertionError("a graph was compiled")

def in_thread(net):
    def call(x):
        out = []
        thread = threading.Thread(target=lambda: out.append(torch.compile(net)(x)))
        thread.start(); thread.join()
        return out[0]
    return call

@torch.compiler.disable
def left_out(net, x):
    return net(x)

def stance(name):
    def call(net):
        compiled = torch.compile(net)
        return torch.compiler.set_stance(name)(lambda x: compiled(x))
    return call

whole = functools.partial(torch.compile, fullgraph=True)
COMPILED = [
    torch.compile, early, whole, in_place, by_forward, in_thread,
    functools.partial(torch.compile, mode="reduce-overhead", dynamic=True),
    functools.partial(torch.compile, backend="aot_eager", options={}),
    functools.partial(torch.compile, backend=refuses),
    functools.partial(torch.compile, options={"max_autotune": True}),
    lambda net: whole(net.other), lambda net: whole(lambda x: net(x)),
    lambda net: whole(functools.partial(lambda scale, x: net(x), 2.0)),
    lambda net: torch.compile(torch.compile(net)), lambda net: whole(whole(net.other)),
    optimize("eager", nopython=True), optimize("inductor"),
    stance("fail_on_recompile"), stance("default"),
]
EAGER = [
    lambda net: net, functools.partial(torch.compile, disable=True), stance("force_eager"),
    lambda net: torch.compile(lambda x: left_out(net, x)),
]
for form in COMPILED + EAGER:
    net = Net().cuda()
    step(form(net), net)
step(net := Net().cuda(), net, torch.compile)
assert not torch.compiler.is_compiling()
torch._dynamo.config.cache_size_limit = 64
torch.compiler.cudagraph_mark_step_begin()
with torch._dynamo.config.patch(compiled_autograd=True):
    step(torch.compile(net := Net().cuda()), net)
import torch._dynamo.utils as utils
assert not utils.counters["frames"] and not utils.counters["stats"], utils.counters
"""

PARTS = """
N = 1 << 20

@torch.compile
def compiled(x):
    return torch.relu(x * 2 + 1)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(N))
    def forward(self, x):
        x = compiled(compiled(x))
        return torch.relu(x * 2 + 1) * self.weight

net, x = Net().cuda(), torch.zeros(N, device="cuda")
for _ in range(3):
    with torch.no_grad():
        net(x)
"""


def ran(tmp_path: Path, script: str, **how: object) -> ScriptCost:
    path = tmp_path / "script.py"
    path.write_text(HEAD + script)
    return rt.run([str(path)], chip="h100-sxm", steps=None, **how)  # type: ignore[arg-type]


@pytest.mark.slow
def test_every_form_runs_as_written_and_tells_what_it_compiles(tmp_path: Path) -> None:
    cost = ran(tmp_path, FORMS, boundary="optimizer")
    forms = 19
    told = []
    for row in cost.rows:
        (graph,) = [step.plan.source for step, _ in row.parts]
        # Two products of 4 rows with 32 x 32, and in backward two of the second and one of the
        # first, whose input needs no gradient.
        assert sum(op.flops_torch or 0 for op in graph.ops) == 5 * 2 * 4 * 32 * 32
        products = [op for op in graph.ops if op.flops_torch]
        inside = {(op.part, marks.COMPILED in op.facts) for op in products}
        updates = {marks.COMPILED in op.facts for op in graph.ops if "foreach" in op.name}
        told += [(inside, updates)] * row.turns
    both = {("forward", True), ("backward", True)}
    neither = {("forward", False), ("backward", False)}
    assert told == [
        *[(both, {False})] * forms,
        *[(neither, {False})] * 4,
        (neither, {True}),
        (both, {False}),
    ]


def test_only_what_is_compiled_is_fused_and_no_kernel_crosses_the_border(tmp_path: Path) -> None:
    cost = ran(tmp_path, PARTS)
    (row,) = cost.rows
    size = 4 * (1 << 20)
    # Each call of the compiled function is a kernel that reads and writes its tensor once; beside
    # them a kernel for each of three ops, and one that also reads the weight.
    assert row.kernels == 1 + 1 + 3 + 1
    assert row.bytes_hbm == (2 * 2 + 3 * 2 + 3) * size
    assert cost.compiled is not None
    assert (cost.compiled.ops, cost.compiled.of_ops) == (6, 10)
    assert cost.compiled.callables == ("compiled",)
    assert "compiled: 60 % of FLOP, 6 of 10 ops, in compiled" in str(cost)
    # A saved graph is priced alike, and what is asked for stands above what the script says.
    path = tmp_path / "step.json.gz"
    rt.save(cost.script.by_phase(), path)
    assert rt.estimate(rt.load(path), "h100-sxm").t_est == row.t_est
    assert usual_execution(path, "train.py --lr=1", cost.steps[-1].plan.source, None) == "mixed"
    assert usual_execution("models.py:build", None) == "efficient"
    with pytest.raises(RequestError, match="say one for all as execution="):
        usual_execution("models.py:build", "train.py")
    (eager,) = ran(tmp_path, PARTS, execution="eager").rows
    assert (eager.kernels, eager.bytes_hbm) == (10, (9 * 2 + 3) * size)
    (whole,) = ran(tmp_path, PARTS, execution="compiled").rows
    assert (whole.kernels, whole.bytes_hbm) == (1, 3 * size)


def test_a_call_of_torch_compile_that_nothing_runs_changes_no_price(tmp_path: Path) -> None:
    idle = PARTS.replace("x = compiled(compiled(x))", "pass")
    cost = ran(tmp_path, idle)
    plain = ran(tmp_path, idle.replace("@torch.compile", ""))
    assert cost.compiled is None
    assert cost.title == plain.title.replace("mixed", "eager")
    assert [row.t_est for row in cost.rows] == [row.t_est for row in plain.rows]


POOLS = """
x, y = (torch.zeros(64, 64, 56, 56, device="cuda") for _ in "xy")
eager, compiled = nn.MaxPool2d(2), torch.compile(nn.MaxPool2d(2))
for _ in range(3):
    with torch.no_grad():
        eager(x), compiled(y)
        torch.cuda.nvtx.mark("turn")
"""


def test_each_kernel_of_a_mixed_step_reaches_the_shares_of_its_own_part(tmp_path: Path) -> None:
    def rows(**how: object) -> Estimate:
        cost = ran(tmp_path, POOLS, boundary="mark=turn", **how)
        return cost.steps[-1]

    mixed, eager, compiled = rows(), rows(execution="eager"), rows(execution="compiled")
    # typical-eager.toml and typical-compiled.toml: of the bandwidth, pooling reaches 0.6 and 0.95.
    # A quarter of what is read is written, and in eager mode 8-byte indices beside it.
    slow, fast = (row.timing.t_hbm for row in mixed.rows)
    assert slow / fast == pytest.approx((4 + 1 + 2) / (4 + 1) * 0.95 / 0.6)
    assert {row.timing.t_device for row in eager.rows} == {mixed.rows[0].timing.t_device}
    assert {row.timing.t_device for row in compiled.rows} == {mixed.rows[1].timing.t_device}
    assert 2 * mixed.times.t_serial == pytest.approx(eager.times.t_serial + compiled.times.t_serial)
