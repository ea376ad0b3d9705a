"""docs/accuracy.md: what rooftrace's times were compared with, and how far off they are.

    python benchmarks/accuracy/page.py FOLDER [--every N] > docs/accuracy.md
    make accuracy DATA=FOLDER

FOLDER holds measurements of others (gemm-*.csv.gz, attention-*.csv.gz, timm-infer-*.csv); our own
stand in measurements/.  What is not there is left out, and said.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import rooftrace as rt
from rooftrace.costmodels.calibrate import Errors
from rooftrace.reporting.calibrating import Calibration, calibrate_run

HERE = Path(__file__).parent
MEASUREMENTS = HERE.parents[1] / "measurements"

HEAD = """# How accurate are the times?

FLOPs, bytes and memory are counts, and are held to other counters in the tests: see
[the counter graveyard](counter-graveyard.md), `make flops` and `make inductor`. Times are
predictions. This page compares them with measurements; `make accuracy DATA=folder` writes it.

Errors are (predicted - measured) / measured; mean, median and p90 are of their size, bias is with
the sign. Nothing in a table was fitted to the rows that it was tested on. Without knobs a time is a
ceiling from the datasheet, and real steps take 1.3 to 2.5 times as long on a GPU."""


@dataclass(frozen=True)
class Part:
    """A section made by a script beside this one, from files in the folder."""

    title: str
    script: str
    pattern: str
    text: str


PARTS = (
    Part(
        "Matrix products",
        "gemm.py",
        "gemm-*.csv.gz",
        """\
Latencies of cuBLAS products under CUDA graphs, from the aiconfigurator performance
database (Apache-2.0). Seven numbers a GPU and format are fitted to 200 rows, the rest
is predicted, five seeds: sustained arithmetic, sustained bandwidth, launch, and four
about tiles. The fp8 rows are of another library, and hold the kernel that quantises the
activations too: it is a second row of each case, which reads them twice and writes them
once. Part of what is left is that this library takes its tiles by the rows alone and does
not split K, where the model takes what suits the product.""",
    ),
    Part(
        "Attention kernels",
        "attention.py",
        "attention-*.csv.gz",
        """\
Latencies of FlashAttention 2 and 3 in vLLM, from the same database: prompts, and one
query on a cache. Nine numbers a GPU (eight on A100) for both phases are fitted to 200
rows of each: launch, bandwidth of the kernel that stores new entries, and seven about
attention kernels. Steps take attention from the same formula wherever a library's kernel
was called for. The last column is without a fit: the numbers that come along, and one
launch and one store for all GPUs.""",
    ),
    Part(
        "Steps of image models",
        "timm_steps.py",
        "timm-infer-*.csv",
        """\
Published inference steps of about 1,000 models of timm (Apache-2.0), AMP fp16. Two
numbers a file are fitted to forty models of families that are kept apart: what the GPU
sustains of its arithmetic and of its bandwidth. Shares between classes of kernels are
those of `typical-eager` and `typical-compiled`, which come from a study of such files,
these GPUs among them. Attention is that of the section above, with the numbers of A100; what
its kernel for masks of numbers takes was chosen with the rows of tiny_vit in sight, a family
that is kept apart. All other families are predicted from traces.""",
    ),
    Part(
        "Training steps of image models",
        "timm_steps.py",
        "timm-train-*.csv",
        """\
The same for forward, loss, backward and SGD of torch 1.12, whose attention was written out. The
shares of the backward of depthwise and grouped convolutions were chosen with these rows in sight;
two numbers are fitted as above.""",
    ),
)


def table_of(part: Part, folder: Path, every: int) -> str:
    """What the script prints, or why it cannot."""
    if not any(folder.glob(part.pattern)):
        return f"Not measured for this page: the folder has no `{part.pattern}`."
    command = [sys.executable, str(HERE / part.script), str(folder)]
    if part.script == "timm_steps.py":
        command += ["--every", str(every), "--files", part.pattern]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{part.script} failed with {done.returncode}")
    return done.stdout.strip()


def own_section() -> list[str]:
    """Every run in measurements/ that has its chip beside it, fitted and checked."""
    lines = [
        "## This project's own runs",
        "",
        "Files of `rooftrace measure` in [measurements](../measurements/README.md), with the chip",
        "that `rooftrace measure --chip-only` made on the same machine. Models are left out by",
        "fifths.",
    ]
    runs = sorted(MEASUREMENTS.glob("*.json.gz"))
    for path in runs:
        chip = path.with_name(path.name.removesuffix(".json.gz") + ".toml")
        if chip.exists():
            run = rt.load_run(path)
            lines += ["", f"### {path.name}", "", *own_rows(calibrate_run(run, rt.load_chip(chip)))]
    return lines


def own_rows(found: Calibration) -> list[str]:
    """Errors without and with a fit, and what was fitted."""
    rows = [
        "| steps | number | mean | median | p90 | bias | worst |",
        "|---|---:|---:|---:|---:|---:|---|",
        _row("all, by the measured chip alone", found.before),
        _row("those fitted to", found.fit.errors),
    ]
    if found.fit.left_out is not None:
        rows.append(_row("those left out of the fit", found.fit.left_out))
    rows += [_row(f"left out, mostly {kind}", one) for kind, one in found.fit.by_class.items()]
    values = ", ".join(f"{p.name} {p.value:.3g} (± {p.error:.0%})" for p in found.fit.parameters)
    unknown = ", ".join(found.fit.unidentified) or "none"
    return [*rows, "", f"Fitted: {values}. Not identified: {unknown}."]


def _row(name: str, one: Errors) -> str:
    numbers = (f"{one.mean:.1%}", f"{one.median:.1%}", f"{one.p90:.1%}", f"{one.bias:+.1%}")
    worst = f"{one.worst_case} {one.worst:+.0%}"
    return f"| {name} | {one.count} | {' | '.join(numbers)} | {worst} |"


def page(folder: Path | None, every: int, tell: Callable[[str], None]) -> str:
    """The text of docs/accuracy.md."""
    lines = [HEAD, ""]
    for part in PARTS if folder else ():
        tell(part.title)
        assert folder is not None
        lines += [f"## {part.title}", "", part.text, "", table_of(part, folder, every), ""]
    tell("own runs")
    return "\n".join([*lines, *own_section(), ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", help="measurements of others")
    parser.add_argument("--every", type=int, default=1, help="of the steps every n-th row only")
    given = parser.parse_args()
    if given.folder is not None and not given.folder.is_dir():
        raise SystemExit(f"{given.folder}: there is no such folder")
    print(page(given.folder, given.every, lambda text: print(text, file=sys.stderr)), end="")


if __name__ == "__main__":
    main()
