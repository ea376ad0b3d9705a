"""Scripts as targets of every command."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rooftrace as rt
from rooftrace.diffs.git import repositories
from rooftrace.errors import RequestError, TargetError
from rooftrace.measured.alignment.pairing import template_of
from rooftrace.reporting.cli import main
from rooftrace.reporting.cli.diff_command import _targets
from rooftrace.scripts.steps import ScriptError
from rooftrace.tracer import names
from rooftrace.tracer.names import ScriptCommand, is_script

pytestmark = pytest.mark.quick

if torch.cuda.is_available():
    pytest.skip("a GPU answers for itself", allow_module_level=True)

SCRIPT = """
import sys
import torch
from torch import nn

width = int(sys.argv[1]) if len(sys.argv) > 1 else 64
model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10)).cuda()
opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
print("printed by the script")
for step in range(10):
    model(torch.randn(32, 64).cuda()).square().mean().backward()
    opt.step()
    opt.zero_grad()
    torch.save({"step": step}, "left.pt")
with torch.no_grad():
    model(torch.randn(4, 64).cuda())
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


@pytest.mark.parametrize(
    ("target", "script"),
    [
        ("train.py", True),
        ("folder/train.py --x=1", True),
        ("run:torchrun train.py", True),
        ("run:-m package", True),
        ("train.py:build", False),
        ("package.module:attr", False),
        ("gpt2", False),
        ("hf:org/name.py", False),
        ("config.json", False),
        ("it's train.py", False),
    ],
)
def test_a_script_is_known_by_its_name(target: str, script: bool) -> None:
    assert is_script(target) is script


def test_options_stand_before_the_script() -> None:
    asked = ScriptCommand.of("run:--chip l4 --ranks=8 --rank 2 -- train.py --chip x")
    assert (asked.chip, asked.ranks, asked.rank) == ("l4", 8, 2)
    assert asked.words == ("train.py", "--chip", "x")
    assert names.where_of("run:torchrun --nproc_per_node=8 train.py") == "train.py"
    assert names.where_of("run:python -m package.train") == "package.train"


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("run:--rnks 8 train.py", "did you mean 'ranks'"),
        ("run:--ranks none train.py", "--ranks none: expected a whole number"),
        ("run:--chip", "--chip: expected a name"),
        ("run:", "expected a script"),
        ("run:'train.py", "No closing quotation"),
    ],
)
def test_a_wrong_command_is_told(target: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        ScriptCommand.of(target)


def test_a_report_has_the_steady_step(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["report", "train.py 128", "--chip", "l4", "--execution", "eager"])
    out, err = capsys.readouterr()
    assert "printed by the script" in err and "printed by the script" not in out
    assert "training batch 32, sgd" in out and "1 device" in out
    assert not (folder / "left.pt").exists()


def test_a_script_is_priced_on_the_device_that_it_sees() -> None:
    """Where the call names none; a system brings its chip."""
    names = [
        rt.estimate(target, phase="training", **named).chip.name
        for target, named in (
            ("run:--chip l4 train.py 64", {}),
            ("run:--system dgx-a100 train.py 64", {}),
            ("run:--chip l4 train.py 64", {"chip": "t4"}),
            ("train.py 64", {}),
        )
    ]
    assert names == ["l4", "a100-sxm-80", "t4", "h200-sxm"]


def test_two_settings_of_a_script_differ_by_what_they_cost() -> None:
    diff: Any = rt.diff("train.py 64", "train.py 128")
    (training,) = diff.phases
    params = training.totals["params"]
    assert (params.before, params.after) == (64 * 64 + 64 + 650, 64 * 128 + 128 + 1290)
    # forward, and backward to the weights of both layers and to the input of the second
    products = {w: 2 * 32 * (2 * 64 * w + 3 * w * 10) for w in (64, 128)}
    flops = training.totals["flops"]
    for width, made in ((64, flops.before), (128, flops.after)):
        assert products[width] <= made < 1.1 * products[width]


def test_sizes_and_wrong_phases_are_refused() -> None:
    with pytest.raises(RequestError, match="a script has its own sizes"):
        rt.report("train.py", chip="l4", batch=4)
    with pytest.raises(RequestError, match="no graph of phase 'decode'; it holds training"):
        rt.report("train.py", chip="l4", phase="decode")


def test_what_fails_says_where(folder: Path) -> None:
    (folder / "nothing.py").write_text("print('no')")
    with pytest.raises(TargetError, match=r"name that: nothing\.py:NAME"):
        rt.report("nothing.py", chip="l4")
    (folder / "bad.py").write_text("1 / 0")
    with pytest.raises(ScriptError, match=r"bad\.py:1: ZeroDivisionError"):
        rt.report("bad.py", chip="l4")


def test_all_that_follows_a_script_beside_revisions_is_its_own() -> None:
    assert _targets(["train.py", "--width", "a b"], "HEAD") == (
        ("train.py --width 'a b'", None),
        ["HEAD"],
    )


def test_a_name_in_a_file_runs_no_script() -> None:
    with pytest.raises(RequestError, match="is a script"):
        template_of("models/{target}").filled({"target": "train.py"})
    assert template_of("train.py --batch {batch}").filled({"batch": 8}) == "train.py --batch 8"


def test_a_checkout_is_led_to_what_git_ignores(folder: Path) -> None:
    (folder / "repository" / "data").mkdir(parents=True)
    (folder / "repository" / "data" / "x.bin").write_bytes(b"1")
    (folder / "checkout" / "kept").mkdir(parents=True)
    repository: Any = SimpleNamespace(
        root=str(folder / "repository"), ignored=("data/", "kept/", "deep/er/x.bin")
    )
    repositories.link_ignored(repository, str(folder / "checkout"))
    assert (folder / "checkout" / "data" / "x.bin").read_bytes() == b"1"
    assert not (folder / "checkout" / "kept").is_symlink()


@pytest.mark.parametrize("words", [("run",), ("report", "--chip", "l4"), ("diff", "bad.py")])
def test_all_calls_that_led_to_an_error_are_printed_where_asked(
    folder: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "bad.py").write_text("def half(x):\n    return x / 0\nhalf(1)\n")
    with pytest.raises(SystemExit, match="2"):
        main([*words, "bad.py"])
    plain = capsys.readouterr().err
    assert "bad.py:2: ZeroDivisionError" in plain and "Traceback" not in plain
    with pytest.raises(SystemExit, match="2"):
        main([words[0], "--traceback", *words[1:], "bad.py"])
    said = capsys.readouterr().err
    assert said.endswith(plain) and "in the process of the script:\nTraceback" in said
    assert 'bad.py", line 3, in <module>' in said
