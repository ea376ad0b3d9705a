"""Sixteen commits and more: the cause of each is named, with the line; others change nothing."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace.diffs.costs.causes import _updates
from rooftrace.diffs.costs.changes import PhaseDiff
from rooftrace.diffs.costs.differences import diff_estimates
from rooftrace.diffs.costs.sides import Sides
from tests.conftest import in_turn
from tests.costmodels.diff_cases import CASES, UNCHANGED, Case

CHIP = "h100-sxm"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of all revisions: the base is traced once for each phase."""
    return tmp_path_factory.mktemp("revisions")


@cache
def priced(target: str, phase: str):
    graphs = rt.tools.trace_target(target, phases=[phase])
    return [
        {name: rt.estimate(graph, CHIP, execution) for name, graph in graphs.items()}
        for execution in ("efficient", "eager")
    ]


def compared(case: Case, folder, phase: str | None = None) -> tuple[PhaseDiff, PhaseDiff, str]:
    """The difference of a case, that of the way back, and the line that changed."""
    before, after, line = case.write(folder)
    one, two = (priced(target, phase or case.phase) for target in (before, after))
    there = diff_estimates(one[0], two[0], eager=(one[1], two[1]))
    back = diff_estimates(two[0], one[0], eager=(two[1], one[1]))
    return there.phases[0], back.phases[0], line


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_cause_of_a_commit(case: Case, folder):
    there, back, line = compared(case, folder)
    first = there.rows[0]
    assert [words for words in case.says if words not in first.cause] == [], first.cause
    assert first.line == line
    assert first.modules[0] == case.module
    # One row matters; whatever else is there is small.
    assert all(abs(row.time.delta) <= 0.1 * abs(first.time.delta) for row in there.rows[1:])
    for name in ("time", "bytes", "flops", "kernels"):
        total = there.totals[name]
        rows = sum(getattr(row, name).delta for row in there.rows)
        assert rows == pytest.approx(total.delta, abs=1e-9 * abs(total.before))
        assert back.totals[name].delta == -total.delta
    assert [row.time.delta for row in back.rows] == [-row.time.delta for row in there.rows]
    assert sum(h.bytes.delta for h in there.held) == there.totals["memory"].delta


@pytest.mark.parametrize(("name", "phase"), in_turn(UNCHANGED, ["forward", "training"]))
def test_a_commit_that_keeps_every_op_changes_nothing(name: str, phase: str, folder):
    there, back, _ = compared(Case(name, UNCHANGED[name], (), ""), folder, phase)
    for found in (there, back):
        assert found.rows == () and found.modules == () and found.held == ()
        assert all(not change.delta for change in found.totals.values())


def test_only_memory_differs_where_a_list_of_layers_becomes_a_sequential(folder):
    """The caller of a Sequential still holds what it passed, so one more tensor is alive."""
    edits = (
        (
            "nn.ModuleList(Layer() for _ in range(LAYERS))",
            "nn.Sequential(*map(lambda _: Layer(), range(LAYERS)))",
        ),
        (
            "        for layer in self.layers:\n            x = layer(x)\n",
            "        x = self.layers(x)\n",
        ),
    )
    there, _, _ = compared(Case("sequential", edits, (), ""), folder)
    assert there.rows == ()
    (held,) = there.held
    assert held.bytes.delta == there.totals["memory"].delta == 2 * 512 * 256 * 2
    assert held.held.op == "aten.add"


HEAD = "        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)\n"
TIED = ((HEAD, HEAD + "        self.head.weight = self.embed.weight\n"),)
FUSED = (
    ("self.q = nn.Linear(WIDTH, WIDTH", "self.qkv = nn.Linear(WIDTH, 3 * WIDTH"),
    ("        self.k = nn.Linear(WIDTH, KV_HEADS * head, bias=False)\n", ""),
    ("        self.v = nn.Linear(WIDTH, KV_HEADS * head, bias=False)\n", ""),
    ("        q = self.q(x)", "        q, k, v = self.qkv(x).chunk(3, -1)\n        q = q"),
    ("k = self.k(x)", "k = k"),
    ("v = self.v(x)", "v = v"),
)


@pytest.mark.parametrize(
    ("edits", "there_says", "back_says"),
    [
        (TIED, "head.weight is embed.weight now", "head.weight is a parameter of its own, no lon"),
        (FUSED, "", ""),
    ],
    ids=["tied", "fused qkv"],
)
def test_parameters_are_tied_where_kernels_share_one(edits, there_says, back_says, folder):
    """And not where the update of all parameters has fewer of them, so that others face."""
    there, back, _ = compared(Case("tied", edits, (), ""), folder, "training")
    for found, says in ((there, there_says), (back, back_says)):
        words = [row.cause for row in found.rows if "one parameter" in row.cause]
        words += [row.cause for row in found.rows if "of its own" in row.cause]
        assert [says in cause for cause in words] == [True] * bool(says), words


def test_an_update_names_parameters_and_no_result_of_it():
    def step(groups):
        layer = nn.Conv1d(8, 8, 3, padding=1, groups=groups)
        return rt.estimate(rt.trace(layer, torch.ones(2, 8, 4), phase="training"), CHIP)

    told = _updates(Sides(step(8), step(1)))
    assert told == ["the update of weight fp32[8, 1, 3] -> [8, 8, 3]"]


def test_a_guard_that_reads_a_value_is_a_synchronisation(folder):
    guard = "        if x.isnan().any().item():  # here\n            raise ValueError('nan')\n"
    edits = (("        gate = F.silu", guard + "        gate = F.silu"),)
    there, back, line = compared(Case("guard", edits, (), ""), folder)
    for found, sign in ((there, "+"), (back, "-")):
        waiting = found.rows[-1]
        assert waiting.cause.endswith(f"for the host; {sign}synchronisation by item() x4")
        assert (waiting.line, waiting.where) == (line, "layers.*.mlp x4")
