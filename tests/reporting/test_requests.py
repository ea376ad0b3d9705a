"""An argument is declared once: commands, calls, sides of a diff and locks take it from there."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest

import rooftrace as rt
from rooftrace.costmodels.fusion import TYPICAL, execution_model
from rooftrace.costmodels.rewrites import check_precisions
from rooftrace.reporting import signed
from rooftrace.reporting.cli import cli
from rooftrace.reporting.commands import calls
from rooftrace.reporting.commands.calls import CALLS
from rooftrace.reporting.commands.options import by_chip, options_of
from rooftrace.reporting.commands.pricing import (
    ExecutionOptions,
    LengthOptions,
    PrecisionOptions,
    PricingOptions,
    Workload,
)
from rooftrace.reporting.gates import lock as records, lockfile
from rooftrace.tracer import Job
from tests.reporting.conftest import Run
from tests.reporting.signatures import STUB, stub

PRICES = {
    "breaks", "diff", "explain", "lock", "report", "roofline", "sensitivity", "solve", "sweep",
    "validate",
}  # fmt: skip
"""Commands that price steps of a target; `run` prices those of a script."""
TARGET = """
import torch
def build():
    return torch.nn.Linear(64, 64), (torch.ones(8, 64),)
"""


@pytest.mark.parametrize("command", sorted(PRICES | {"run"}))
def test_a_command_that_prices_has_every_option_of_prices(command: str) -> None:
    there = {name for option in cli.commands[command].params for name in option.opts}
    missing = {each.spelled for each in options_of(ExecutionOptions)} - there
    assert not missing


@pytest.mark.parametrize("command", sorted(PRICES))
def test_a_command_that_traces_has_every_option_of_the_workload(command: str) -> None:
    there = {name for option in cli.commands[command].params for name in option.opts}
    for each in (*options_of(Workload), *options_of(PrecisionOptions)):
        assert set(each.spelled.split("/")[:1]) <= there, each.name


def test_no_option_has_two_meanings() -> None:
    """Of one name, an argument of several commands is read alike."""
    for name, command in cli.commands.items():
        assert isinstance(command, click.Command)
        own = {option.opts[-1]: option for option in command.params if name in PRICES}
        for each in options_of(ExecutionOptions):
            if own:
                assert own[each.spelled].name == each.name, (name, each.name)


def test_the_workload_is_what_a_job_is_asked() -> None:
    named = {each.name for each in (*fields(Workload), *fields(LengthOptions))}
    named |= {each.name for each in fields(PrecisionOptions)}
    of_python_alone = {"loss", "branches"}
    assert named - {"phases"} == {*Job.ARGUMENTS} - of_python_alone


def test_functions_show_all_that_they_take() -> None:
    functions = {name: getattr(signed, name) for name in signed.WHERE}
    for name, function in {**functions, "inventory": rt.inventory}.items():
        shown = inspect.signature(function).parameters
        options = {each.name for each in CALLS[name].options()}
        assert options <= {*shown, "over", "vary"}, name


def test_the_help_of_precisions_names_what_they_take() -> None:
    texts = {each.name: each.help for each in options_of(PrecisionOptions)}
    word = re.compile(r"\b(?:bf16|(?:mx|nv)?fp\d+|int\d\w*)\b")
    named = {name: word.findall(text) for name, text in texts.items()}
    assert {"fp32", "bf16", "fp8", "nvfp4"} <= {*named["dtype"]}
    assert {"int8", "int4", "int4_g128"} <= {*named["weights_dtype"]}
    for name in named["dtype"]:
        check_precisions(name, None, None)
    for name in named["weights_dtype"]:
        check_precisions(None, name, None)
    for name in named["kv_dtype"]:
        check_precisions(None, None, name)


TYPED: dict[str, Any] = {
    "phases": "training,decode", "batch": 3, "seq": 9, "kv": 11, "inputs": ["x=2,5:int64"],
    "settings": ["config.n_embd=64", "tied=true"], "mesh": "dp=2,tp=4", "checkpoint": "full",
    "plan": "transformers", "zero": 1,
    "schedule": "looped-bfs", "interleave": 2, "microbatches": 2,
    "optimizer": "adamw", "assume": ["branch=true"],
    "repeats": False, "torch": "2.8", "trust_remote_code": True, "dtype": "bf16",
    "weights_dtype": "fp8", "kv_dtype": "fp8", "system": "dgx-h100,dgx-a100", "knobs": "none",
    "rewrites": "last-logits", "tf32": True, "host": "desktop", "library": "vllm",
    "exchange": "deepep", "what_if": "stragglers=1",
}  # fmt: skip
"""Each option of a lock as it is typed, where it changes something."""


def test_a_lock_keeps_every_option_as_it_was_typed(tmp_path: Path) -> None:
    read = {
        each.name: each.value(TYPED[each.name])
        for record in (Workload, PrecisionOptions, ExecutionOptions)
        for each in options_of(record)
        if each.name not in ("chip", "execution")  # these stand with the costs of each step
    }
    prices = calls.stored({name: read[name] for name in calls.PRICED if name in read})
    asked = calls.stored({"target": "gpt2", **{name: read[name] for name in calls.ASKED}})
    assert {*prices, *asked} == {*TYPED, "target"}
    made = records.MadeFrom(rooftrace="0", torch="0", pricing=prices)
    target = records.LockedTarget(asked=asked, sources={"gpt2": "0"})
    lock = records.Lock(made_from=made, targets={"gpt2": target})
    lockfile.write_lock(tmp_path / "costs.lock", lock)
    assert lockfile.load_lock(tmp_path / "costs.lock") == lock


def test_what_is_asked_of_prices_changes_every_execution() -> None:
    asked = {
        "execution": ("eager", "naive"), "tf32": True, "exchange": "deepep", "knobs": None,
        "what_if": {"stragglers": 0.1}, "rewrites": ("last-logits",), "library": "trtllm",
        "settings": {"kv-append": "in-place", "config.n_layer": 2},
    }  # fmt: skip
    pricing, others = PricingOptions.parted(asked)
    assert others == {"settings": {"config.n_layer": 2}}
    for model in pricing.executions():
        assert (model.tf32, model.exchange, model.knobs) == (True, "deepep", None)
        assert (model.library, model.attention_kernels) == ("trtllm", "trtllm")
        assert (model.disturbances.stragglers, model.kv_append) == (0.1, "in-place")
        assert model.rewrites == ("last-logits",)
    assert PricingOptions().executions("eager") == [execution_model("eager")]
    assert PricingOptions().knobs == TYPICAL


WAYS: dict[str, tuple[str, ...]] = {
    "report": ("report", "t.py:build", "--phase", "forward", "--out", "-", "--format", "json"),
    "nodes": ("report", "t.py:build", "--table", "nodes", "--format", "json"),
    "census": ("report", "t.py:build", "--table", "census", "--format", "json"),
    "explain": ("explain", "t.py:build", "--format", "json"),
    "sensitivity": ("sensitivity", "t.py:build", "--format", "json"),
    "breaks": ("breaks", "t.py:build", "--format", "json"),
    "roofline": ("roofline", "t.py:build", "--phase", "forward", "--format", "json"),
    "sweep": ("sweep", "t.py:build", "--over", "batch=8,16", "--format", "json"),
    "solve": ("solve", "t.py:build", "--step", "1ms", "--over", "8,16", "--format", "json"),
    "diff": ("diff", "t.py:build", "--phase", "forward", "--after", "batch=16", "--format", "json"),
    "lock": ("lock", "t.py:build", "--phase", "forward", "-o", "-"),
}


@pytest.fixture
def here(one_folder: Path) -> Path:
    (one_folder / "t.py").write_text(TARGET)
    return one_folder


@pytest.mark.parametrize("command", WAYS)
def test_a_number_of_an_execution_is_felt_everywhere(command: str, here: Path, run: Run) -> None:
    """`--set` reaches the kernels of each command: a field that is added is there at once."""
    plain, changed = (run(*WAYS[command], *how) for how in ((), ("--set", "tf32=true")))
    assert plain.code == changed.code == 0, changed.err
    assert plain.out != changed.out


@pytest.mark.parametrize("command", WAYS)
def test_what_one_process_has_no_use_for_is_refused(command: str, here: Path, run: Run) -> None:
    ran = run(*WAYS[command], "--what-if", "stragglers=0.1")
    assert ran.code == 2 and "stragglers=0.1" in ran.err


def test_one_option_of_a_side(here: Path) -> None:
    target = f"{here}/t.py:build"
    asked: dict[str, Any] = {"phases": ["forward"], "chip": "h100-sxm", "execution": "eager"}
    plain = rt.diff(target, after={"tf32": True}, **asked)
    by_name = rt.diff(target, after={"settings": {"tf32": True}}, **asked)
    assert str(plain.violations(["time>-99%"])) == str(by_name.violations(["time>-99%"]))


@pytest.mark.parametrize("texts", [["h100-sxm=2.5,l4=0.8"], ["h100-sxm=2.5", "l4=0.8"]])
def test_numbers_by_chip_stand_in_one_option_or_in_several(texts: list[str]) -> None:
    assert by_chip("--price", texts) == {"h100-sxm": 2.5, "l4": 0.8}
    assert by_chip("--price", ["2.5"]) == 2.5
    with pytest.raises(rt.types.RequestError, match="CHIP=NUMBER"):
        by_chip("--price", ["2.5,0.8"])


def test_the_stub_shows_what_the_functions_take() -> None:
    pytest.importorskip("ruff")
    told = "run `python -m tests.reporting.signatures`"
    assert STUB.read_text(encoding="utf-8") == stub(), told
