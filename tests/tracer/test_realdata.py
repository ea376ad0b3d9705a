"""Values that code asks for come from the real tensors that the caller gave, where there are any.

What is counted is what FlopCounterMode counts on the real module.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import rooftrace as rt
from rooftrace.tracer.recording import ops, realdata

pytestmark = pytest.mark.quick

Made = Callable[..., nn.Module]
torch.manual_seed(0)
X = torch.randn(6, 8)


def counted(module: nn.Module, *args: Any) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        copy.deepcopy(module)(*copy.deepcopy(args))
    return int(counter.get_total_flops())


def as_in_a_real_run(module: nn.Module, *args: Any) -> rt.types.OpGraph:
    """The graph, which runs the products that the real module runs, and assumes nothing."""
    graph = rt.trace(module, *args)
    flops = rt.estimate(graph, chip="h100-sxm", execution="eager").flops_matrix
    assert flops == counted(module, *args) > 0
    assert not [a for a in graph.assumptions if a.kind not in ("data-routing", "host-copy")]
    return graph


def branch(self: Any, x: Tensor) -> Any:
    y = self.lin(x)
    return self.lin(y) if (x.sum() > 0).item() else y


def branch_on_weights(self: Any, x: Tensor) -> Any:
    y = self.lin(x)
    return self.lin(y) if y.abs().amax() > 0.1 else y


def masked(self: Any, x: Tensor) -> Any:
    y = self.lin(x)
    return self.lin(y[y[:, 0] > y[:, 1]])


def until_small(self: Any, x: Tensor) -> Any:
    x = self.lin(x)
    while x.norm() > 0.5:
        x = x / 2
    return x


def written_in_place(self: Any, x: Tensor) -> Any:
    y = self.lin(x)
    view = y[0]
    early = y.sum() > 0
    view.mul_(0).sub_(1)
    y[1:].copy_(view)
    y = self.lin(y) if (y == -1).all() else y
    if not early == (self.lin(x).sum() > 0):
        raise ValueError("the earlier state was asked for")
    return y


def inputs_in_place(self: Any, x: Tensor) -> Any:
    x.mul_(0).add_(1)
    self.lin.weight.data.zero_()
    return self.lin(x) if x.sum() == 48 and self.lin.weight.sum() == 0 else x


def experts(self: Any, x: Tensor) -> Any:
    chosen = self.lin(x).topk(2, dim=-1).indices
    for expert in chosen.unique().tolist():
        rows = (chosen == expert).any(1).nonzero()[:, 0]
        x = x.index_add(0, rows, self.lin(x[rows]))
    return x


def numbers(self: Any, x: Tensor) -> Any:
    rows = int(self.lin(x).abs().sum().item() * 10) % 5 + 1
    return self.lin(x[:rows]) + len(x[[0, 1]].tolist())


def through_a_list_index(self: Any, x: Tensor) -> Any:
    return self.lin(x) if x[:, [-1, 0]].isfinite().all() else x


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    "forward",
    [
        branch,
        branch_on_weights,
        masked,
        until_small,
        written_in_place,
        inputs_in_place,
        experts,
        numbers,
        through_a_list_index,
    ],
)
def test_a_value_is_computed_from_real_tensors(forward: Any, sign: int, module: Made) -> None:
    made, x = module(forward), sign * X.abs()
    before = copy.deepcopy((x, made.state_dict()))
    as_in_a_real_run(made, x)
    assert torch.equal(before[0], x)
    assert all(torch.equal(before[1][name], value) for name, value in made.state_dict().items())


def test_a_large_input_decides_too(module: Made) -> None:
    as_in_a_real_run(module(branch), torch.ones(1 << 15, 8))  # larger than what is carried along


def test_layers_that_are_alike_decide_for_themselves() -> None:
    class Layer(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)
            nn.init.constant_(self.lin.weight, scale)

        def forward(self, x: Tensor) -> Any:
            return self.lin(x) if self.lin.weight.sum() > 0 else x

    scales = (1.0, -1.0, 1.0, 1.0, -1.0, 1.0)
    graph = as_in_a_real_run(nn.Sequential(*map(Layer, scales)), X)
    ran = {op.module for op in graph.expand().ops if op.name == "aten.addmm"}
    assert ran == {f"{i}.lin" for i, scale in enumerate(scales) if scale > 0}


def test_a_value_behind_layers_that_are_recorded_once() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            return self.lin(x).relu()

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(5))
            self.last = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            for layer in self.layers:
                x = layer(x)
            return self.last(x[: int((x[:, 0] > x[:, 1]).sum())])

    for seed in range(4):
        torch.manual_seed(seed)
        as_in_a_real_run(Whole(), X)


def test_a_value_in_backward_and_after_it(module: Made) -> None:
    def step(net: Any, x: Tensor) -> None:
        loss = net(x).square().sum()
        loss.backward()
        if net.lin.weight.grad.norm() > 0:
            net(x)

    net = module(lambda self, x: self.lin(x))
    graph = rt.trace(step, net, X)
    assert sum(op.name == "aten.addmm" for op in graph.ops) == 2
    assert not graph.assumptions


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: self.lin(x) if torch.rand_like(x).sum() > 0 else x,
        lambda self, x: self.lin(x) if nn.functional.dropout(x, 0.5).sum() > 0 else x,
    ],
)
def test_chance_is_not_computed(forward: Any, module: Made) -> None:
    graph = rt.trace(module(forward), X)
    assert [(a.kind, a.value) for a in graph.assumptions] == [("branch", False)]


def test_a_meta_module_assumes_as_ever(module: Made) -> None:
    graph = rt.trace(module(branch_on_weights).to("meta"), X)
    assert [(a.kind, a.value) for a in graph.assumptions] == [("branch", False)]


def test_what_the_user_decides_is_not_computed(module: Made) -> None:
    made = module(branch_on_weights)
    for taken in (True, False):
        graph = rt.trace(made, X, assume={"branch": taken})
        assert sum(op.name == "aten.addmm" for op in graph.ops) == 1 + taken
    graph = rt.trace(made, X, branches={0: False})
    assert sum(op.name == "aten.addmm" for op in graph.ops) == 1


@pytest.mark.parametrize("limit", ["MAX_FLOP", "MAX_BYTES", "MAX_OPS"])
def test_beyond_its_limits_a_value_is_assumed(
    limit: str, module: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(realdata, limit, 3)
    graph = rt.trace(module(branch_on_weights), X)
    assert [(a.kind, a.value) for a in graph.assumptions] == [("branch", False)]


def test_a_loop_does_not_start_from_the_beginning(
    module: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        for _ in range(20):
            x = self.lin(x) / 2
            if x.norm() > 1e9:
                break
        return x

    ran: list[str] = []
    original = ops.run_on_cpu

    def counting(name: str, *args: Any) -> Any:
        ran.append(name)
        return original(name, *args)

    monkeypatch.setattr(ops, "run_on_cpu", counting)
    rt.trace(module(forward), X, repeats=False)
    assert ran.count("aten.addmm") == 20


# -- checks that only raise ------------------------------------------------------------------------


def test_argument_checks_on_meta_are_passed() -> None:
    class Actor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            y = self.lin(x)
            checked = {"validate_args": True}  # some libraries switch the checks off
            made = [torch.distributions.Normal(y + i, y.exp(), **checked) for i in range(10)]
            beta = torch.distributions.Beta(y.exp(), y.exp(), **checked)
            return sum(d.log_prob(x).sum() for d in (*made, beta))

    graph = rt.trace(Actor().to("meta"), torch.empty(4, 8, device="meta"))
    assert sum(op.name == "aten.addmm" for op in graph.ops) == 1
    # That numbers are real is a test for nan; that they are positive is a branch.
    made = {(a.kind, a.value) for a in graph.assumptions}
    assert made == {("branch", True), ("finite", True)}


@pytest.mark.parametrize(("refuse", "attempts"), [("raise ValueError", 1), ("refuse", 12 + 1)])
def test_many_checks_take_one_attempt_each_or_are_foreseen(refuse: str, attempts: int) -> None:
    calls: list[int] = []

    def refused(number: int) -> None:
        if number >= 0:  # so that it is not foreseen
            raise ValueError(number)

    source = "def forward(self, x):\n    calls.append(0)\n    y = self.lin(x)\n"
    source += "".join(f"    if not y.sum() > {i}: {refuse}({i})\n" for i in range(12))
    scope: dict[str, Any] = {"calls": calls, "refuse": refused}
    exec(compile(source + "    return y\n", "checks.py", "exec"), scope)

    class Checked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)

        forward = scope["forward"]

    rt.trace(Checked().to("meta"), torch.empty(4, 8, device="meta"))
    assert len(calls) == attempts


def test_an_error_names_what_would_help(module: Made) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        if self.lin(x).sum() > 0:
            raise KeyError("one way")
        raise ValueError("the other")

    message = r"--assume branch@0=true"
    with pytest.raises(rt.types.TraceError, match=message):
        rt.trace(nn.Sequential(module(forward)).to("meta"), torch.empty(4, 8, device="meta"))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_loss_that_matches_with_scipy_traces(device: str) -> None:
    optimize = pytest.importorskip("scipy.optimize")

    class Matcher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x: Tensor, target: Tensor) -> Any:
            y = self.lin(x)
            cost = torch.cdist(y, target).cpu()
            rows, columns = optimize.linear_sum_assignment(cost)
            rows, columns = torch.as_tensor(rows), torch.as_tensor(columns)
            return nn.functional.l1_loss(y[rows], target[columns])

    module, target = Matcher(), torch.randn(3, 8)
    graph = rt.trace(module.to(device), X, target, phase="training", optimizer="none")
    products = [op.name for op in graph.ops if op.name in ("aten.addmm", "aten.mm")]
    assert products == ["aten.addmm", "aten.mm"]
    assert bool([a for a in graph.assumptions if a.kind == "value"]) == (device == "meta")


# -- behind a backward, and tests for inf and nan --------------------------------------------------


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.view(2, 3, 2, 4).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return nn.functional.scaled_dot_product_attention(q, k, v)


class Recurs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]  # type: ignore[no-any-return]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)  # type: ignore[no-any-return]


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    """A step of the optimizer, if the gradients are finite."""
    model(x).square().sum().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if torch.isfinite(norm):
        optimizer.step()


@pytest.mark.parametrize("made", [Attends, Recurs, Normed])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_gradients_are_finite(made: Callable[[], nn.Module], device: str) -> None:
    model = made().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    graph = rt.trace(clipped, model, optimizer, torch.randn(2, 3, 8, device=device))
    assert [op for op in graph.ops if op.target.startswith("aten.addcdiv_")]
    assert [a.kind for a in graph.assumptions] == ([] if device == "cpu" else ["finite"])


@pytest.mark.parametrize(
    ("condition", "runs"),
    [
        (lambda x: x.isfinite().all(), True),
        (lambda x: ~(x.isnan().any() | x.isinf().any()), True),
        (lambda x: torch.isnan(x).any() or torch.isinf(x).any(), False),
        (lambda x: (x == x).all() and not (x.abs() == math.inf).any(), True),
    ],
)
def test_tests_for_inf_and_nan_say_that_numbers_are_finite(condition: Any, runs: bool) -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            x = self.lin(x)
            return self.lin(x) if condition(x) else x

    graph = rt.trace(Module().to("meta"), torch.empty(6, 8, device="meta"))
    assert sum(op.name == "aten.addmm" for op in graph.ops) == 1 + runs
    assert {a.kind for a in graph.assumptions} == {"finite"}


def test_finite_rows_are_all_rows() -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            y = self.lin(x)
            return self.lin(y[y.isfinite().all(-1)])

    graph = rt.trace(Module().to("meta"), torch.empty(6, 8, device="meta"))
    assert rt.estimate(graph, chip="h100-sxm").flops_matrix == 2 * 2 * 6 * 8 * 8


def test_a_distribution_that_a_module_holds_meets_meta_tensors() -> None:
    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)
            self.base = torch.distributions.MultivariateNormal(torch.zeros(8), torch.eye(8))

        def forward(self, x: Tensor) -> Tensor:
            return -self.base.log_prob(self.lin(x)).mean()

    graph = rt.trace(Flow(), X, phase="training", optimizer="none")
    assert sum(op.name == "aten.linalg_solve_triangular" for op in graph.ops) == 2


@pytest.mark.parametrize("known", [True, False])
def test_attention_says_that_it_takes_sequences_for_equally_long(known: bool) -> None:
    lengths = (5, 9, 3)

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x: Tensor, offsets: Tensor) -> Any:
            q, k, v = (t.unflatten(-1, (2, 4)) for t in self.qkv(x).chunk(3, -1))
            longest = max(lengths)
            found = torch.ops.aten._flash_attention_forward(
                q, k, v, offsets, offsets, longest, longest, 0.0, False, False
            )
            return found[0]

    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    graph = rt.trace(
        Packed(), torch.randn(sum(lengths), 8), offsets if known else offsets.to("meta")
    )
    assert bool([a for a in graph.assumptions if a.kind == "lengths"]) is not known
