"""What a file of measurements names is not imported or called, unless the user says so."""

from __future__ import annotations

from pathlib import Path

import pytest

import rooftrace as rt
from rooftrace.errors import RequestError, UnusedError
from rooftrace.measured.alignment.pairing import template_of
from rooftrace.measured.bench import ModelRow, Run
from rooftrace.measured.profiles import StepTime
from tests.reporting.conftest import Run as Command

pytestmark = pytest.mark.quick

CHIP = "h100-sxm"
PAYLOAD = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
from os import abort
import torch
def build(): return torch.nn.Linear(8, 8), torch.empty(4, 8)
def __hidden(): return build()
"""


@pytest.fixture
def payload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of code in the folder where the user is; it leaves a mark when it is run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "payload.py").write_text(PAYLOAD)
    return tmp_path / "payload.py"


def ran(payload: Path) -> bool:
    return payload.with_name("ran").exists()


def run_of(name: str, **sizes: object) -> Run:
    row = ModelRow(key="a", model=name, phase="forward", mode="eager", sizes=sizes, seconds=(1e-3,))
    return Run(device={}, versions={}, models=(row,))


NAMES = ("payload:build", "payload.py:build", "os:abort", "config.json", "hf:a/b", "graph.json.gz")


@pytest.mark.parametrize("name", NAMES)
def test_a_name_in_a_file_is_not_run(name: str, payload: Path) -> None:
    for measured in ([StepTime(target=name, seconds=1e-3)], run_of(name)):
        for ask in (rt.validate, rt.calibrate):
            with pytest.raises(RequestError, match=r"not run|is no model of the suite"):
                ask(measured, CHIP)
    assert not ran(payload)


def test_the_command_line_says_what_to_do(payload: Path, run: Command) -> None:
    table = payload.with_name("steps.csv")
    table.write_text("model,batch,ms\nos:abort,1,1\n")
    for command in (("validate", table), ("calibrate", table, "-o", "-")):
        refused = run(*command, "--chip", CHIP)
        assert refused.code == 2 and refused.err.count("\n") == 1
        for words in ("'os:abort'", "--target", "--trust-targets"):
            assert words in refused.err


def test_the_user_may_trust_the_names(payload: Path, run: Command) -> None:
    table = payload.with_name("steps.csv")
    table.write_text(f"model,batch,ms\n{payload}:build,4,1\n")
    trusted = run("validate", table, "--chip", CHIP, "--trust-targets")
    assert trusted.code == 0 and ran(payload)
    named = [StepTime(target="build", seconds=1e-3)]
    assert rt.validate(named, CHIP, target=f"{payload}:{{target}}").steps
    assert rt.validate(run_of(f"{payload}:build"), CHIP, trust_targets=True).steps


def test_trust_that_changes_nothing_is_refused() -> None:
    steps = [StepTime(target="x", seconds=1e-3)]
    with pytest.raises(UnusedError, match="trust_targets=True: the target says already"):
        rt.validate(steps, CHIP, target="models.py:{target}", trust_targets=True)
    suite = next((Path(__file__).parents[2] / "benchmarks/measurements").glob("*.json.gz"))
    with pytest.raises(UnusedError, match="every row of the run is of a model of the suite"):
        rt.validate(suite, CHIP, trust_targets=True)
    with pytest.raises(rt.types.RequestError, match="expected True or False"):
        rt.validate(steps, CHIP, trust_targets="yes")


@pytest.mark.parametrize(
    "template",
    [
        "{target.__class__}",
        "{target[0]}",
        "{target:>2000000000}",
        "{target!r}",
        "{0}",
        "{}",
        "{",
        "m.py:{target",
        "m.py:}",
        "{__import__}",
        "m.py:{seed}",
    ],
)
def test_a_template_has_names_of_columns_only(template: str) -> None:
    with pytest.raises(RequestError) as error:
        rt.validate([StepTime(target="x", seconds=1e-3)], CHIP, target=template)
    assert len(str(error.value)) < 300
    with pytest.raises(RequestError, match="1,013 characters; expected at most"):
        template_of("m.py:{target}" + "x" * 1000)


@pytest.mark.parametrize(
    "name",
    ["os.abort", "../evil", "/etc/evil", "a:b", "a b", "__hidden", "a\nb", "é", "x" * 1001, ""],
)
def test_a_name_cannot_lead_a_template_of_code_elsewhere(name: str, payload: Path) -> None:
    with pytest.raises(RequestError) as error:
        rt.validate([StepTime(target=name, seconds=1e-3)], CHIP, target="payload.py:{target}")
    assert "expected letters, digits" in str(error.value) and len(str(error.value)) < 400
    assert not ran(payload)


@pytest.mark.parametrize(
    ("template", "name", "made"),
    [
        ("m.py:{target}", "resnet_50", "m.py:resnet_50"),
        ("examples/{target}.py:build", "vit-b", "examples/vit-b.py:build"),
        ("hf:{target}", "org/Llama-3.1-8B", "hf:org/Llama-3.1-8B"),
        ("zoo/{target}/config.json", "a/b.c", "zoo/a/b.c/config.json"),
        ("{{x}}/{target}{batch}.json", "a", "{x}/a8.json"),
        ("m.py:build", "anything: at all", "m.py:build"),
        ("{target}", "os:abort", "os:abort"),
    ],
)
def test_a_template_is_filled(template: str, name: str, made: str) -> None:
    assert template_of(template).filled({"target": name, "batch": 8}) == made


@pytest.mark.parametrize("name", ["../x", "/x", "a/../x", "a/./x", "a//x", "x:y", "x\\y", "..", ""])
def test_a_name_is_a_plain_path_in_other_templates(name: str) -> None:
    with pytest.raises(RequestError, match="a plain relative name"):
        template_of("configs/{target}.json").filled({"target": name})


@pytest.mark.parametrize("size", ["os:abort", 1.5, True, -1, 10**20])
def test_a_size_is_a_number(size: object) -> None:
    with pytest.raises(RequestError, match="expected a whole number"):
        template_of("m{batch}").filled({"batch": size})
    with pytest.raises(RequestError, match="expected a whole number"):
        rt.validate(run_of("x", batch=size), CHIP, target="m.py:{target}{batch}")


def test_a_size_that_the_file_does_not_have_is_named() -> None:
    with pytest.raises(RequestError, match=r"has \{seq\}, and the step has no seq"):
        template_of("m{seq}").filled({"seq": None})
