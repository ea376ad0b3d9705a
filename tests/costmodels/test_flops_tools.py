"""The tools that count a zoo twice, and compare with published figures."""

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from rooftrace.tracer.inputs.calls import call_inputs
from tests.releases import needs_torch

ROOT = Path(__file__).resolve().parents[2]
MODULES = ("counted", "zoo_flops", "torchvision_ops", "run", "models")

ZOO = """
import torch
from torch import nn

class Chosen(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(20, 8), nn.Linear(8, 4)

    def forward(self, ids, often=1):
        for _ in range(int(ids.max())):
            often = self.head(self.table(ids)) * often
        return often

def build(name):
    ids = torch.tensor([[1, 3, 2]]).to("meta")
    ids.__dict__["_value"] = torch.tensor([[1, 3, 2]])
    with torch.device("meta"):
        model = {"group/chosen": Chosen, "group/silent": nn.Identity}[name]()
    return model, [((), lambda: {"nothing": ids}), ((ids,), {})]
"""


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    for folder in ("benchmarks/flops", "benchmarks/zoo"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    yield importlib.import_module
    for name in MODULES:
        sys.modules.pop(name, None)


class Flex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> Any:
        query = self.project(x)
        return flex_attention(query, query, query)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        from torch.utils.checkpoint import checkpoint

        return checkpoint(self.layer, x, use_reentrant=False)


@pytest.mark.parametrize("phase", ["forward", "training"])
@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (lambda: nn.LSTM(16, 32, 2, bidirectional=True), (5, 3, 16)),
        (lambda: nn.GRU(16, 8), (5, 3, 16)),
        (lambda: nn.TransformerEncoderLayer(64, 4, batch_first=True), (2, 7, 64)),
        (lambda: nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.ConvTranspose2d(8, 4, 3)),
         (2, 4, 9, 9)),
        pytest.param(Flex, (2, 4, 32, 16), marks=needs_torch(2, 11, "a count of FlexAttention")),
        (Checkpointed, (2, 7, 32)),
    ],
)  # fmt: skip
def test_nothing_is_left_of_the_difference(
    module: Callable[[], nn.Module], shape: tuple[int, ...], phase: str, tool: Any
) -> None:
    built = module()
    found = tool("counted").compared(built, call_inputs(built, (torch.ones(shape),), {}), phase)
    assert found["torch"] > 0
    assert found["rest"] == 0
    assert not found["missing"]
    assert found["bytes"] == found["bytes_with_rule"]
    grouped = phase == "training" and isinstance(built, nn.Sequential)
    assert set(found["differs"]) == ({"aten.convolution_backward"} if grouped else set())


def test_a_wrong_count_is_seen(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second run is one of its own: it does not repeat what our rules say."""
    from rooftrace.costmodels.ops import opview
    from rooftrace.costmodels.ops.cost import Cost

    opview.find_rule("aten.mm.default")  # loads the rules
    half = opview.Rule(name="aten.addmm", price=lambda op: Cost.of(matmul=7), fusion="opaque")
    monkeypatch.setitem(opview.RULES, "aten.addmm", half)
    module = nn.Linear(8, 4)
    inputs = call_inputs(module, (torch.ones(2, 8),), {})
    found = tool("counted").compared(module, inputs, "forward")
    assert found["torch"] == 2 * 2 * 8 * 4
    assert found["differs"] == {"aten.addmm": [7, 2 * 2 * 8 * 4]}


@pytest.mark.slow
def test_a_zoo_of_its_own(tool: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "zoo.py").write_text(ZOO)
    (tmp_path / "dev.txt").write_text("group/chosen\ngroup/silent\n")
    out = tmp_path / "flops.jsonl"
    assert tool("zoo_flops").main(["--zoo", str(tmp_path), "--out", str(out)]) == 0
    rows = {r["name"].rpartition(":")[2]: r for r in map(json.loads, out.read_text().splitlines())}
    forward = rows["group/chosen"]["phases"]["forward"]
    assert forward["ours"] == forward["torch"] == 3 * (2 * 3 * 8 * 4)  # the largest id is 3
    assert rows["group/silent"]["phases"]["forward"]["torch"] == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "2 models, 3 steps, 3 of them run by torch too"
    assert shown[1] == "totals equal in 3, but for what is listed below"
    assert "bytes that stand on a rule: 100.000000 %" in "\n".join(shown)


@pytest.mark.slow
def test_published_figures(tool: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torchvision")
    table = tmp_path / "ops.csv"
    table.write_text(
        "file,weights,entry,ops_gmacs,num_params\n"
        "resnet.py,ResNet101_Weights,IMAGENET1K_V1,7.801,44549160\n"
        "resnet.py,ResNet152_Weights,IMAGENET1K_V1,7.801,60192808\n"
    )
    assert tool("torchvision_ops").main([str(table)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("ResNet152_Weights.IMAGENET1K_V1: 11.5")
    assert shown[-1] == "1 of 2 entries equal"
