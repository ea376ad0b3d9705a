"""Turns that differ in one length: formulas of it give what recording each of them gives."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import rooftrace as rt
from rooftrace.costmodels.estimates import ScriptCost

if torch.cuda.is_available():
    pytest.skip("a GPU answers for itself", allow_module_level=True)

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.seen = None

    def forward(self, tokens, tag=""):
        x = self.table(tokens)
        if tokens.size(1) > {branch}:
            x = x @ torch.ones(32, 32, device=x.device)
        scores = (x @ x.transpose(1, 2)).softmax(-1)
        {state}
        return self.out(scores @ x)
"""
SAMPLED = """
with torch.device("cuda"):  # weights whose values nobody knows
    net = Net().eval()
tokens = torch.zeros(1, 1, dtype=torch.long, device="cuda")
with torch.no_grad():
    for turn in range({turns}):
        logits = net(tokens, {tag})
        new = torch.multinomial(logits[:, -1].softmax(-1), 1)
        tokens = torch.cat([tokens, new], 1)
"""
PLAIN = "pass"


def sampled(
    folder: Path, turns: int, branch: int = 99, tag: str = "''", state: str = PLAIN
) -> ScriptCost:
    script = folder / "sample.py"
    source = MODEL.format(branch=branch, state=state) + SAMPLED.format(turns=turns, tag=tag)
    script.write_text(source)
    return rt.run([str(script)], chip="l4", steps=None)


def by_length(cost: ScriptCost) -> dict[int, tuple[object, ...]]:
    """The numbers of each row; the last turn goes on otherwise, to the end of the script."""
    rows = {row.stretch.shape[1]: row for row in cost.rows}
    del rows[max(rows)]
    return {
        length: (row.t_est, row.t_interval, row.flops, row.bytes_hbm, row.peak, row.kernels)
        for length, row in rows.items()
    }


@pytest.mark.slow  # a script twice, once with all of its turns recorded
def test_formulas_give_what_recording_every_length_gives(tmp_path: Path) -> None:
    turns, branch = 40, 21
    cost = sampled(tmp_path, turns, branch)
    every = sampled(tmp_path, turns, branch, tag="str(turn)")  # no call is like another
    stretches = cost.script.stretches
    assert sum(stretch.turns for stretch in stretches) == turns
    by_form = sum(stretch.by_form for stretch in stretches)
    assert by_form > turns / 3 and by_form + sum(s.run for s in stretches) == turns
    assert sum(stretch.run for stretch in every.script.stretches) == turns
    assert by_length(cost) == by_length(every)

    scope: dict[str, type[nn.Module]] = {}
    exec(MODEL.format(branch=branch, state=PLAIN), scope)
    real = scope["Net"]()
    for row in cost.rows:
        with FlopCounterMode(display=False) as counted:
            real(torch.zeros(row.stretch.shape, dtype=torch.long))
        products = sum(op.flops_torch or 0 for op in row.largest.graph.ops)
        assert products == counted.get_total_flops()


def test_a_length_at_which_the_module_runs_otherwise_is_found_or_said(tmp_path: Path) -> None:
    cost = sampled(tmp_path, 28, branch=26)
    (said,) = [text for kind, text in cost.script.said.items() if kind.startswith("lengths")]
    assert "lengths of 27 to 28 are counted as at other lengths, and run otherwise" in said


def test_a_call_that_changes_what_its_module_holds_runs(tmp_path: Path) -> None:
    keep = "self.seen = x if self.seen is None else torch.cat([self.seen, x], 1)"
    cost = sampled(tmp_path, 12, state=keep)
    assert [(stretch.turns, stretch.run) for stretch in cost.script.stretches] == [(1, 1)] * 12
