"""The command line from end to end: what it prints, what it writes, how it refuses."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from rooftrace._formats import FORMATS
from rooftrace._processes import started_again
from rooftrace.reporting.cli import cli
from tests.reporting.conftest import KEPT, Run
from tests.repositories import git

GPT2 = "examples/configs/gpt2.json"
CONTROL_FLOW = "examples/models/control_flow.py:build"
RESNET = "examples/models/resnet.py:build"

pytestmark = pytest.mark.usefixtures("kept_targets")


def test_layers_that_are_alike_can_be_run_and_listed_one_by_one(run: Run, tmp_path: Path) -> None:
    short, long = tmp_path / "short.json", tmp_path / "long.json"
    sizes = ("--batch", "2", "--seq", "16", "--phase", "prefill")
    counts = [
        run("trace", GPT2, *sizes, "-o", short).out.split(": ")[1],
        run("trace", GPT2, *sizes, "--no-repeats", "-o", long).out.split(": ")[1],
    ]
    assert counts[0] == counts[1]
    assert short.stat().st_size < long.stat().st_size / 2
    ran = run("diff", short, long, "--fail-on", "time>0%")
    assert ran.code == 0
    assert "no change in any phase" in ran.out  # also none that is only rounding


def test_report_prints_one_screen_and_writes_a_folder(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "a" / "report"
    ran = run("report", CONTROL_FLOW, "--chip", "l4,h100-sxm", "--out", out)
    assert ran.code == 0
    assert "coverage: " in ran.out and "expected" in ran.out
    names = {path.name for path in out.iterdir()}
    assert {"report.md", "report.json", "ops.csv", "roofline.png"} <= names
    assert all(name in ran.out for name in names - {"_report.json"})
    assert [path.name for path in tmp_path.iterdir()] == ["a"], "nothing temporary is left"


def test_the_largest_batch_is_asked_for(run: Run, tmp_path: Path) -> None:
    options = ("--phase", "forward,training", "--chip", "l4,h100-sxm", "--max-batch")
    out = tmp_path / "report"
    ran = run("report", CONTROL_FLOW, *options, "--out", out, "--format", "json,md")
    head = next(line for line in ran.out.splitlines() if line.startswith("memory "))
    assert ran.code == 0 and head.split()[1:4] == ["weights", "gradients", "optimizer"]
    chips = json.loads((out / "report.json").read_text())["memory"]["training"]["chips"]
    found = [chips[name]["max_batch"]["batch"] for name in ("l4", "h100-sxm")]
    assert 0 < found[0] <= found[1]
    assert re.search(rf"^largest batch: forward .*, training {found[0]:,}$", ran.out, re.MULTILINE)
    assert f"{found[0]:,}" in ran.out
    page = " ".join((out / "report.md").read_text().split())
    assert "| Largest batch | on one l4 | on one h100-sxm |" in page
    graph = tmp_path / "graph.json.gz"
    run("trace", CONTROL_FLOW, "-o", graph)
    refused = run("report", graph, "--max-batch")
    assert refused.code == 2 and "a graph, which has its sizes" in refused.err


def test_report_as_json_on_stdout_is_valid_json(run: Run) -> None:
    ran = run("report", CONTROL_FLOW, "--phase", "forward", "--out", "-", "--format", "json")
    report = json.loads(ran.out)
    assert report["schema"] == "rooftrace.report/1"
    assert list(report["phases"]) == ["forward"]


def test_two_runs_write_the_same_bytes(run: Run, tmp_path: Path) -> None:
    for name in ("one", "two"):
        KEPT.clear()  # each traces
        run("report", CONTROL_FLOW, "--out", tmp_path / name, "--format", "json,md,csv")
        run("trace", CONTROL_FLOW, "-o", tmp_path / f"{name}.json.gz")
    for name in ("report.json", "report.md", "ops.csv"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert (tmp_path / "one.json.gz").read_bytes() == (tmp_path / "two.json.gz").read_bytes()


def test_a_saved_graph_reports_like_its_target(run: Run, tmp_path: Path) -> None:
    graph = tmp_path / "graph.json.gz"
    assert run("trace", CONTROL_FLOW, "-o", graph).code == 0
    assert gzip.decompress(graph.read_bytes()).startswith(b'{"schema":"rooftrace.graph/3"')
    direct = run("report", CONTROL_FLOW, "--format", "csv")
    saved = run("report", graph, "--out", "-", "--format", "csv")
    assert direct.out == saved.out


@pytest.mark.parametrize("ending", ["html", "md", "json", "csv"])
def test_a_report_is_one_file_where_its_name_ends_so(run: Run, tmp_path: Path, ending: str) -> None:
    one = ("report", CONTROL_FLOW, "--phase", "forward")
    file = tmp_path / "new" / f"report.{ending}"
    ran = run(*one, "--out", file)
    assert ran.code == 0 and ran.out.endswith(f"written to {file}\n")
    text = run(*one, "--out", "-", "--format", ending).out
    assert file.read_text() == text + FORMATS[ending].mark
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    both = run(*one, "--out", file, "--format", "md,json")
    assert both.code == 2 and f"--out {file} is one file, and --format md,json is not" in both.err


def test_language_model_has_prefill_decode_and_training(run: Run) -> None:
    ran = run("report", GPT2, "--batch", "2", "--seq", "32", "--out", "-", "--format", "json")
    report = json.loads(ran.out)
    assert list(report["phases"]) == ["prefill", "decode", "training"]
    assert report["workload"]["batch"] == 2
    assert report["memory"]["decode"]["kv"] > 0 == report["memory"]["training"]["kv"]


def test_diff_fails_on_growth(run: Run, tmp_path: Path) -> None:
    for name, steps in (("before", 2), ("after", 3)):
        (tmp_path / f"{name}.py").write_text(
            "import torch\n"
            "def build():\n"
            f"    layers = [torch.nn.Linear(64, 64) for _ in range({steps})]\n"
            "    return torch.nn.Sequential(*layers), (torch.empty(8, 64),)\n"
        )
    before, after = (f"{tmp_path / name}.py:build" for name in ("before", "after"))
    same = run("diff", before, before, "--fail-on", "flops>0%")
    assert same.code == 0 and "no change" in same.out
    grown = run("diff", before, after, "--fail-on", "flops>5%", "--phase", "forward")
    assert grown.code == 1
    assert "forward: flops grew by +50.00%" in grown.err
    text = run("diff", before, after, "--format", "json", "--phase", "forward").out
    (added,) = json.loads(text)["phases"]["forward"]["modules"]
    assert (added["path"], added["status"]) == ("2", "added")
    assert added["flops"]["delta"] == 2 * 8 * 64 * 64 + 8 * 64  # the product and its bias


@pytest.mark.slow
def test_compare_counts_with_others_and_says_why_they_differ(run: Run, tmp_path: Path) -> None:
    sizes = ("--batch", "1", "--seq", "16", "--phase", "prefill")
    shown = run("compare", GPT2, *sizes)
    assert shown.code == 0
    assert "flopcounter" in shown.out and "equal: " in shown.out
    assert "no formula for aten::scaled_dot_product_attention" in shown.out
    found = json.loads(run("compare", GPT2, *sizes, "--format", "json").out)["comparisons"]
    for one in found:
        delta = sum(d["delta"] for d in one["differences"])
        assert delta == one["flops_matrix"] - one["peer_matrix"]
    page = tmp_path / "compare.md"
    assert run("compare", GPT2, *sizes, "--format", "md", "--out", page).code == 0
    assert "| `transformer.h.*.attn x12` |" in page.read_text()


def test_compare_needs_the_module_itself(run: Run, tmp_path: Path) -> None:
    saved = tmp_path / "graph.json"
    run("trace", CONTROL_FLOW, "--phase", "forward", "-o", saved)
    refused = run("compare", saved)
    assert refused.code == 2 and "pass the target it was traced from" in refused.err


def test_diff_writes_markdown_to_a_file(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "diff.md"
    ran = run("diff", CONTROL_FLOW, RESNET, "--phase", "forward", "--format", "md", "--out", page)
    assert ran.code == 0
    assert page.read_text().startswith("## Cost of")


MODEL_WITH_AN_OP_OF_ITS_OWN = """
import torch
library = torch.library.Library("NAME", "DEF")
library.define("mix(Tensor x) -> Tensor")
library.impl("mix", lambda x: torch.empty_like(x), "Meta")
class Model(torch.nn.Module):
    def forward(self, x):
        return torch.ops.NAME.mix(x)
def build():
    return Model(), (torch.empty(16),)
"""
RULE = """
import rooftrace
@rooftrace.extend.rule("NAME::mix")
def mix(op):
    return rooftrace.extend.Cost.of(vector=7) + op.streamed()
"""


def test_an_op_without_a_rule_is_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(MODEL_WITH_AN_OP_OF_ITS_OWN.replace("NAME", "clitest_unknown"))
    ran = run(
        "report", f"{tmp_path}/m.py:build", "--phase", "forward", "--out", "-", "--format", "json"
    )
    (unknown,) = json.loads(ran.out)["coverage"]["unsupported"]
    assert unknown["target"] == "clitest_unknown.mix.default"
    assert unknown["bytes"] == 16 * 4 + 16 * 4  # read and written


def test_rules_come_from_a_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(MODEL_WITH_AN_OP_OF_ITS_OWN.replace("NAME", "clitest_ruled"))
    (tmp_path / "rules.py").write_text(RULE.replace("NAME", "clitest_ruled"))
    ran = run(
        "report",
        f"{tmp_path}/m.py:build",
        "--phase",
        "forward",
        "--out",
        "-",
        "--format",
        "json",
        "--rules",
        tmp_path / "rules.py",
    )
    report = json.loads(ran.out)
    assert report["coverage"]["unsupported"] == []
    assert report["phases"]["forward"]["efficient"]["flops"] == 7


def test_rewrites_are_added_to_every_execution(run: Run, tmp_path: Path) -> None:
    sizes = ("--batch", "2", "--seq", "16", "--phase", "prefill")
    names = ("--rewrite", "last-logits", "--execution", "eager,serving", "--format", "json")
    ran = run("report", GPT2, *sizes, *names, "--out", "-")
    report = json.loads(ran.out)
    said = {n["execution"]: n["text"] for n in report["notes"] if "last-logits" in n["text"]}
    assert said.keys() == {"eager", "serving"} and "1 head" in said["eager"]
    assert report["executions"]["eager"]["rewrites"] == ["last-logits"]
    plain = json.loads(run("report", GPT2, *sizes, *names[2:], "--out", "-").out)
    head = 2 * 2 * 15 * 768 * 50257  # FLOP of a prompt's 15 other positions, 2 sequences
    flops = [r["phases"]["prefill"]["eager"]["flops_matrix"] for r in (plain, report)]
    assert flops[0] - flops[1] == head


def test_a_rewrite_that_changes_nothing_says_so_on_the_screen(run: Run) -> None:
    how = ("--phase", "training", "--execution", "eager", "--rewrite", "last-logits")
    assert "last-logits: nothing to rewrite in training" in run("report", RESNET, *how).out


def test_chips(run: Run) -> None:
    assert "h200-sxm" in run("chips", "list").out
    shown = run("chips", "show", "h200").out
    assert "datasheet" in shown and "memory_bandwidth" in shown
    assert run("chips", "lint").code == 0


BAD_REQUESTS = {
    "no such knobs": (("report", RESNET, "--knobs", "no.toml"), ["'no.toml'", "calibrate"]),
    "unknown counter": (("compare", GPT2, "--with", "thop"), ["'thop'", "flopcounter, fvcore"]),
    "unknown chip": (("report", RESNET, "--chip", "h2000"), ["h2000", "h200-sxm"]),
    "precision that the chip lacks": (
        ("report", RESNET, "--chip", "a100", "--dtype", "fp8"),
        ["a100", "fp8", "bf16"],
    ),
    "unknown precision": (("report", RESNET, "--dtype", "fp9"), ["fp9", "fp8"]),
    "missing file": (("report", "nowhere.py:build"), ["nowhere.py"]),
    "missing config": (("report", "nowhere.json"), ["nowhere.json"]),
    "missing attribute": (("report", "examples/models/resnet.py:buidl"), ["buidl", "build"]),
    "no module": (("report", "math:pi"), ["math:pi", "Module", "float"]),
    "no target at all": (("report", "resnet"), ["resnet", "package.module:attr"]),
    "decode of a CNN": (("report", RESNET, "--phase", "decode"), ["decode", "ResNet", "cache"]),
    "unknown phase": (("report", RESNET, "--phase", "inference"), ["inference", "forward"]),
    "unknown rewrite": (
        ("report", RESNET, "--rewrite", "last-logit"),
        ["last-logit", "last-logits"],
    ),
    "unknown execution": (("report", RESNET, "--execution", "efficent"), ["efficent", "efficient"]),
    "unknown optimizer": (("report", RESNET, "--optimizer", "adamx"), ["adamx", "adamw"]),
    "unknown assumption": (("report", RESNET, "--assume", "brunch=true"), ["brunch", "branch"]),
    "unknown format": (("report", RESNET, "--out", "-", "--format", "docx"), ["docx", "json"]),
    "format of a folder": (("report", RESNET, "--out", "-", "--format", "pdf"), ["pdf", "json"]),
    "format without a folder": (("report", RESNET, "--format", "png"), ["png", "--out DIR"]),
    "lengths that are none": (
        ("report", GPT2, "--table", "nodes", "--cached", "7,x"),
        ["--cached 7,x", "8x4096"],
    ),
    "lengths of another number": (
        ("report", GPT2, "--cached", "7,8,9", "--new", "1,2"),
        ["--new has 2", "--cached has 3"],
    ),
    "lengths and a batch": (("report", GPT2, "--cached", "7,8", "--batch", "2"), ["--batch 2"]),
    "lengths of a CNN": (("report", RESNET, "--cached", "7,8"), ["ResNet", "cache"]),
    "batch of zero": (("report", RESNET, "--batch", "0"), ["--batch", "0"]),
    "sequence of a CNN": (("report", RESNET, "--seq", "8"), ["--seq", "8"]),
    "too long for its table": (("report", GPT2, "--seq", "5000"), ["5000", "1024"]),
    "input without a shape": (("report", RESNET, "--input", "x"), ["--input", "NAME=SHAPE"]),
    "input that is no shape": (("report", GPT2, "--input", "input_ids=axb:int64"), ["axb"]),
    "condition": (("diff", RESNET, RESNET, "--fail-on", "speed>5%"), ["speed>5%", "time"]),
    "rules file": (("report", RESNET, "--rules", "none.py"), ["none.py"]),
    "flag": (("report", RESNET, "--chipp", "h200"), ["--chipp"]),
    "measuring no model": (("measure", "resnet-51"), ["resnet-51", "resnet-50", "file.py:attr"]),
    "measuring in no time": (("measure", "--budget", "0"), ["--budget 0", "above 0"]),
    "measuring nowhere": (("measure", "--device", "abacus"), ["abacus", "cuda"]),
    "measuring a chip and a model": (("measure", "gpt2", "--chip-only"), ["gpt2", "--chip-only"]),
}


@pytest.mark.parametrize(("arguments", "words"), BAD_REQUESTS.values(), ids=BAD_REQUESTS)
def test_a_wrong_request_gets_one_clear_message(
    run: Run, tmp_path: Path, arguments: tuple[str, ...], words: list[str]
) -> None:
    ran = run(*arguments)
    assert ran.code == 2
    assert "Traceback" not in ran.err
    for word in words:
        assert word in ran.err
    assert ran.out == ""


def test_an_unwritable_folder_is_refused_before_any_work(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ran = run("report", "nowhere.py:build", "--out", tmp_path / "file" / "report")
    assert ran.code == 2
    assert str(tmp_path / "file") in ran.err, (
        "the folder is named, though the target is missing too"
    )


def test_a_config_of_an_unknown_kind(run: Run, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "perpetuum"}')
    ran = run("report", config)
    assert ran.code == 2 and "perpetuum" in ran.err
    config.write_text("{")
    assert run("report", config).code == 2


def test_a_failing_forward_shows_the_users_own_lines(run: Run, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "import torch\n"
        "class Inner(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x @ torch.ones(3, 3)\n"
        "class Outer(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.inner = Inner()\n"
        "    def forward(self, x):\n"
        "        return self.inner(x)\n"
        "def build():\n"
        "    return Outer(), (torch.empty(2, 5),)\n"
    )
    ran = run("report", f"{tmp_path}/broken.py:build", "--out", tmp_path / "out")
    assert ran.code == 2
    assert "'inner' (Inner)" in ran.err and "broken.py:4 in forward" in ran.err
    assert "capture.py" not in ran.err
    assert not (tmp_path / "out").exists()


def test_diff_of_a_saved_graph_and_a_target_takes_the_targets_sizes(
    run: Run, tmp_path: Path
) -> None:
    graph = tmp_path / "a-file-with-quite-a-long-name.json"
    sizes = ("--batch", "2", "--seq", "16", "--phase", "prefill")
    run("trace", GPT2, *sizes, "-o", graph)
    same = run("diff", graph, GPT2, *sizes)
    assert same.code == 0 and "no change" in same.out, same.err
    longer = ("--batch", "2", "--seq", "32", "--phase", "prefill")
    assert "before" in run("diff", graph, GPT2, *longer).out, "a path is no column head"
    told = json.loads(run("diff", graph, GPT2, *longer, "--format", "json").out)
    flops = told["phases"]["prefill"]["totals"]["flops"]
    assert flops["after"] > 2 * flops["before"], "attention grows with the square of the length"
    assert run("diff", graph, graph, *sizes).code == 2


NET = """
import torch

def build(width=16, batch=4):
    return torch.nn.Linear(width, width), (torch.zeros(batch, width),)
"""


@pytest.mark.parametrize(
    ("asked", "execution"),
    [
        ((), "efficient"),
        (("--tf32", "--phase", "training"), "efficient"),
        (("--execution", "eager"), "eager"),
    ],
    ids=str,
)
def test_solve_takes_the_execution_of_the_phase(
    run: Run, tmp_path: Path, asked: tuple[str, ...], execution: str
) -> None:
    (tmp_path / "net.py").write_text(NET)
    sizes = ("--step", "1ms", "--over", "1,2,4", "--format", "json")
    ran = run("solve", f"{tmp_path}/net.py:build", *sizes, *asked)
    assert ran.code == 0, ran.err
    assert f'"execution": "{execution}"' in ran.out and "serving" not in ran.out


def test_a_misspelt_keyword_of_a_target_is_answered_with_the_right_one(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / "net.py").write_text(NET)
    ran = run("sweep", f"{tmp_path}/net.py:build", "--over", "widht=1..4")
    assert ran.code == 2
    assert ran.err.strip().endswith("takes width, batch; did you mean 'width'?")


def test_a_table_is_of_one_step(run: Run) -> None:
    for words, refused in (
        (("--table", "nodes", "--max-batch"), "--max-batch"),
        (("--table", "nodes", RESNET), "2 TARGETs"),
        (("--table", "nodes", "--format", "md,csv"), "--format md,csv"),
        (("--table", "nodes", "--align", "8"), "--align 8: it is for --table census"),
        (("--table", "census", "--chip", "l4,a100"), "l4"),
    ):
        ran = run("report", CONTROL_FLOW, *words)
        assert ran.code == 2 and refused in ran.err and not ran.out


def test_the_first_screen_has_each_command_in_one_line(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = run("--help").out.splitlines()
    for name, command in cli.commands.items():
        (line,) = [line for line in lines if line.startswith(f"  {name} ")]
        summary = str(command.help).partition("\n")[0]
        assert line.endswith(f"  {summary}") and summary.endswith("."), name
    assert max(map(len, lines)) < 80


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_help_has_every_option_once(name: str, run: Run) -> None:
    command = cli.commands[name]
    for inner in command.commands.values() if isinstance(command, click.Group) else [command]:
        words = (name, inner.name) if inner is not command else (name,)
        sections, _, last = run(*words, "--help").out.partition("\nHelp:\n")
        lines = [*sections.splitlines(), *last.partition("\n\n")[0].splitlines()]
        for option in (p for p in inner.params if isinstance(p, click.Option)):
            spelled = ", ".join(option.opts)
            shown = [line for line in lines if f"{line} ".startswith(f"  {spelled} ")]
            assert len(shown) == 1, (name, spelled)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("calibrate", "--from", "x"), "option '--from'. Arguments without an option: MEASURED."),
        (("report", "--target", "gpt2"), "option '--target'. Arguments without an option: TARGET"),
        (("report", "gpt2", "--formt", "md"), "No such option '--formt'. Did you mean '--format'?"),
        (("calibrate", "no.json", "--chip", "l4", "-o", "-"), "no.json: no such file; `rooftrace"),
        (
            ("diff", "HEAD~3", "HEAD", "gpt2"),
            "got HEAD~3, HEAD, gpt2; revisions of one go to --git",
        ),
    ],
)
def test_a_wrong_word_is_answered_with_what_to_do(
    words: tuple[str, ...], told: str, run: Run
) -> None:
    ran = run(*words)
    assert ran.code == 2 and told in " ".join(ran.err.split()) and "--force" not in ran.err


@pytest.mark.parametrize("words", [("v1", "gpt2"), ("gpt2", "v1"), ("v1..HEAD", "gpt2")])
def test_a_revision_in_the_place_of_a_target_is_sent_to_its_option(
    words: tuple[str, str], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "Nothing")
    assert "expected package.module:attr" in run("diff", *words).err  # it names nothing
    git(tmp_path, "tag", "v1")
    (revision,) = set(words) - {"gpt2"}
    assert f"rooftrace diff gpt2 --git {revision}" in " ".join(run("diff", *words).err.split())


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (("--phase", "train"), "training"),
        (("--format", "htm"), "html"),
        (("--checkpoint", "ful"), "full"),
        (("--optimizer", "adam-w"), "adamw"),
        (("--exchange", "deep"), "deepep"),
    ],
)
def test_a_word_that_is_no_choice_is_told_the_nearest(
    words: tuple[str, str], near: str, run: Run
) -> None:
    ran = run("report", GPT2, "--set", "config.n_layer=1", *words)
    assert ran.code == 2
    assert ran.err.strip().endswith(f"; did you mean '{near}'?")


# -- the second time -------------------------------------------------------------------------------

COMMANDS = """
import contextlib, sys

from rooftrace.reporting.cli import main

if sys.argv[1] == "second":
    sys.modules["torch"] = sys.modules["transformers"] = None  # importing it raises
with contextlib.suppress(SystemExit):
    main(sys.argv[2:])
"""


@pytest.mark.subprocess
@pytest.mark.slow
def test_the_second_report_of_a_config_needs_no_torch(tmp_path: Path) -> None:
    """Its graphs are kept; other chips, executions and files of the result need no others."""
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 99}
    (tmp_path / "config.json").write_text(json.dumps(config))

    def said(time: str, *words: str) -> str:
        sizes = ("--batch", "2", "--seq", "16")
        done = subprocess.run(
            [sys.executable, "-c", COMMANDS, time, "report", "config.json", *sizes, *words],
            cwd=tmp_path,
            env={**started_again(), "ROOFTRACE_CACHE": str(tmp_path / "kept")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout, done.stderr
        return done.stdout

    first = said("first", "--chip", "l4", "--format", "json")
    assert said("second", "--chip", "l4", "--format", "json") == first
    said("second", "--chip", "a100-sxm-80,l4", "--execution", "naive", "--out", "made")
    assert (tmp_path / "made/report.html").is_file()
