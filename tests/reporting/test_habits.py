"""What users of torchinfo, fvcore and FlopCounterMode type, beside those tools and plain hooks."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import rooftrace as rt
from rooftrace.costmodels.estimates.moduletree import module_tree


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    """Token ids to logits; the head shares its weight with the embedding."""

    def __init__(self, layers: int = 4, width: int = 8) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, width)
        self.layers = nn.ModuleList([Block(width) for _ in range(layers)])
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def vision() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU()),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, (3, 1), groups=2),
        nn.Flatten(),
        nn.Linear(16 * 5 * 7, 4),
    )


IDS = torch.zeros(2, 5, dtype=torch.long)
IMAGES = torch.ones(2, 3, 32, 32)
CASES: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "text": (Net, IDS),
    "images": (vision, IMAGES),
    "encoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0),
            3,
            enable_nested_tensor=False,
        ),
        torch.ones(2, 5, 8),
    ),
}


def shapes_by_hooks(model: nn.Module, x: Tensor) -> dict[str, tuple[Any, Any]]:
    """What each module really gets and returns, by its path."""
    seen: dict[str, tuple[Any, Any]] = {}
    for path, part in model.named_modules():

        def hook(_: Any, args: Any, output: Any, path: str = path) -> None:
            first = output[0] if isinstance(output, tuple) else output
            seen[path] = tuple(args[0].shape), tuple(first.shape)

        part.register_forward_hook(hook)
    model(x)
    return seen


@pytest.mark.parametrize("name", CASES)
def test_shapes_are_those_that_hooks_see(name: str) -> None:
    make, x = CASES[name]
    root = module_tree(rt.estimate(make(), x, execution="eager"), fold=False)
    ours = {node.path: node for node in root.walk()}
    real = shapes_by_hooks(make().eval() if name == "encoder" else make(), x)
    # The fast path of an encoder in eval mode calls none of the modules inside.
    for path, (before, after) in real.items():
        node = ours[path]
        if not node.flops and not node.bytes:
            continue  # a dropout of 0 runs no op
        assert node.input is not None and node.output is not None, path
        if not path.endswith("self_attn"):  # called by keywords; it returns (output, None)
            assert node.input.shape == before, path
        assert node.output.shape == after, path


@pytest.mark.parametrize("name", CASES)
def test_parameters_and_multiply_adds_of_every_module_are_those_of_the_tools(name: str) -> None:
    make, x = CASES[name]
    model = make()
    result = rt.summary(model, input_data=x, depth=9)
    nodes = {node.path: node for node in module_tree(result, fold=False).walk()}
    for path, part in model.named_modules():
        assert nodes[path].kind == type(part).__name__
        if path != "head":  # its weight stands with the embedding
            assert nodes[path].params == sum(p.numel() for p in part.parameters()), path
    assert result.total_params == sum(p.numel() for p in model.parameters())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.train()(x)
    theirs = counter.get_flop_counts()
    for path in nodes:
        key = ".".join(filter(None, (type(model).__name__, path)))
        counts = {str(op): flops for op, flops in theirs.get(key, {}).items()}
        if counts and name != "encoder":  # the CPU's attention is no op that torch counts
            assert 2 * nodes[path].macs == sum(counts.values()), path


def test_multiply_adds_are_those_of_fvcore() -> None:
    fvcore = pytest.importorskip("fvcore.nn")
    model = vision().eval()
    analysis = fvcore.FlopCountAnalysis(model, IMAGES)
    analysis.unsupported_ops_warnings(False)
    result = rt.summary(model, IMAGES.shape)
    norm = analysis.by_operator()["batch_norm"]  # fvcore counts it, and it is no product
    assert result.total_mult_adds == analysis.total() - norm
    by_module = analysis.by_module()
    nodes = {node.path: node for node in module_tree(result, fold=False).walk()}
    for path in ("0.0", "2", "4"):
        assert nodes[path].macs == by_module[path]


def test_equal_modules_stand_once_and_sums_add_up() -> None:
    result = rt.summary(Net(layers=4), input_data=IDS)
    (layers,) = [node for node in result.tree.children if node.name == "layers"]
    (block,) = layers.children
    assert (block.name, block.count, block.kind) == ("0-3", 4, "Block")
    assert [child.count for child in block.children] == [4, 4, 4]
    flat = module_tree(result, fold=False)
    for node in result.tree.walk():
        children = sum(child.flops for child in node.children)
        assert node.flops >= children and node.macs >= sum(c.macs for c in node.children)
    assert result.tree.flops == flat.flops == result.flops
    assert result.tree.macs == flat.macs == result.macs
    assert result.tree.bytes == result.bytes_hbm
    assert result.tree.seconds == pytest.approx(result.times.t_serial, rel=1e-6)


def test_a_deep_tree_keeps_its_names_and_says_which_buffers_it_counts() -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a_rather_long_name_of_a_projection = nn.Linear(8, 8)
            self.register_buffer("correction", torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return self.a_rather_long_name_of_a_projection(x) + self.correction

    model = nn.Sequential(*[nn.Sequential(Gate()) for _ in range(12)])
    text = str(rt.summary(rt.trace(model, torch.ones(1000, 2000, 8))))
    assert "a_rather_long_name_of_a_projection x12" in text
    assert max(map(len, text.splitlines())) <= 100
    assert "96 numbers in buffers count as parameters above" in text  # 12 of 8
    assert "buffers" not in str(rt.summary(model, (2, 8)))


def test_siblings_that_differ_stand_apart() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    names = [(node.name, node.count) for node in rt.summary(model, (2, 8)).tree.children]
    assert names == [("0,2", 2), ("1,3", 2), ("4", 1)]


def test_the_tree_is_printed_with_its_columns() -> None:
    model = vision()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    names = ("output_size", "num_params", "kernel_size", "mult_adds", "trainable")
    result = rt.summary(model, (2, 3, 32, 32), col_names=names, depth=1)
    text = str(result)
    assert re.search(r"├─ 0 \(Sequential\) +\[2, 8, 15, 15\] +240 +– +[\d,]+ +False", text)
    assert re.search(r"├─ 2 \(Conv2d\) +\[2, 16, 5, 7\] +208 +\[3, 1\] +[\d,]+ +True", text)
    assert re.search(r"Sequential +\[2, 4\] +\S+ +– +[\d,]+ +Partial", text)
    assert "(Conv2d)" not in text.partition("├─ 1")[0]  # deeper than 1
    assert f"{result.trainable_params:,} of them trainable" in text
    assert "time        expected" in text
    assert str(result.estimate).startswith("Sequential, 2.69 K parameters")
    assert isinstance(result, rt.types.Estimate) and result.t_est == result.estimate.t_est


def test_dtypes_and_several_inputs() -> None:
    class Two(nn.Module):
        def forward(self, ids: Tensor, x: Tensor) -> Tensor:
            return F.one_hot(ids, 8).to(x.dtype) @ x

    shapes = rt.summary(Two(), [(4,), (8, 3)], dtypes=[torch.long, "fp16"], col_names=["flops"])
    first, second = (shapes.graph.values[index] for index in shapes.graph.inputs)
    assert (first.dtype, first.shape, second.dtype, second.shape) == ("int64", (4,), "fp16", (8, 3))
    ids = rt.summary(Net(), (2, 5), dtypes=torch.long)
    assert ids.flops == rt.estimate(Net(), IDS, execution="eager").flops


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rt.summary(Net(), (2, 5), col_names=("mult_add",)), "did you mean 'mult_adds'"),
        (lambda: rt.summary(Net(), (2, 5), col_names="flops"), r"for example \('flops',\)"),
        (lambda: rt.summary(Net(), (2, 5), dtypes=["int65"]), "'int65' has no torch dtype"),
        (lambda: rt.summary(Net(), (2, 5), dtypes=[3]), "expected torch.float16 .* got 3"),
        (lambda: rt.summary(Net(), (2, 5), dtypes=["int64"] * 2), "dtypes: 2 for 1 inputs"),
        (lambda: rt.summary(Net(), "2,5"), r"input_size='2,5': expected a shape"),
        (lambda: rt.summary(Net(), (2, 5), depth=-1), "depth=-1: expected a whole number"),
        (lambda: rt.summary(Net()), "give either input_size"),
        (lambda: rt.summary(Net(), input_data=IDS, dtypes="int64"), "that input_size= makes"),
        (lambda: rt.summary(Net(), (2, 5), verbose=0), r"summary\(verbose=0\): no such argument"),
        (lambda: rt.tools.flop_count_table(rt.estimate(Net(), IDS), IDS), "leave arguments out"),
    ],
)
def test_a_mistake_is_quoted(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(rt.types.RequestError, match=message):
        call()


def test_a_table_of_flops() -> None:
    estimate = rt.estimate(Net(), IDS)
    lines = rt.tools.flop_count_table(estimate, max_depth=1).splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert rows[0] == ["module", "parameters", "FLOP", "mult-adds"]
    table = {row[0]: row[1:] for row in rows[2:]}
    assert list(table) == ["Net", "emb", "layers", "unused", "head"]
    products = 2 * 5 * (4 * 2 * 8 * 16 + 8 * 11)  # rows x (up and down of 4 layers, the head)
    assert table["Net"][2] == f"{products:,}"
    assert rt.tools.flop_count_table(Net(), IDS, max_depth=1) == "\n".join(lines)
    assert "layers.0.up x4" in rt.tools.flop_count_table(rt.summary(Net(), input_data=IDS))


# -- breakdowns ------------------------------------------------------------------------------------


def test_breakdowns_are_mappings_that_add_up_to_the_estimate() -> None:
    estimate = rt.estimate(Net(), IDS, phase="training", chip="l4")
    for breakdown in (
        estimate.by_module(), estimate.by_operator(), estimate.by_family(), estimate.by_part(),
        estimate.by_pattern(), estimate.by_module(1),
    ):  # fmt: skip
        assert isinstance(breakdown, rt.types.Breakdown)
        assert list(breakdown) == [row.name for row in breakdown.values()]
        assert all(a.seconds >= b.seconds for a, b in itertools.pairwise(breakdown.values()))
        total = breakdown.total()
        assert (total.flops, total.bytes) == (estimate.total(), estimate.bytes_hbm)
        assert total.calls == estimate.kernels
        assert total.seconds == pytest.approx(estimate.times.t_serial)
        assert total.share == pytest.approx(1)
        first = next(iter(breakdown))
        assert breakdown[first] is breakdown[0] is breakdown.rows[0]
        assert breakdown[:2] == breakdown.rows[:2]
        assert breakdown[first]["t_device"] == breakdown[first].seconds  # as dicts had it
        assert dict(breakdown[first])["key"] == first
        assert "total" in str(breakdown)
    with pytest.raises(KeyError):
        estimate.by_family()["no such family"]
    with pytest.raises(KeyError):
        breakdown[0]["no such field"]


# -- capture ---------------------------------------------------------------------------------------


def my_step(model: nn.Module, batch: tuple[Tensor, Tensor], optimizer: Any) -> float:
    optimizer.zero_grad()
    x, y = batch
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Identities and values of weights, gradients and states."""
    parameters = [(id(p), p.detach().clone(), id(p.grad)) for p in model.parameters()]
    buffers = [(id(b), b.clone()) for b in model.buffers()]
    states = [
        (id(p), name, value.clone() if isinstance(value, Tensor) else value)
        for p, state in optimizer.state.items()
        for name, value in state.items()
    ]
    groups = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    attributes = [(type(part).__name__, *sorted(vars(part))) for part in model.modules()]
    return [parameters, buffers, states, groups, attributes]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_step_on_real_weights_is_captured_and_changes_nothing(
    kind: Any, steps_before: int
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = kind(model.parameters(), lr=1e-3)
    batch = torch.randn(32, 8), torch.zeros(32, dtype=torch.long)
    for _ in range(steps_before):
        my_step(model, batch, optimizer)
    before = everything(model, optimizer)
    with rt.capture(model) as c:
        my_step(model, batch, optimizer)
    assert same(everything(model, optimizer), before)
    traced = rt.trace(my_step, model, batch, optimizer)
    assert [(op.target, op.part) for op in c.graph.ops] == [
        (op.target, op.part) for op in traced.ops
    ]
    assert c.graph.phase == "training"
    assert rt.estimate(c.graph).flops == rt.estimate(traced).flops
    (x,) = c.graph.inputs
    assert c.graph.values[x].shape == (32, 8)
    assert c.graph.workload["batch"] == 32
    my_step(model, batch, optimizer)  # it still trains
    assert any(
        not torch.equal(p, old)
        for p, (_, old, _) in zip(model.parameters(), before[0], strict=True)
    )


def test_flops_of_a_capture_are_those_of_flop_counter_mode() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 900, 4))

    def step() -> None:
        model(IMAGES).sum().backward()

    with FlopCounterMode(display=False) as theirs:
        step()
    with rt.capture(model) as ours:
        step()
    assert ours.get_total_flops() == theirs.get_total_flops()
    expected = {
        place: {str(op): flops for op, flops in counts.items()}
        for place, counts in theirs.get_flop_counts().items()
    }
    counts = ours.get_flop_counts()
    assert counts["Global"] == expected["Global"]
    for place in ("Sequential.0", "Sequential.3"):
        assert counts[place] == expected[place]
    assert "| 0 " in ours.get_table()
    assert repr(ours).startswith("Captured(OpGraph(Sequential, training")


def test_what_nothing_in_a_block_reads_is_its_result() -> None:
    model = nn.Linear(8, 4)
    with rt.capture(model) as c:
        model(torch.ones(2, 8))
    assert rt.estimate(c.graph).macs == 2 * 8 * 4  # not left out as a result that nobody reads


def test_a_block_that_fails_gives_the_weights_back() -> None:
    model = nn.Linear(8, 4)
    with pytest.raises(ZeroDivisionError), rt.capture(model):
        model(torch.ones(2, 8)).sum() / (1 // 0)
    assert model.weight.device.type == "cpu" and model(torch.ones(2, 8)).shape == (2, 4)


def test_a_lazy_module_says_to_be_called_first() -> None:
    with pytest.raises(rt.types.RequestError, match=r"UninitializedParameter.*call it once"):
        rt.capture(nn.LazyLinear(4)).__enter__()
