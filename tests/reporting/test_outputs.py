"""An output replaces an output of rooftrace of its kind, and nothing else of the user's."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click
import pytest

import rooftrace as rt
from rooftrace.errors import RequestError
from rooftrace.reporting.cli import cli
from rooftrace.reporting.cli.options import OutputPath
from tests.reporting.conftest import Run

NET = """\
import torch


def build():
    return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
"""
CONFIG = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 16}
DECODE = ("--phase", "decode", "--batch", "1")
SIZES = ("--input", "input=4,16:fp32", "--phase", "forward")


@pytest.fixture
def here(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, its graph, and files of the user's with endings of ours."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.py").write_text(NET)
    assert run("trace", "models.py:build", *SIZES, "-o", "g.json").code == 0
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text(json.dumps(CONFIG))
    (tmp_path / "thesis.md").write_text("# My thesis\n\nFigures are made by rooftrace.\n")
    (tmp_path / "thesis.tex").write_text("\\documentclass{article}\n")
    (tmp_path / "data.csv").write_text("model,batch,ms\na,1,2\n")
    (tmp_path / "data.json").write_text('{"made by": "me", "answer": 42}\n')
    (tmp_path / "page.html").write_text("<!doctype html>\n<title>mine</title>\n")
    (tmp_path / "photo.png").write_bytes(b"\x89PNG\r\n\x1a\n mine")
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


COMMANDS = {
    "trace": ("trace", "models.py:build", *SIZES, "-o"),
    "census": ("report", "g.json", "--table", "census", "-o"),
    "nodes": ("report", "g.json", "--table", "nodes", "-o"),
    "report": ("report", "g.json", "--out"),
    "roofline": ("roofline", "g.json", "-o"),
    "diff": ("diff", "g.json", "g.json", "-o"),
    "lock": ("lock", "models.py:build", *SIZES, "-o"),
    "chips list": ("chips", "list", "-o"),
    "chips show": ("chips", "show", "l4", "-o"),
    "systems": ("systems", "list", "-o"),
    "inventory": ("inventory", "models.py:build", "-o"),
    "--timeline": ("report", "g.json", "--table", "census", "--timeline"),
    "--plot": ("roofline", "g.json", "--plot"),
    "--save-form": ("sweep", "models.py:build", "--over", "batch=1..2", "--save-form"),
    "--points": ("sensitivity", "a.json", *DECODE, "--grid", "chip=l4,a10", "--points"),
    "--save": ("run", "--save", "OUT", "models.py"),
    "calibrate": ("calibrate", "data.csv", "--chip", "l4", "-o"),
    "measure": ("measure", "--chip-only", "-o"),
    "collectives": ("measure", "--collectives", "-o"),
}
ENDINGS = {"--timeline": ".json", "--plot": ".png", "--points": ".csv", "collectives": ".csv"}
FOR_TABLES = ("chips list", "chips show", "systems", "inventory", "diff")
MINE = ("thesis.md", "thesis.tex", "data.csv", "data.json", "page.html", "photo.png", "models.py")


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_replaces_a_file_of_the_user(name: str, run: Run, here: Path) -> None:
    before = contents(here)
    inputs = {word.partition(":")[0] for word in COMMANDS[name]} & before.keys()
    tried = [mine for mine in (*MINE, *inputs) if mine.endswith(ENDINGS.get(name, ""))]
    for mine in tried:
        words = [mine if word == "OUT" else word for word in COMMANDS[name]]
        ran = run(*words, *(() if "OUT" in COMMANDS[name] else (mine,)))
        assert ran.code == 2 and mine in ran.err and not ran.out, (mine, ran)
        no_format = name in FOR_TABLES and mine.endswith((".csv", ".json"))
        assert no_format or ("--force" in ran.err and f"'{mine}'" in ran.err), ran.err
        assert contents(here) == before
    assert tried


def test_every_option_that_names_an_output_is_checked() -> None:
    """A command whose option says "Write ..." has it as an Output; each command has --force."""

    def commands(command: click.Command) -> list[click.Command]:
        if isinstance(command, click.Group):
            return [one for inner in command.commands.values() for one in commands(inner)]
        return [command]

    names = {"--out", "--save", "--save-form", "--timeline", "--points", "--plot"}
    for command in commands(cli):
        options = [p for p in command.params if isinstance(p, click.Option)]
        outputs = [p for p in options if names.intersection(p.opts)]
        for option in options:
            says = (option.help or "").startswith(("Write", "Draw")) or "Where to write" in (
                option.help or ""
            )
            flagged = option.is_flag or not says
            assert flagged or option in outputs or option.name == "update", option.opts
        assert all(isinstance(option.type, OutputPath) for option in outputs), command.name
        forced = [p for p in options if "--force" in p.opts]
        assert len(forced) == bool(outputs), command.name


@pytest.mark.parametrize("ending", ["md", "txt", "html", "tex", "json", "csv"])
def test_what_rooftrace_wrote_is_written_again(ending: str, run: Run, here: Path) -> None:
    for command in ("census", "nodes", "roofline", "report"):
        words = COMMANDS[command]
        name = f"{command}.{ending}"
        if (command, ending) == ("report", "txt"):
            continue  # a folder
        first = run(*words, name)
        assert first.code == 0, first.err
        before = (here / name).read_bytes()
        again = run(*words, name, "--chip", "l4")
        assert again.code == 0, again.err
        assert (here / name).read_bytes() != before


@pytest.mark.parametrize(
    "words",
    [
        ("chips", "list", "-o", "x.md"),
        ("lock", "models.py:build", *SIZES, "-o", "x.lock"),
        ("trace", "models.py:build", *SIZES, "-o", "x.json.gz"),
        (*COMMANDS["--timeline"], "x.json.gz"),
        ("roofline", "g.json", "--plot", "x.png"),
        ("roofline", "g.json", "--plot", "x.svg"),
        ("roofline", "g.json", "--plot", "x.pdf"),
        ("inventory", "models.py:build", "--weights", "--plot", "x.svg"),
        ("sensitivity", "a.json", *DECODE, "--grid", "chip=l4,a10", "--points", "x.csv"),
        ("report", "g.json", "--out", "x", "--format", "html,md,json,csv,tex,trace"),
    ],
    ids=lambda words: words[-1] if words[0] != "inventory" else "weights",
)
def test_each_kind_of_output_is_known_again(words: tuple[str, ...], run: Run, here: Path) -> None:
    for _ in range(2):
        ran = run(*words)
        assert ran.code == 0, ran.err


def test_force_replaces_files_but_no_link_and_no_folder(run: Run, here: Path) -> None:
    for mine in ("thesis.md", "data.json", "models.py", "g.json"):
        assert run(*COMMANDS["census"], mine).code == 2
    assert run("chips", "list", "-o", "thesis.md", "--force").code == 0
    assert "thesis" not in (here / "thesis.md").read_text()
    (here / "folder").mkdir()
    (here / "link.md").symlink_to("data.csv")
    for mine in ("folder", "link.md"):
        ran = run("chips", "list", "-o", mine, "--force")
        assert ran.code == 2 and f"'{mine}'" in ran.err
    assert (here / "data.csv").read_text().startswith("model,batch")


@pytest.mark.parametrize("name", ["chips list", "census", "diff", "report"])
def test_force_without_an_output_is_refused(name: str, run: Run, here: Path) -> None:
    for more in ((), (COMMANDS[name][-1], "-")):
        ran = run(*COMMANDS[name][:-1], *more, "--force")
        assert ran.code == 2 and "--force: nothing is written" in ran.err


def test_a_result_of_another_kind_is_not_replaced(run: Run, here: Path) -> None:
    assert run(*COMMANDS["census"], "c.json").code == 0
    before = contents(here)
    for words in (COMMANDS["trace"], COMMANDS["lock"]):  # a graph, a lock: over a table
        assert run(*words, "c.json").code == 2
    assert run("chips", "list", "--format", "md", "-o", "g.json").code == 2
    assert contents(here) == before


def test_a_format_that_the_command_has_not_is_said(run: Run, here: Path) -> None:
    for words in (("chips", "list"), ("chips", "show", "l4"), ("inventory", "models.py:build")):
        ran = run(*words, "-o", "new.csv")
        assert ran.code == 2 and "--out new.csv: expected a file of md, html, tex" in ran.err


def test_an_input_by_another_name_is_an_input(run: Run, here: Path) -> None:
    os.link(here / "g.json", here / "same.json")
    ran = run("diff", "g.json", "g.json", "-o", "same.json")
    assert ran.code == 2 and "'same.json' is an input of this command" in ran.err


def test_two_outputs_of_one_name_are_refused(run: Run, here: Path) -> None:
    ran = run(*COMMANDS["census"], "x.json", "--timeline", "x.json")
    assert ran.code == 2 and "two outputs" in ran.err and not (here / "x.json").exists()


def test_it_is_said_before_the_work(run: Run, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rt.tools, "priced_graphs", lambda *_, **__: pytest.fail("it traced"))
    monkeypatch.setattr(rt, "report", lambda *_, **__: pytest.fail("it traced"))
    for words in (("trace", "models.py:build", "-o"), ("report", "models.py:build", "--out")):
        assert run(*words, "thesis.md").code == 2
        assert run(*words, "thesis.md/x.md").code == 2
    (here / "out").mkdir()
    (here / "out" / "report.md").write_text("mine")
    ran = run("report", "models.py:build", "--out", "out")
    assert ran.code == 2 and "report.md' is there" in ran.err and "--force" in ran.err


@pytest.mark.parametrize(
    "name",
    [
        "report.html",
        pytest.param("roofline-forward.png", marks=pytest.mark.slow),  # figures are drawn first
        "_report.json",
    ],
)
def test_a_report_refuses_a_folder_a_link_and_a_file_of_the_user(
    name: str, run: Run, here: Path
) -> None:
    place = here / "out" / name
    (place / "inner").mkdir(parents=True)
    (place / "inner" / "thesis.tex").write_text("mine")
    ran = run("report", "g.json", "--out", "out")
    assert ran.code == 2 and f"{name}' is a folder" in ran.err
    assert (place / "inner" / "thesis.tex").read_text() == "mine"
    assert os.listdir(here / "out") == [name]
    place.rename(here / "away")
    place.symlink_to(here / "thesis.md")
    ran = run("report", "g.json", "--out", "out")
    assert ran.code == 2 and f"{name}' is a link to" in ran.err and place.is_symlink()
    place.unlink()
    place.write_text("mine")
    ran = run("report", "g.json", "--out", "out")
    assert ran.code == 2 and f"{name}' is there" in ran.err and place.read_text() == "mine"
    assert os.listdir(here / "out") == [name]
    assert run("report", "g.json", "--out", "out", "--force").code == 0
    assert json.loads((here / "out" / "_report.json").read_text())["complete"]


def test_in_python_a_named_file_is_replaced_and_code_is_not(here: Path) -> None:
    graph = rt.load("g.json")
    rt.save(graph, "data.json")  # as open(path, "w") would
    with pytest.raises(RequestError, match=r"models\.py' is code, and would be lost; name another"):
        rt.save(graph, "models.py")
    (here / "report.md").write_text("mine")
    with pytest.raises(RequestError, match=r"report\.md' is there"):  # this name is rooftrace's
        rt.report(graph).write(here, formats=("md",))
    assert (here / "report.md").read_text() == "mine"


def test_parquet_files_of_the_user_stay_in_the_folder_of_a_fleet(run: Run, here: Path) -> None:
    pytest.importorskip("pyarrow")
    pytest.importorskip("distributed")
    import pandas

    (here / "out").mkdir()
    pandas.DataFrame({"mine": [1]}).to_parquet(here / "out" / "train.parquet")
    words = ("sweep", "a.json", "b.json", *DECODE, "--scheduler")
    for kv in ("kv=8,16", "kv=8,32"):
        ran = run(*words, "none", "--over", kv, "-o", "out")
        assert ran.code == 0, ran.err
    assert (here / "out" / "train.parquet").exists()
    assert len(list((here / "out" / "_earlier").iterdir())) == 2


def test_a_folder_of_the_user_beside_a_sweep_stays(run: Run, here: Path) -> None:
    mine = here / "x.csv.parts"
    mine.mkdir()
    (mine / "diary").write_text("mine")
    words = ("sweep", "a.json", *DECODE, "--over", "kv=8,16")
    for _ in range(2):
        ran = run(*words, "-o", "x.csv")
        assert ran.code == 0, ran.err
    assert os.listdir(mine) == ["diary"]
