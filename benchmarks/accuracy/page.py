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
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from points import Point, read_points

HERE = Path(__file__).parent
MEASUREMENTS = HERE.parents[1] / "measurements"
DOCS = HERE.parents[1] / "docs"
DRAWN = 800
"""Points in a figure."""

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
    figure: str
    text: str


PARTS = (
    Part(
        "Matrix products",
        "gemm.py",
        "gemm-*.csv.gz",
        "products.png",
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
        "attention.png",
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
        "images.png",
        """\
Published inference steps of about 1,000 models of timm (Apache-2.0), AMP fp16. Two
numbers a file are fitted to forty models of families that are kept apart: what the GPU
sustains of its arithmetic and of its bandwidth; `as they come` is without that fit. Shares between
classes of kernels are those of `typical-eager` and `typical-compiled`, which come from a study of
such files, these GPUs among them. Attention is that of the section above, with the numbers of A100;
what its kernel for masks of numbers takes was chosen with the rows of tiny_vit in sight, a family
that is kept apart. Everything else is a fact of how PyTorch, cuDNN and its compiler run an op, and
was studied on the families that are kept apart; of the others a sample (every sixth to tenth row)
was looked at after changes, and told where to look: what upsampling takes for a value was read off
efficientformerv2, and how much faster than the memory the last cache is (2) was chosen with the
compiled sample in sight. Files of other GPUs and releases of torch were never seen.

Names say too little about what ran, so parameters are compared: a row with those of the
re-parameterised model is traced so, and a row with those of neither form is left out and listed
below the table.""",
    ),
    Part(
        "Training steps of image models",
        "timm_steps.py",
        "timm-train-*.csv",
        "training.png",
        """\
The same for forward, loss, backward and SGD of torch 1.12, whose attention was written out. The
shares of the backward of depthwise and grouped convolutions were chosen with these rows in sight;
that batch norm passes twice over long rows, and that each gradient of a convolution reads the
incoming one, was found on the families that are kept apart. Two numbers are fitted as above.""",
    ),
)


def made(script: str, arguments: Sequence[str], title: str, figure: Path) -> str:
    """The table that a script prints, and its predictions as a figure."""
    with tempfile.TemporaryDirectory() as scratch:
        points = Path(scratch) / "points.csv"
        command = [sys.executable, str(HERE / script), *arguments, "--points", str(points)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{script} failed with {done.returncode}")
        draw(read_points(points), title, figure)
    picture = f"![{title}: predicted against measured]({figure.parent.name}/{figure.name})"
    return f"{done.stdout.strip()}\n\n{picture}"


def draw(points: Sequence[Point], title: str, figure: Path) -> None:
    """A parity plot of at most `DRAWN` of the points, evenly taken."""
    from rooftrace.reporting.figures import style
    from rooftrace.reporting.figures.parity import ParityPoint, parity_figure

    step = -(-len(points) // DRAWN)
    shown = [
        ParityPoint(one.label, one.predicted, one.measured, one.group, one.measured)
        for one in points[::step]
    ]
    some = f"every {step}th of {len(points):,} predictions" if step > 1 else "every prediction"
    style.save(parity_figure(shown, title, f"{some}; none was fitted to"), figure)


def section(part: Part, folder: Path, every: int, figures: Path) -> str:
    """What the script finds in the folder, or that there is nothing for it."""
    if not any(folder.glob(part.pattern)):
        return f"Not measured for this page: the folder has no `{part.pattern}`."
    arguments = [str(folder)]
    if part.script == "timm_steps.py":
        arguments += ["--every", str(every), "--files", part.pattern]
    return made(part.script, arguments, part.title, figures / part.figure)


OWN = """\
## This project's own runs

Files of `rooftrace measure` in [measurements](../measurements/README.md), each with the chip that
`rooftrace measure --chip-only` made on the same machine just before. The models of a run, sorted by
name, are dealt into two halves; a fit sees the steps of one half, the other is predicted, both
ways: without a fit (the measured chip alone), with two numbers fitted (what it sustains of its
arithmetic and of its bandwidth), and with as many as `rooftrace calibrate` chose."""


def page(folder: Path | None, every: int, figures: Path, tell: Callable[[str], None]) -> str:
    """The text of docs/accuracy.md; figures go into their folder."""
    lines = [HEAD, ""]
    for part in PARTS if folder else ():
        tell(part.title)
        assert folder is not None
        lines += [f"## {part.title}", "", part.text, "", section(part, folder, every, figures), ""]
    tell("own runs")
    own = made("own.py", [str(MEASUREMENTS)], "Own runs", figures / "own.png")
    return "\n".join([*lines, OWN, "", own, ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", help="measurements of others")
    parser.add_argument("--every", type=int, default=1, help="of the steps every n-th row only")
    parser.add_argument("--figures", type=Path, default=DOCS / "accuracy", help="where they go")
    given = parser.parse_args()
    if given.folder is not None and not given.folder.is_dir():
        raise SystemExit(f"{given.folder}: there is no such folder")
    given.figures.mkdir(parents=True, exist_ok=True)
    tell = lambda text: print(text, file=sys.stderr)  # noqa: E731
    print(page(given.folder, given.every, given.figures, tell), end="")


if __name__ == "__main__":
    main()
