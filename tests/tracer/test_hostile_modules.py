"""Modules and mappings of users whose methods raise where nobody needs them, or that are false."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rooftrace as rt
from rooftrace.costmodels.ops import MATRIX
from tests.tracer.script_oracle import DENSE, matrix_flops, training

HOSTILE = '''
import torch
from torch import nn

class Hostile(nn.Module):
    """Nothing but its forward may be used."""
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
    def forward(self, x):
        return self.inner(x)
    def refuse(self, *args):
        raise RuntimeError("this module is not to be asked")
    __len__ = __bool__ = __eq__ = __contains__ = __iter__ = refuse
    __hash__ = nn.Module.__hash__
    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):
                raise
            raise RuntimeError(f"{name}: this module is not to be asked") from None

class Several(nn.Linear):
    """Equal to nothing and to everything: a comparison has an answer for each row."""
    def __init__(self):
        super().__init__(8, 8)
    def __eq__(self, other):
        return torch.ones(2, device="cpu")
    __hash__ = nn.Module.__hash__

class Empty(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)
    def __len__(self):
        return 0

class Mapping(dict):
    def refuse(self, *args):
        raise RuntimeError("this mapping is not to be asked")
    __bool__ = __eq__ = refuse

class Returns(Hostile):
    def forward(self, x):
        return Mapping(out=self.inner(x))

class Holds(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part, self.nothing = part(), nn.Sequential()
        self.none, self.rest = nn.ModuleList(), nn.ModuleDict()
    def forward(self, x):
        return self.nothing(self.part(x))

KINDS = {
    "hostile": Hostile, "several": Several, "empty": Empty, "returns": Returns,
    "in": lambda: Holds(Hostile), "several in": lambda: Holds(Several),
    "empty in": lambda: Holds(Empty),
    "behind": lambda: nn.Sequential(nn.Sequential(), Hostile()),
}
'''
_made: dict[str, Any] = {}
exec(HOSTILE, _made)
KINDS: dict[str, Callable[[], nn.Module]] = _made["KINDS"]
PRODUCT = 2 * 4 * 8 * 8


def _products(graph: rt.types.OpGraph) -> int:
    return rt.estimate(graph, chip="l4").plan.total.flops(MATRIX, DENSE)


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_is_traced_without_asking_it_for_more(kind: str) -> None:
    x = torch.ones(4, 8)
    assert _products(rt.trace(KINDS[kind](), x)) == PRODUCT
    module = KINDS[kind]()

    def step() -> None:
        out: Any = module(x)
        (out if isinstance(out, Tensor) else out["out"]).sum().backward()

    assert _products(rt.trace(step)) == 2 * PRODUCT  # the input needs no gradient


@pytest.mark.slow
def test_a_report_and_a_script_have_such_modules_too(tmp_path: Path) -> None:
    rt.report(KINDS["in"](), torch.ones(4, 8), chip="l4", out=tmp_path / "report")
    if torch.cuda.is_available():
        pytest.skip("a GPU answers for itself")
    script = tmp_path / "train.py"
    script.write_text(
        HOSTILE
        + """
parts = [make() for name, make in KINDS.items() if name != "returns"]
model = nn.Sequential(*parts, Returns()).to(device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    model(torch.ones(4, 8, device="cuda"))["out"].sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    )
    steps = training(rt.run([str(script)], chip="l4", steps=None))
    assert sum(row.turns for row in steps) == 5
    products = 3 * len(KINDS) - 1  # the input needs no gradient
    assert {matrix_flops(row) for row in steps} == {products * PRODUCT}
