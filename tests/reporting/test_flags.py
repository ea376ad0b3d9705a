"""Every option of every command changes what comes out, or is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from rooftrace.reporting.cli import cli
from rooftrace.reporting.cli.gate_commands import FORMS
from tests.reporting.conftest import Ran, Run

MODEL = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fcs = torch.nn.ModuleList([torch.nn.Linear(256, 256) for _ in range(4)])
        self.norm = torch.nn.RMSNorm(256)
    def forward(self, x):
        x = self.norm(x)
        for fc in self.fcs:
            x = fc(x)
        if torch.randperm(int(1e6)).sum() + x.sum() > 0:
            x = self.fcs[0](x)
        return x
def build():
    return Net(), (torch.ones(64, 256),)
def wider():
    return torch.nn.Linear(256, 8192), (torch.ones(64, 256),)
"""
RULE = """
import rooftrace
@rooftrace.extend.rule("aten.gelu", "aten.addmm", "aten.mm", override=True)
def mm(op):
    return rooftrace.extend.Cost.of(vector=7) + op.streamed()
"""
CONFIG = {
    "dtype": "float32",
    "model_type": "gpt2",
    "n_layer": 2,
    "n_embd": 32,
    "n_head": 2,
    "vocab_size": 64,
    "n_positions": 64,
}
DEEP = {**CONFIG, "n_layer": 6}
"""So many equal layers stand once."""
ONE = {**CONFIG, "n_layer": 1}
"""Formulas of more layers take seconds."""
CHIP = "l4"
JSON = ("--out", "-", "--format", "json")

# Commands as they are run without the option, by the kind of source.
REPORT = ("report", "config.json", *JSON)
CODE = ("report", "t.py:build", "--phase", "forward", *JSON)
SAVED = ("report", "saved.json", *JSON)
TRACE = ("trace", "deep.json", "--phase", "prefill,decode", "-o", "out.json")
DIFF = ("diff", "t.py:build", "t.py:wider", "--phase", "forward", "--format", "json")
EXPLAIN = ("explain", "one.json", "--phase", "decode", "--op", "0", "--format", "json")
NODES = ("report", "config.json", "--table", "nodes", "--phase", "prefill", "--format", "json")
CENSUS = ("report", "config.json", "--table", "census", "--phase", "prefill", "--format", "json")
BREAKS = ("breaks", "t.py:build", "--phase", "forward", "--format", "json")
EXPLAIN_CODE = ("explain", "t.py:build", "--format", "json")
ELASTICITY = ("sensitivity", "t.py:build", "--format", "json")
GRID = ("sensitivity", "config.json", "--grid", "batch=1,2", "--format", "json")
EXPLORE = (
    *("solve", "config.json", "--find", "critical-batch", "--over", "devices=1", "--over", "kv=16"),
    *("--over", "batch=1,2", "--format", "json"),
)
ROOFLINE = ("roofline", "config.json", "--format", "json")
SWEEP = ("sweep", "config.json", "--over", "seq=4,5", "--format", "json")
SOLVE = ("solve", "config.json", "--tpot", "1ms", "--over", "4,5", "--format", "json")
COMPARE = (
    "compare",
    "t.py:build",
    "--phase",
    "forward",
    "--format",
    "json",
    "--with",
    "flopcounter",
)
VALIDATE = (
    "validate",
    "steps.csv",
    "--chip",
    CHIP,
    "--target",
    "t.py:{target}",
    "--format",
    "json",
)
INVENTORY = ("inventory", "t.py:build", "--format", "json")
CALIBRATE = ("calibrate", "steps.csv", "--chip", CHIP, "--target", "t.py:{target}", "-o", "-")

LOCK = ("lock", "t.py:build", "--phase", "forward", "-o", "-")
CHECK = ("check", "--format", "terminal")

MESHES = (
    *("solve", "config.json", "--find", "mesh", "--chips", "2", "--system", "dgx-h100"),
    *("--phase", "training", "--mesh", "dp=1,tp=1", "--format", "json"),
)
SCALING = (
    *("solve", "config.json", "--find", "scaling", "--chips", "1,2", "--system", "dgx-h100"),
    *("--phase", "training", "--format", "json"),
)
TRAINING = (
    *("solve", "config.json", "--find", "run", "--mesh", "dp=2", "--system", "dgx-h100"),
    *("--tokens", "1T", "--seq", "8", "--format", "json"),
)

FLEET = (
    *("sweep", "t.py:wider", "t.py:build", "--over", "batch=1..2"),
    *("--scheduler", "none", "-o", "fleet"),
)

REQUESTS = {
    "--cached": (("--phase", "requests", "--cached", "7,9"),),
    "--new": (("--phase", "requests", "--new", "2,3"),),
}
"""Requests of different lengths, and what they need."""
WORKLOAD: dict[str, tuple[tuple[str, ...], ...]] = {
    "--phase": (("--phase", "training"),),
    "--batch": (("--batch", "3"),),
    "--seq": (("--seq", "9"),),
    "--kv": (("--kv", "11"),),
    "--input": (("--input", "input_ids=2,5:int64"),),
    "--dtype": (("--dtype", "bf16"),),
    "--weights-dtype": (("--weights-dtype", "bf16"),),
    "--kv-dtype": (("--kv-dtype", "bf16"),),
    "--optimizer": (("--optimizer", "sgd"),),
    "--torch": (("--torch", "2.8"),),
    "--set": (("--set", "config.n_embd=64"), ("--set", "config.n_embd")),
    "--assume": (("--assume", "branch=true"),),
    "--no-repeats": (("--no-repeats",),),
    "--mesh": (("--mesh", "tp=2"), ("--mesh", "tp=2,pp=2"), ("--mesh", "tp")),
    "--checkpoint": (("--checkpoint", "full"),),
    "--plan": (("--plan", "transformers"),),
    "--zero": (("--zero", "1"),),
    "--schedule": (("--schedule", "gpipe"),),
    "--interleave": (("--interleave", "2"),),
    "--microbatches": (("--microbatches", "2"),),
    "--trust-remote-code": (("--trust-remote-code",),),
}
PRICING: dict[str, tuple[tuple[str, ...], ...]] = {
    "--knobs": (("--knobs", "none"),),
    "--rewrite": (("--rewrite", "fused-gate-up"),),
    "--tf32": (("--tf32",),),
    "--set": (
        ("--set", "utilization.b_sat=4096"),
        ("--set", "kv_append=never"),
        ("--set", "config.n_embd=64"),
    ),
    "--system": (("--system", "dgx-h100"), ("--system", "dgx-h101")),
    "--host": (("--host", "desktopp"),),
    "--library": (("--library", "tensorrt"),),
    "--exchange": (("--exchange", "deepep"), ("--exchange", "deepep2")),
    "--what-if": (("--what-if", "stragglers=0.1"), ("--what-if", "straglers=0.1")),
    "--rules": (("--rules", "rules.py"),),
}
PRICED = {
    "--chip": (("--chip", "l4"),),
    "--execution": (("--execution", "eager"),),
    "--timeline": (("--timeline", "steps.json.gz"), ("--timeline", "steps.txt")),
}
"""What commands that price one step have."""
MEASURED = {
    "--chip": (("--chip", "a100"),),
    "--target": (("--target", "t.py:wider"),),
    "--trust-targets": (("--trust-targets",),),
}

# command: without the option, and with each.
CASES: dict[str, list[tuple[tuple[str, ...], dict[str, tuple[tuple[str, ...], ...]]]]] = {
    "report": [
        (
            REPORT,
            {
                **WORKLOAD,
                **REQUESTS,
                **PRICING,
                "--chip": (("--chip", "l4"), ("--chip", "h200-sxm,l4")),
                "--execution": (("--execution", "eager"),),
                "--out": (("--out", "folder"), ("--out", "page.html")),
                "--format": tuple(
                    ("--format", form) for form in ("csv", "svg", "chakra", "chakra-all")
                ),
                "--style": (("--style", "paper"), ("--style", "papr")),
                "--max-batch": (("--max-batch",),),
                "--names": (("--names", "Mine"),),
                "--timeline": PRICED["--timeline"],
            },
        ),
        (CODE, WORKLOAD),
        (SAVED, {n: c for n, c in WORKLOAD.items() if n != "--phase"}),
        (
            CENSUS,
            {
                **WORKLOAD,
                **REQUESTS,
                "--kv": (("--phase", "decode", "--kv", "11"),),
                **PRICING,
                "--align": (("--align", "128"), ("--align", "0")),
                "--timeline": PRICED["--timeline"],
                "--chip": (("--chip", "l4"),),
                "--execution": (("--execution", "eager"),),
                "--format": tuple(("--format", form) for form in ("terminal", "md", "csv")),
                "--out": (("--out", "census.csv"),),
                "--table": (("--table", "nodes"),),
            },
        ),
        (
            NODES,
            {
                **WORKLOAD,
                **REQUESTS,
                "--kv": (("--phase", "decode", "--kv", "11"),),
                **PRICING,
                "--chip": (("--chip", "l4"),),
                "--execution": (("--execution", "eager"),),
                "--format": tuple(("--format", form) for form in ("terminal", "md", "csv")),
                "--out": (("--out", "nodes.csv"),),
                "--style": (("--style", "paper"),),
                "--max-batch": (("--max-batch",),),
                "--align": (("--align", "128"),),
                "--timeline": PRICED["--timeline"],
            },
        ),
    ],
    "roofline": [
        (
            ROOFLINE,
            {
                **WORKLOAD,
                **PRICING,
                "--batch": (("--batch", "1,3"), ("--batch", "1,x")),
                "--chip": (("--chip", "l4"), ("--chip", "h200-sxm,l4")),
                "--system": (("--system", "dgx-h100"), ("--system", "dgx-h101")),
                "--execution": (("--execution", "eager"),),
                "--plot": (("--plot", "roofs.svg"), ("--plot", "roofs.jpg")),
                "--names": (("--names", "Mine"), ("--names", "Mine,Yours")),
                "--style": (("--style", "paper"),),
                "--format": (("--format", "md"),),
                "--out": (("--out", "roofs.csv"),),
                "--timeline": PRICED["--timeline"],
            },
        )
    ],
    "trace": [
        (TRACE, {**WORKLOAD, **REQUESTS, "--rules": PRICING["--rules"], "--out": (("-o", "-"),)})
    ],
    "diff": [
        (
            DIFF,
            {
                **WORKLOAD,
                **PRICING,
                "--names": (
                    ("--names", "a,b"),
                    ("--names", "a"),
                ),
                "--timeline": PRICED["--timeline"],
                "--git": (("--git", "HEAD"),),
                "--before": (("--before", "batch=3"), ("--before", "git=-x")),
                "--after": (("--after", "dtype=bf16"), ("--after", "bacth=3")),
                "--python": (("--python", "after=no/python"),),
                "--bisect": (("--bisect", "time>5%"),),
                "--chip": (("--chip", "l4"),),
                "--execution": (("--execution", "eager"),),
                "--target": (("--target", "t.py:build"),),
                "--format": (("--format", "md"),),
                "--out": (("--out", "diff.json"),),
                "--fail-on": (("--fail-on", "params>5%"),),
            },
        )
    ],
    "explain": [
        # What a module of one's own has not.
        (
            EXPLAIN,
            {
                **{name: WORKLOAD[name] for name in ("--seq", "--kv", "--kv-dtype")},
                "--op": (("--op", "1"),),
                "--rewrite": PRICING["--rewrite"],
            },
        ),
        (
            EXPLAIN_CODE,
            {
                **WORKLOAD,
                **{name: ways for name, ways in PRICING.items() if name != "--rewrite"},
                "--plot": (("--plot", "step.png"),),
                "--chip": (("--chip", "l4,a100"),),
                "--timeline": PRICED["--timeline"],
                "--execution": (("--execution", "eager"),),
                "--format": (("--format", "md"),),
                "--out": (("--out", "explain.json"),),
            },
        ),
    ],
    "breaks": [
        (
            BREAKS,
            {
                **WORKLOAD,
                **PRICING,
                "--chip": (("--chip", "l4"),),
                "--execution": (("--execution", "efficient"),),
                "--format": tuple(("--format", form) for form in ("terminal", "md", "csv")),
                "--out": (("--out", "breaks.csv"),),
            },
        )
    ],
    "sweep": [
        (
            SWEEP,
            {
                **WORKLOAD,
                **PRICING,
                "--over": (("--over", "batch=2,3"), ("--over", "seq=")),
                "--vary": (("--vary", "config.n_embd=32,64"), ("--vary", "config.n_embd")),
                "--timeline": PRICED["--timeline"],
                "--chip": (("--chip", "l4"), ("--chip", "h200-sxm,l4")),
                "--execution": (("--execution", "eager"), ("--execution", "efficient,eager")),
                "--out": (("-o", "sweep.csv"), ("-o", "sweep.txt")),
                "--plot": (("--plot", "sweep.png"),),
                "--save-form": (("--save-form", "form.json"),),
                "--most": (("--most", "1"),),
                "--format": (("--format", "md"), ("--format", "csv")),
            },
        ),
        (
            FLEET,
            {
                "--scheduler": (("--scheduler", "nowhere"),),
                "--chip": (("--chip", "l4"),),
                "--rules": PRICING["--rules"],
                "--plot": (("--plot", "sweep.png"),),
                "--save-form": (("--save-form", "form.json"),),
                "--format": tuple(("--format", form) for form in ("md", "json", "csv")),
                "--out": (("-o", "other"), ("-o", "t.py")),
            },
        ),
    ],
    "solve": [
        (
            SOLVE,
            {
                **WORKLOAD,
                **PRICING,
                "--timeline": PRICED["--timeline"],
                "--find": (("--find", "cheapest"), ("--find", "rates"), ("--find", "bacth")),
                "--tpot": (("--tpot", "20us"),),
                "--ttft": (("--ttft", "1s"),),
                "--step": (("--step", "1us"),),
                "--mix": (("--mix", "20:20"),),
                "--apart": (("--apart",),),
                "--prefill-chip": (("--prefill-chip", "l4"),),
                "--global-batch": (("--global-batch", "8"),),
                "--over": (("--over", "4"),),
                "--chip": (("--chip", "l4"), ("--chip", "h200-sxm,l4")),
                "--chips": (("--chips", "2"), ("--chips", "two")),
                "--system": (("--system", "dgx-h100"),),
                "--execution": (("--execution", "eager"),),
                "--price": (("--price", "9"), ("--price", "l4=9")),
                "--power": (("--power", "9"), ("--power", "much")),
                "--pue": (("--pue", "1.2"), ("--pue", "0.5")),
                "--kept-free": (("--kept-free", "0.5"),),
                "--link": (("--link", "50 GB/s"),),
                "--alpha": (("--alpha", "0.5"),),
                "--plot": (("--plot", "front.png"),),
                "--format": (("--format", "md"), ("--format", "csv")),
                "--out": (("--out", "solve.json"), ("--out", "solve.csv")),
            },
        ),
        (
            MESHES,
            {
                "--batch": (("--batch", "2"),),
                "--seq": (("--seq", "9"),),
                "--dtype": (("--dtype", "bf16"), ("--dtype", "bf16,fp32")),
                "--mesh": (("--mesh", "dp=1"),),
                "--chips": (("--chips", "4"),),
                "--system": (("--system", "dgx-a100"),),
                "--step": (("--step", "1us"),),
                "--tpot": (("--tpot", "1us"),),
                "--ttft": (("--ttft", "1us"),),
                "--mix": (("--mix", "20:20"),),
                "--apart": (("--apart",),),
                "--power": (("--power", "9"),),
                "--price": (("--price", "9"),),
                "--kept-free": (("--kept-free", "0.5"),),
                "--over": (("--over", "2,3"),),
                "--chip": (("--chip", "l4"),),
                "--execution": (("--execution", "eager"),),
                "--plot": (("--plot", "mesh.png"),),
            },
        ),
        (
            TRAINING,
            {
                "--tokens": (("--tokens", "2T"), ("--tokens", "many")),
                "--mtbf": (("--mtbf", "3 h"),),
                "--restart": (("--restart", "1 h"),),
                "--storage": (("--storage", "1 GB/s"),),
                "--save-time": (("--save-time", "1 min"),),
                "--interval": (("--interval", "1 h"),),
                "--pue": (("--pue", "1.2"),),
                "--power": (("--power", "9"),),
                "--price": (("--price", "9"),),
                "--global-batch": (("--global-batch", "8"),),
                "--step": (("--step", "1us"),),
            },
        ),
        (
            SCALING,
            {
                "--batch": (("--batch", "2"),),
                "--mesh": (("--mesh", "dp=1,tp=2"),),
                "--chips": (("--chips", "2,4"),),
                "--step": (("--step", "1us"),),
                "--over": (("--over", "2,3"),),
                "--plot": (("--plot", "scaling.png"),),
                "--format": (("--format", "md"),),
            },
        ),
        (
            EXPLORE,
            {
                **{n: c for n, c in WORKLOAD.items() if n not in ("--phase", "--batch", "--kv")},
                **PRICING,
                "--over": (("--over", "kv=8"), ("--over", "device=1")),
                "--chip": (("--chip", "l4"),),
                "--execution": (("--execution", "eager"),),
                "--link": (("--link", "50 GB/s"),),
                "--alpha": (("--alpha", "0.01"),),
                "--plot": (("--plot", "field.png"),),
                "--format": (("--format", "csv"),),
                "--out": (("--out", "field.json"),),
                **{n: ((n, "2"),) for n in ("--tpot", "--chips", "--price", "--kept-free")},
                "--batch": (("--batch", "3"),),
                "--phase": (("--phase", "prefill"),),
                "--timeline": PRICED["--timeline"],
            },
        ),
    ],
    "sensitivity": [
        (
            GRID,
            {
                **{n: c for n, c in WORKLOAD.items() if n != "--batch"},
                **PRICING,
                "--grid": (("--grid", "kv=8,16"), ("--grid", "chip.clokc=x2")),
                "--of": (("--of", "flops"),),
                "--log": (("--log",),),
                "--points": (("--points", "points.csv"),),
                "--timeline": PRICED["--timeline"],
                "--chip": (("--chip", "l4"),),
                "--execution": (("--execution", "eager"),),
                "--plot": (("--plot", "grid.png"),),
                "--format": (("--format", "csv"),),
                "--out": (("--out", "effects.csv"),),
            },
        ),
        (
            ELASTICITY,
            {
                "--batch": (("--batch", "3"),),
                "--over": (("--over", "batch=4"), ("--over", "batch=0")),
                "--plot": (("--plot", "step.png"),),
                "--format": (("--format", "csv"),),
            },
        ),
    ],
    "compare": [
        (
            COMPARE,
            {
                **WORKLOAD,
                "--with": (("--with", "flopcounter,fvcore"),),
                "--rules": (("--rules", "rules.py"),),
                "--format": (("--format", "md"),),
                "--out": (("--out", "compare.json"),),
            },
        )
    ],
    "lock": [
        (
            LOCK,
            {
                **WORKLOAD,
                **PRICING,
                "--chip": (("--chip", "l4"),),
                "--execution": (("--execution", "eager"),),
                "--depth": (("--depth", "1"),),
                "--out": (("-o", "other.lock"),),
                "--dry-run": (("--dry-run",),),
            },
        )
    ],
    "check": [
        (
            CHECK,
            {
                "--lock": (("--lock", "other.lock"),),
                "--update": (("--update",),),
                "--strict": (("--strict",),),
                "--format": tuple(("--format", form) for form in FORMS[1:]),
                "--out": (("--out", "check.json"),),
                "--dry-run": (("--dry-run",),),
            },
        )
    ],
    "inventory": [
        (
            INVENTORY,
            {
                "--weights": (("--weights",),),
                "--plot": (("--plot", "w.png"),),
                "--against": (("--against", "t.py:wider"),),
                "--trust-remote-code": (("--trust-remote-code",),),
                "--format": (("--format", "md"),),
                "--out": (("--out", "inventory.json"),),
            },
        )
    ],
    "validate": [
        (
            VALIDATE,
            {
                **WORKLOAD,
                **PRICING,
                **MEASURED,
                "--execution": (("--execution", "compiled"),),
                "--counters": (("--counters", "steps.csv"),),
                "--format": (("--format", "md"),),
                "--out": (("--out", "validation"),),
                "--figures": (("--figures", "svg"), ("--out", "validation", "--figures", "jpg")),
                "--timeline": PRICED["--timeline"],
            },
        )
    ],
    "calibrate": [
        (
            CALIBRATE,
            {
                **WORKLOAD,
                **MEASURED,
                "--rules": PRICING["--rules"],
                "--host": PRICING["--host"],
                "--execution": (("--execution", "compiled"),),
                "--start": (("--start", "typical-compiled"),),
                "--free": (("--free", "memory"),),
                "--run": (("--run", "t.py:build"),),
                "--counters": (("--counters", "steps.csv"),),
                "--counted-steps": (("--counted-steps", "3"),),
                "--by-layer": (("--by-layer",),),
                "--title": (("--title", "mine"),),
                "--collectives": (("--collectives", "steps.csv"),),
                "--system": (("--system", "dgx-h100"),),
                "--out": (("-o", "knobs.toml"),),
            },
        )
    ],
}
CANNOT_CHANGE = {
    # command: options that are neither refused nor change a number, and why.
    REPORT: {
        "--assume": "nothing of that kind is unknown in this model",
        "--trust-remote-code": "this repository has no code of its own",
        "--no-repeats": "the same layers, one by one: the numbers are the same",
    },
    CODE: {
        "--no-repeats": "the same layers, one by one: the numbers are the same",
    },
    EXPLAIN: {
        "--rewrite": "nothing of that kind is in this model",
    },
    EXPLAIN_CODE: {
        "--no-repeats": "the same layers, one by one: the numbers are the same",
    },
    CENSUS: {
        "--torch": "no op of this model is another one in another release",
        "--assume": "nothing of that kind is unknown in this model",
        "--trust-remote-code": "this repository has no code of its own",
        "--no-repeats": "the same layers, one by one: the numbers are the same",
        "--rewrite": "nothing of that kind is in this model",
    },
    BREAKS: {
        "--no-repeats": "the same layers, one by one: the numbers are the same",
        "--rewrite": "nothing of that kind is in this model",
    },
    NODES: {
        "--torch": "no op of this model is another one in another release",
        "--assume": "nothing of that kind is unknown in this model",
        "--trust-remote-code": "this repository has no code of its own",
        "--no-repeats": "the same layers, one by one: the numbers are the same",
        "--rewrite": "nothing of that kind is in this model",
    },
    ROOFLINE: {
        "--torch": "no op of this model is another one in another release",
        "--assume": "nothing of that kind is unknown in this model",
        "--trust-remote-code": "this repository has no code of its own",
        "--rewrite": "nothing of that kind is in this model",
        "--no-repeats": "the same layers, one by one: the numbers are the same",
    },
    SWEEP: {
        "--torch": "no op of this model is another one in another release",
        "--most": "so few sizes are traced one by one",
        "--assume": "nothing of that kind is unknown in this model",
        "--trust-remote-code": "this repository has no code of its own",
        "--rewrite": "nothing of that kind is in this model",
        "--no-repeats": "the same layers, one by one: the numbers are the same",
    },
    SOLVE: {
        "--torch": "no op of this model is another one in another release",
        "--optimizer": "a decode step has none",
        "--checkpoint": "a decode step has no backward",
        "--assume": "nothing of that kind is unknown in this model",
        "--trust-remote-code": "this repository has no code of its own",
        "--rewrite": "nothing of that kind is in this model",
        "--no-repeats": "the same layers, one by one: the numbers are the same",
    },
    GRID: {
        "--torch": "no op of this model is another one in another release",
        "--assume": "nothing of that kind is unknown in this model",
        "--trust-remote-code": "this repository has no code of its own",
        "--no-repeats": "the same layers, one by one: the numbers are the same",
        "--rewrite": "nothing of that kind is in this model",
    },
    EXPLORE: {
        "--torch": "no op of this model is another one in another release",
        "--assume": "nothing of that kind is unknown in this model",
        "--trust-remote-code": "this repository has no code of its own",
        "--no-repeats": "the same layers, one by one: the numbers are the same",
        "--rewrite": "nothing of that kind is in this model",
    },
    TRACE: {
        "--rules": "a rule prices, and a trace has no prices; a phase of the file can be traced",
        "--assume": "nothing of that kind is unknown in this model",
        "--trust-remote-code": "this repository has no code of its own",
    },
    COMPARE: {
        "--torch": "the norm that it changes has no FLOPs that the peer counts",
        "--no-repeats": "the same layers, one by one: the numbers are the same",
    },
    DIFF: {
        "--no-repeats": "the same layers, one by one: the numbers are the same",
        "--rewrite": "nothing of that kind is in this model",
    },
    VALIDATE: {
        "--rewrite": "nothing of that kind is in this model",
    },
}


SHARED = {**WORKLOAD, **REQUESTS, **PRICING, **PRICED}
"""Options that one place reads for every command: each command only has to take them up."""
EVERY = 12
"""Of so many shared options `make test` tries one on each kind of source, in turn."""
QUICK = (CODE, NODES)
"""Commands on which it tries all of them: on code, and on a language model in one phase."""


def changes() -> Iterator[Any]:
    sources = [source for bases in CASES.values() for source in bases]
    for number, (base, options) in enumerate(sources):
        for name, ways in options.items():
            shared = ways == SHARED.get(name)
            place = list(SHARED).index(name) if shared else 0
            heavy = shared and base not in QUICK and (place + number) % EVERY > 0
            for way in ways:
                marks = [pytest.mark.heavy] * heavy + [pytest.mark.slow] * (base == EXPLAIN)
                yield pytest.param(base, way, marks=marks)


LOCKED = """
import torch
def small():
    return torch.nn.Linear(8, 8), (torch.ones(2, 8),)
"""


@pytest.fixture
def here(one_folder: Path, run: Run, request: pytest.FixtureRequest) -> Path:
    """A folder with each kind of source in it."""
    pytest.importorskip("transformers")
    (one_folder / "t.py").write_text(MODEL)
    (one_folder / "rules.py").write_text(RULE)
    (one_folder / "config.json").write_text(json.dumps(CONFIG))
    (one_folder / "deep.json").write_text(json.dumps(DEEP))
    (one_folder / "one.json").write_text(json.dumps(ONE))
    (one_folder / "steps.csv").write_text(
        "model,batch,ms,phase\nbuild,64,1,forward\nbuild,512,2,forward\nbuild,4096,6,forward\n"
        "wider,64,1,forward\nwider,8192,9,forward\n"
    )
    if not TRACED:
        assert run("trace", "t.py:build", "--phase", "forward", "-o", "saved.json").code == 0
        TRACED.append((one_folder / "saved.json").read_bytes())
    (one_folder / "saved.json").write_bytes(TRACED[0])
    if request.node.callspec.params["base"] == CHECK:
        (one_folder / "small.py").write_text(LOCKED)
        assert run("lock", "small.py:small", "--phase", "forward").code == 0
        (one_folder / "small.py").write_text(f"# the lock is of another file\n{LOCKED}")
    return one_folder


TRACED: list[bytes] = []
"""The graph of saved.json, once it is traced."""
PLAIN: dict[tuple[str, ...], tuple[str, dict[str, bytes]]] = {}
"""What some commands came to without the option, once for all tests of a process."""


def everything(ran: Ran, folder: Path) -> tuple[str, dict[str, bytes]]:
    """What a command printed, and what stands in the folder after it."""
    files = {
        str(p.relative_to(folder)): p.read_bytes()
        for p in folder.rglob("*")
        if p.is_file() and p.suffix != ".pyc"
    }
    return ran.out, files


@pytest.mark.parametrize(("base", "way"), list(changes()), ids=lambda part: " ".join(part))
def test_an_option_is_felt_or_refused(
    base: tuple[str, ...], way: tuple[str, ...], here: Path, run: Run
) -> None:
    from rooftrace.costmodels.ops.opview import own_rules

    with own_rules():
        before = PLAIN.get(base)
        if before is None:
            plain = run(*base)
            assert plain.code == 0, plain.err
            before = everything(plain, here)
            PLAIN[base] = before
        changed = run(*base, *way)
    if way[0] in CANNOT_CHANGE.get(base, {}):
        assert (everything(changed, here), changed.code) == (before, 0), "take it off the list"
        return
    if changed.code == 2:
        said = changed.err.splitlines()[-1]
        assert way[0].lstrip("-") in changed.err or way[-1] in changed.err, said
        assert "Traceback" not in changed.err
    else:
        assert (everything(changed, here), changed.code) != (before, 0), "nothing changed"


# --force: tests/reporting/test_outputs.py; --traceback: tests/reporting/test_script_targets.py
OF_ALL = {"--help", "--force", "--traceback"}


def test_every_option_of_every_command_has_a_case() -> None:
    for name, command in cli.commands.items():
        # Options of these are about files and devices; of run, in tests/reporting/test_run.py.
        if name in ("chips", "systems", "measure", "run"):
            continue
        assert isinstance(command, click.Command)
        tried = {way for _, options in CASES[name] for way in options}
        for parameter in command.params:
            spelled = {*parameter.opts, *parameter.secondary_opts}
            if isinstance(parameter, click.Option) and not spelled & OF_ALL:
                assert spelled & tried, f"{name} {parameter.opts[0]}"


def test_a_misspelt_option_is_answered_with_the_right_one(run: Run) -> None:
    for wrong, right in (("--bacth", "--batch"), ("--chips", "--chip"), ("--optimiser", "--optim")):
        ran = run("report", "examples/models/resnet.py:build", wrong, "3")
        assert ran.code == 2 and wrong in ran.err and right in ran.err
