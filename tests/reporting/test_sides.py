"""What differs from side to side of a diff: sizes, precisions, chips, execution, versions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace.costmodels.rewrites.rewrites import REWRITES
from rooftrace.errors import RequestError
from rooftrace.reporting.cli.diff_command import _targets
from rooftrace.reporting.commands.requests import sides_of
from tests.reporting.conftest import Run

WIDTH = 64
MODEL = f"""
import torch
def build():
    return torch.nn.Linear({WIDTH}, {WIDTH}), (torch.ones(1, {WIDTH}),)
"""


@pytest.fixture
def target(tmp_path: Path) -> str:
    (tmp_path / "m.py").write_text(MODEL)
    return f"{tmp_path}/m.py:build"


def flops(change: rt.types.Diff) -> tuple[float, float]:
    total = change.phases[0].totals["flops"]
    return total.before, total.after


def test_one_target_with_an_option_that_differs(target: str, run: Run) -> None:
    change = rt.diff(target, before={"batch": 2}, after={"batch": 8}, phases=["forward"])
    row = 2 * WIDTH * WIDTH + WIDTH  # a product, and the bias
    assert flops(change) == (2 * row, 8 * row)
    assert change.names == ("batch=2", "batch=8")
    shared = rt.diff(target, batch=4, after={"batch": 8}, phases=["forward"])
    assert flops(shared) == (4 * row, 8 * row) and shared.names == ("batch=4", "batch=8")
    ran = run("diff", target, "--batch", "4", "--after", "batch=8", "--phase", "forward")
    assert ran.code == 0 and "batch=4 -> batch=8" in ran.out
    ran = run("diff", target, "--after", "dtype=fp8", "--phase", "forward", "--format", "json")
    assert '"dtype": "fp8"' in ran.out


def test_sides_on_two_chips_under_two_execution_models(target: str) -> None:
    change = rt.diff(
        target,
        chip="a100-sxm-80",
        before={"execution": "eager", "knobs": "none"},
        after={"chip": "h100-sxm"},
        phases=["forward"],
    )
    assert change.chips == ("a100-sxm-80", "h100-sxm")
    assert change.executions == ("eager", "efficient")
    alone = [
        rt.estimate(
            target, chip="a100-sxm-80", execution=rt.tools.execution_model("eager", knobs=None)
        ),
        rt.estimate(target, chip="h100-sxm"),
    ]
    time = change.phases[0].totals["time"]
    assert (time.before, time.after) == tuple(estimate.t_est for estimate in alone)
    assert change.origins.before.options == {
        "execution": "eager",
        "knobs": "none",
        "chip": "a100-sxm-80",
    }


def test_a_named_rewrite_is_of_one_side() -> None:
    name = REWRITES[0].name
    sources, asked = ("gpt2", "gpt2"), {"execution": "compiled"}
    before, after = sides_of(rt.diff, sources, (), asked, ({"rewrites": (name,)}, {}), None)
    assert before.model.rewrites == (name,)
    assert after.model.rewrites == ()


def test_other_releases_of_torch_are_said() -> None:
    with torch.device("meta"):
        graph = rt.trace(nn.Linear(8, 8), torch.ones(2, 8))
    versions = {**graph.provenance["versions"], "torch": "1.0"}
    old = replace(graph, provenance={**graph.provenance, "versions": versions})
    change = rt.diff(old, graph)
    assert change.unchanged and f"torch 1.0 -> {graph.provenance['versions']['torch']}" in str(
        change
    )
    assert "torch" not in str(rt.diff(graph, graph))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "one target alone"),
        ({"after": {"bacth": 8}}, "after: 'bacth' cannot differ.*did you mean 'batch'"),
        ({"after": {"phases": ["forward"]}}, "after: 'phases' cannot differ"),
        ({"before": "t.py:build"}, "before='t.py:build': expected options of that side by name"),
        ({"before": {"python": "/no/python"}}, "python of before: '/no/python': expected the path"),
        ({"git": ("a", "b", "c")}, "expected one revision or two"),
        ({"git": 3}, "git=3: expected one revision or two"),
        ({"after": {"batch": 8}, "bisect": "time>5%"}, "it looks through revisions"),
        ({"git": "main", "bisect": "time>5"}, "time>5"),
        ({"git": ("main", "x"), "after": {"batch": 2}, "bisect": "time>5%"}, "the same options"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused_before_anything_runs(
    target: str, asked: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        rt.diff(target, **asked)


def test_only_files_have_revisions() -> None:
    with torch.device("meta"):
        model, x = nn.Linear(8, 8), torch.ones(2, 8)
    with pytest.raises(RequestError, match="git of before: a module or a graph in memory"):
        rt.diff(model, model, x, git="main")
    with pytest.raises(RequestError, match="git of before: 'gpt2' is in no repository"):
        rt.diff("gpt2", git="main")


@pytest.mark.parametrize(
    ("words", "revision", "expected"),
    [
        (["m.py:f"], None, (("m.py:f", None), None)),
        (["m.py:f", "n.py:f"], None, (("m.py:f", "n.py:f"), None)),
        (["m.py:f"], "", (("m.py:f", None), True)),
        (["m.py:f"], "main", (("m.py:f", None), ["main"])),
        (["m.py:f", "v2"], "v1", (("m.py:f", None), ["v1", "v2"])),  # m.py:f --git v1 v2
        (["v2", "m.py:f"], "v1", (("m.py:f", None), ["v1", "v2"])),  # --git v1 v2 m.py:f
        ([], "m.py:f", (("m.py:f", None), True)),  # --git m.py:f
        (["gpt2", "v2"], "v1", (("gpt2", None), ["v1", "v2"])),
    ],
)
def test_the_second_revision_stands_among_the_words(
    words: list[str], revision: str | None, expected: object
) -> None:
    assert _targets(words, revision) == expected


def test_too_many_words_are_refused() -> None:
    for words, revision in (
        (["a", "b", "c"], None),
        (["m:f", "n:f"], ""),
        (["m:f", "b", "c"], "a"),
    ):
        with pytest.raises(click.UsageError, match="expected one"):
            _targets(words, revision)
