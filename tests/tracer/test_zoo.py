"""The zoo runner traces what it finds, and says what it could not, and why."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "zoo"

MODELS = """
import torch
from torch import nn

class Needy(nn.Module):
    def forward(self, x):
        raise ValueError("not these inputs")

def build_linear():
    return nn.Linear(8, 4), (torch.ones(2, 8),)

def build_needy():
    return Needy(), (torch.ones(2, 8),)

def build_nothing():
    raise OSError("no file")

def helper():
    return nn.Linear(8, 4)
"""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("run")
    for name in ("run", "models"):
        sys.modules.pop(name, None)


@pytest.mark.slow
def test_a_folder_of_models(run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "some.py").write_text(MODELS)
    assert run.main(["--zoo", str(tmp_path), "--out", str(tmp_path / "zoo.jsonl")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "zoo.jsonl").read_text().splitlines()]
    assert {row["name"].rpartition(":")[2]: row["failure"] for row in rows} == {
        "build_linear": "",
        "build_needy": "forward",
        "build_nothing": "build",
    }
    (linear,) = (row for row in rows if not row["failure"])
    assert linear["phases"]["forward"]["ops"] == 2  # transpose the weights, multiply
    assert linear["phases"]["training"]["assumptions"] == {"loss": 1}
    shown = capsys.readouterr().out.splitlines()
    assert shown[:2] == [
        "group         models  forward  decode  training  refused",
        "folder             3        1       0         1        0",
    ]
    assert "ops without a rule: none" in shown


@pytest.mark.slow
def test_heads_are_traced_in_training(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    some = ["--group", "heads", "--filter", "/(BertForNext|DPTForDepth|BeitForSemantic)"]
    assert run.main([*some, "--out", str(tmp_path / "zoo.jsonl")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "zoo.jsonl").read_text().splitlines()]
    assert {name for row in rows for name in row["phases"]} == {"training"}
    shown = capsys.readouterr().out.partition("heads: 3\n")[2].splitlines()[:3]
    assert sorted(line.split(None, 1)[1] for line in shown) == [
        "says what it needs",
        "traced with its loss",
        "traced, has no loss",
    ]


def test_a_group_that_there_is_not_is_refused(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(["--group", "keras"])
    assert "--group keras: expected some of hf, timm" in capsys.readouterr().err
