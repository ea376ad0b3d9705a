"""Six commits, each of which changes what a step costs: none is called no change.

Most of them edit a file that the target imports, not the target's own.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

import rooftrace as rt
from rooftrace.diffs.costs.changes import Diff
from rooftrace.graph.records import pattern_of
from tests.reporting.conftest import Run

FIRST = {
    "model.py": """
import torch
from torch import nn
from parts.attention import Attention
from parts.norm import Norm
from parts.head import Head
from sizes import DTYPE, HIDDEN, VOCABULARY

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = Norm(HIDDEN), Attention()

    def forward(self, x):
        return x + self.attention(self.norm(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = Head()

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def build():
    return Net().to(DTYPE), (torch.zeros(2, 16, dtype=torch.int64),)
""",
    "sizes.py": """
import torch
DTYPE, HIDDEN, HEADS, GROUPS, VOCABULARY = torch.bfloat16, 64, 8, 8, 250
""",
    "parts/norm.py": """
import torch
from torch import nn

class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True)) * self.weight
""",
    "parts/attention.py": """
import torch
from torch import nn
from sizes import GROUPS, HEADS, HIDDEN

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        width = HIDDEN // HEADS
        self.q = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.k = nn.Linear(HIDDEN, GROUPS * width, bias=False)
        self.v = nn.Linear(HIDDEN, GROUPS * width, bias=False)
        self.o = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x):
        def heads(y):
            return y.unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2)
        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        gate = torch.sigmoid(x).transpose(0, 1)
        return self.o(y.transpose(1, 2).flatten(2)) * (gate + 1).transpose(0, 1)
""",
    "parts/head.py": """
from torch import nn
from sizes import HIDDEN, VOCABULARY

class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, x):
        return self.out(x)
""",
}

# What a commit does: the file, what stands there, what then stands there; the module and the word
# that the diff has to name.
COMMITS = {
    "norm in fp32": (
        "parts/norm.py",
        "return x * torch.rsqrt((x * x).mean(-1, keepdim=True)) * self.weight",
        "y = x.float()\n"
        "        y = y * torch.rsqrt((y * y).mean(-1, keepdim=True))\n"
        "        return y.to(x.dtype) * self.weight",
        ("blocks.*.norm", "_to_copy"),
    ),
    "grouped queries": ("sizes.py", "8, 8, 250", "8, 2, 250", ("blocks.*.attention.k", "mm")),
    "contiguous": (
        "parts/attention.py",
        "sigmoid(x).transpose(0, 1)",
        "sigmoid(x).transpose(0, 1).contiguous()",
        ("blocks.*.attention", "clone"),
    ),
    "head in fp32": (
        "parts/head.py",
        "return self.out(x)",
        "return nn.functional.linear(x.float(), self.out.weight.float())",
        ("head", "mm"),
    ),
    "padded vocabulary": ("sizes.py", "8, 2, 250", "8, 2, 256", ("head", "mm")),
    "other floats": ("sizes.py", "torch.bfloat16", "torch.float16", ("blocks.*.norm", "mul")),
}


def write(folder: Path, files: Mapping[str, str]) -> str:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return f"{folder / 'model.py'}:build"


def revisions() -> list[dict[str, str]]:
    """The files of each of the seven revisions."""
    found = [dict(FIRST)]
    for name, old, new, _ in COMMITS.values():
        files = dict(found[-1])
        assert old in files[name]
        files[name] = files[name].replace(old, new)
        found.append(files)
    return found


def check(change: Diff, number: int) -> None:
    """Each phase names the module that a commit changed, and the op."""
    _, _, _, (module, op) = list(COMMITS.values())[number]
    assert not change.unchanged
    for phase in change.phases:
        named = [m for m in phase.modules if pattern_of(m.path).startswith(module)]
        ops = [n for m in named for n in (*m.ops_added, *m.ops_removed, *m.resized)]
        assert any(op in name for name in ops), (phase.phase, module, op, phase.modules)
    assert change.sources is not None and list(change.sources.differing)


@pytest.mark.parametrize("number", range(len(COMMITS)), ids=COMMITS)
def test_a_commit_is_seen_between_two_checkouts(number: int, empty_folder: Path) -> None:
    before, after = revisions()[number : number + 2]
    old, new = (empty_folder / f"checkout{n}" for n in (number, number + 1))
    targets = write(old, before), write(new, after)
    change = rt.diff(*targets)
    check(change, number)
    assert [phase.phase for phase in change.phases] == ["forward", "training"]
    assert change.names == targets


def test_each_commit_is_seen_by_the_command_where_it_is_edited_in_place(
    run: Run, tmp_path: Path
) -> None:
    saved = tmp_path / "saved.json"
    for number, files in enumerate(revisions()):
        target = write(tmp_path / "here", files)
        if number:
            shown = run("diff", saved, target, "--phase", "forward")
            assert shown.code == 0, shown.err
            module, _ = list(COMMITS.values())[number - 1][3]
            assert "no change" not in shown.out and module in shown.out
        assert run("trace", target, "--phase", "forward", "-o", saved).code == 0


def test_each_commit_is_seen_by_the_calls_where_it_is_edited_in_place(tmp_path: Path) -> None:
    last = None
    for files in revisions():
        graph = rt.trace(write(tmp_path / "here", files))
        if last is not None:
            assert not rt.diff(last, graph, execution="compiled").unchanged
        last = graph


def test_no_change_says_what_the_files_say(run: Run, tmp_path: Path) -> None:
    files = revisions()[0]
    old, new = write(tmp_path / "old", files), write(tmp_path / "new", files)
    only = ("--phase", "forward")
    assert "both sides were read from the same 5 source files" in run("diff", old, old, *only).out
    assert "the two have 5 source files that are equal" in " ".join(
        run("diff", old, new, *only).out.split()
    )
    write(tmp_path / "new", {"parts/norm.py": files["parts/norm.py"] + "# a comment\n"})
    shown = " ".join(run("diff", old, new, *only).out.split())
    assert "1 source file differs (parts/norm.py), but no op, size or total changed" in shown
    data = json.loads(run("diff", old, new, *only, "--format", "json").out)
    assert data["sources"]["differing"] == ["parts/norm.py"]
    shutil.rmtree(tmp_path / "new")


RULED = """
import torch, rooftrace
if not hasattr(torch.ops.commits_ruled, "mix"):
    torch.library.define("commits_ruled::mix", "(Tensor x) -> Tensor")
    torch.library.impl("commits_ruled::mix", "Meta", lambda x: torch.empty_like(x))

@rooftrace.extend.rule("commits_ruled::mix")
def mix(op):
    return rooftrace.extend.Cost.of(vector=FLOP) + op.streamed()

class Net(torch.nn.Module):
    def forward(self, x):
        return torch.ops.commits_ruled.mix(x)

def build():
    return Net(), (torch.empty(16),)
"""


def test_each_side_is_priced_by_the_rules_that_it_brings(tmp_path: Path) -> None:
    from rooftrace.costmodels.ops.opview import find_rule

    for name, flop in (("old", 7), ("new", 9)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.py").write_text(RULED.replace("FLOP", str(flop)))
    before, after = (f"{tmp_path / name}/model.py:build" for name in ("old", "new"))
    flops = rt.diff(before, after, phases=["forward"]).phases[0].totals["flops"]
    assert (flops.before, flops.after) == (7, 9)
    assert find_rule("commits_ruled.mix.default") is None, "what a diff brought is gone after it"
