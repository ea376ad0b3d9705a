"""Attackers on the command line: whatever a command is given, it ends in a result or a message."""

from __future__ import annotations

import random
import time
from pathlib import Path

import click
import pytest

from rooftrace.reporting.cli import cli, main

MODEL = """
import torch

def build():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())

def function(x):
    return x

NUMBER = 7
"""
VALUES = (
    *("", ",", ",,", " ", "-", "--", "0", "-1", "1", "2", "nan", "inf", "1e400", "0x10", "1_000"),
    *("9" * 30, "9" * 400, "9" * 5000, "é", "\x1b[31m", "\u202e", "\udcff", "{}", "{0}", "%s"),
    *("a" * 5000, "[" * 3000, "forward", "forward,forward", "training,decode", "eager", "naive"),
    *("eager,eager", "l4", "l4,l4", "h200-sxm,l4", "fp8", "fp3", "bf16", "adamw", "none", "sgd"),
    *("input=2,8:fp32", "input=2,8", "input=", "=", "input=-1,8:fp32", "x=1:fp32"),
    *(f"input={'9' * 30},8:fp32", "input=3037000500,3037000500:fp32", "input=0,8:fp32"),
    *("input=2,8:fp99", "branch=true", "value=3", "value=", "density=7", "branch@*=maybe", "md"),
    *("json", "png,md", "docx", "terminal", "flopcounter", "fvcore", "t_est>5%", "t_est>", ">5%"),
    *("here.py:build", "here.py:function", "here.py:NUMBER", "here.py:missing", "here.py"),
    *("here:x", "here.py:", "missing.py:build", "json:loads", "hf:", "hf:a/b", "/", ".", ".."),
    *("folder", "broken.json", "deep.json", "empty", "missing/out", "folder/out", "/dev/null", "~"),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.py").write_text(MODEL)
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").write_text("")
    (tmp_path / "broken.json").write_text('{"schema": "rooftrace.graph/3", "graphs": {"a": ')
    (tmp_path / "deep.json").write_text("[" * 5000)
    return tmp_path


def arguments(rng: random.Random, command: click.Command) -> list[str]:
    """A call of a command: usual values for what it needs, and some that are not."""
    words: list[str] = []
    for option in command.params:
        if isinstance(option, click.Argument):
            usual = "here.py:build" if rng.random() < 0.7 else rng.choice(VALUES)
            words += [usual] * (1 if option.nargs == 1 else rng.randint(0, 2))
        elif option.required or rng.random() < 0.15:
            name = rng.choice([*option.opts, *option.secondary_opts])
            if getattr(option, "is_flag", False):
                words.append(name)
            else:
                words += [name, rng.choice(VALUES)]
    if rng.random() < 0.6 and any("--input" in option.opts for option in command.params):
        words += ["--input", "input=2,8:fp32"]
    return words


def commands() -> dict[str, tuple[list[str], click.Command]]:
    """Every command but `measure`, which runs for as long as it is told."""
    found: dict[str, tuple[list[str], click.Command]] = {}
    for name, command in cli.commands.items():
        if isinstance(command, click.Group):
            for inner, leaf in command.commands.items():
                found[f"{name} {inner}"] = [name, inner], leaf
        elif name != "measure":
            found[name] = [name], command
    return found


@pytest.mark.parametrize("name", commands())
def test_a_command_ends_in_a_result_or_in_one_message(
    name: str, folder: Path, fuzz_seconds: float, capfd: pytest.CaptureFixture[str]
) -> None:
    words, command = commands()[name]
    rng = random.Random(name)
    end = time.monotonic() + fuzz_seconds / len(commands())
    tried = 0
    while tried < 3 or time.monotonic() < end:
        call = [*words, *arguments(rng, command)]
        begin, tried = time.process_time(), tried + 1
        code: object = 0
        try:
            main(call)
        except SystemExit as stop:
            code = stop.code
        except BaseException as error:
            pytest.fail(f"{call!r:.300}: {type(error).__name__}: {error!s:.300}")
        out, err = capfd.readouterr()
        assert code in (None, 0, 1, 2), call
        assert code in (None, 0) or err.strip() or out.strip(), f"no message: {call!r:.300}"
        assert "Traceback" not in err or "--traceback" in call, call
        assert time.process_time() - begin < 60, call
        left = [path for path in folder.rglob(".rooftrace*")]
        assert not left, call
