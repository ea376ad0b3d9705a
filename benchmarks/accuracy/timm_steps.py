"""Step times that others measured, predicted: timm's published benchmarks.

    python benchmarks/accuracy/timm_steps.py FOLDER            # every timm-*.csv in it
    python benchmarks/accuracy/timm_steps.py FOLDER --every 8  # a sample
    make accuracy DATA=FOLDER

Each file is one GPU and one way to run.  Its rows have a split: of those marked `calib` forty
(sorted by model and size, every fifth) are fitted to, all marked `dev` are predicted.  The numbers
that are free are few (`--free`); shares between classes of kernels are those that come with
rooftrace.  Models are built by timm and traced on meta under autocast to fp16 with norms in fp16,
which is how the files were made as far as their times tell; training with norms as they are, cross
entropy and SGD with momentum.  Traces are kept in --cache.
"""

from __future__ import annotations

import argparse
import csv
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rooftrace as rt
from rooftrace.costmodels.calibrate import Case, Errors, errors, fit, predict, step_case
from rooftrace.costmodels.knobs import load_knobs
from rooftrace.hardware.chip import Chip

FITTED, EVERY_CALIB = 40, 5
FREE = ("compute", "memory")


@dataclass(frozen=True)
class Row:
    """One measurement."""

    model: str
    size: int
    batch: int
    seconds: float
    split: str
    phase: str

    @property
    def name(self) -> str:
        suffix = "-training" if self.phase == "training" else ""
        return f"{self.model}-{self.size}-{self.batch}{suffix}"


@dataclass(frozen=True)
class Score:
    """How one file was predicted.  rows: how many; built: how many of their models trace."""

    file: str
    rows: int
    built: int
    values: dict[str, float]
    unidentified: tuple[str, ...]
    errors: Errors
    rank: float


def read(path: Path) -> list[Row]:
    """Rows with a time, sorted by model and size."""
    kind = "train" if "-train-" in path.name else "infer"
    with path.open(newline="", encoding="utf-8") as file:
        found = [
            Row(
                line["model"],
                int(float(line[f"{kind}_img_size"])),
                int(float(line[f"{kind}_batch_size"])),
                float(line[f"{kind}_step_time"]) * 1e-3,
                line["split"],
                "training" if kind == "train" else "forward",
            )
            for line in csv.DictReader(file)
            if line[f"{kind}_batch_size"] and line[f"{kind}_step_time"]
        ]
    return sorted(found, key=lambda row: (row.model, row.size))


def setting(path: Path) -> tuple[Chip, str]:
    """The chip and the execution model that a file name tells: "...-rtx4090-dynamo.csv".

    Before torch 2 attention was written out: those files are "naive".
    """
    name = path.stem
    chip = next((c for c in ("rtx3090", "rtx4090", "rtx5090") if c in name), None)
    if chip is None:
        raise SystemExit(f"{path.name}: no chip that rooftrace has is in its name")
    eager = "naive" if "-pt1" in name else "eager"
    execution = "compiled" if "dynamo" in name else eager
    return rt.load_chip(chip.replace("rtx", "rtx-")), execution


def traced(row: Row, cache: Path) -> rt.OpGraph | None:
    """The graph of a row; None where its model does not build or trace here."""
    path = cache / f"{row.name}.json.gz"
    if path.exists():
        return rt.load(path)
    import timm
    import timm.layers
    import torch

    class Amp(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> Any:
            with torch.autocast("cuda", torch.float16):
                return self.inner(x)

    def built() -> torch.nn.Module:
        try:
            return timm.create_model(row.model, img_size=row.size)
        except TypeError:  # takes any size
            return timm.create_model(row.model)

    timm.layers.set_fast_norm(row.phase == "forward")
    try:
        try:
            with torch.device("meta"):
                model = built()
        except RuntimeError:  # some run a forward while they are built
            model = built()
        channels = model.default_cfg["input_size"][0]
        x = torch.empty(row.batch, channels, row.size, row.size, device="meta")
        graph = rt.trace(
            Amp(model.eval()), x, phase=row.phase, loss=_cross_entropy, optimizer="sgd"
        )
    except Exception as error:  # whatever a library's model may raise
        print(f"{row.name}: {type(error).__name__}: {error}".splitlines()[0], file=sys.stderr)
        return None
    rt.save(graph, path)
    return graph


def _cross_entropy(output: Any) -> Any:
    import torch

    target = torch.zeros(output.shape[0], dtype=torch.long, device=output.device)
    return torch.nn.functional.cross_entropy(output, target)


def case_of(row: Row, chip: Chip, execution: str, cache: Path) -> Case | None:
    graph = traced(row, cache)
    if graph is None:
        return None
    family = row.model.partition("_")[0]
    return step_case(row.name, graph, chip, execution, row.seconds, family)


def score(
    path: Path, cache: Path, free: Sequence[str], every: int, tell: Callable[[str], None]
) -> Score:
    from scipy.stats import spearmanr

    chip, execution = setting(path)
    rows = read(path)
    calib = [row for row in rows if row.split == "calib"][::EVERY_CALIB][:FITTED]
    dev = [row for row in rows if row.split == "dev"][::every]

    def cases(chosen: Sequence[Row]) -> Iterator[Case]:
        for number, row in enumerate(chosen):
            if number % 50 == 0:
                tell(f"{path.stem}: {number} of {len(chosen)}")
            one = case_of(row, chip, execution, cache)
            if one is not None:
                yield one

    start = load_knobs("typical-compiled" if execution == "compiled" else "typical-eager")
    found = fit(list(cases(calib)), start, free, check=False)
    held = list(cases(dev))
    predicted = predict(held, found.knobs)
    measured = [case.seconds for case in held]
    return Score(
        path.stem.removeprefix("timm-"),
        len(dev),
        len(held),
        {p.name: p.value for p in found.parameters},
        found.unidentified,
        errors([case.name for case in held], predicted, measured),
        float(spearmanr(predicted, measured)[0]),
    )


def table(scores: Sequence[Score]) -> str:
    lines = [
        "| file | rows | mean | median | p90 | bias | Spearman | worst | fitted |",
        "|---|---:|---:|---:|---:|---:|---:|---|---|",
    ]
    for s in scores:
        e = s.errors
        values = ", ".join(f"{name} {value:.3g}" for name, value in s.values.items())
        lines.append(
            f"| {s.file} | {s.built} of {s.rows} | {e.mean:.1%} | {e.median:.1%} | {e.p90:.1%} | "
            f"{e.bias:+.1%} | {s.rank:.3f} | {e.worst_case} {e.worst:+.0%} | {values} |"
        )
    mean = [
        sum(getattr(s.errors, n) for s in scores) / len(scores) for n in ("mean", "median", "p90")
    ]
    lines.append(f"| mean of the files | | {mean[0]:.1%} | {mean[1]:.1%} | {mean[2]:.1%} | | | | |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--cache", type=Path, default=Path("out/accuracy"), help="where traces are kept"
    )
    parser.add_argument("--every", type=int, default=1, help="predict every n-th row only")
    parser.add_argument("--free", default=",".join(FREE), help="knobs to fit, at most five")
    parser.add_argument("--files", default="timm-*.csv", help="which files of the folder")
    given = parser.parse_args()
    files = sorted(given.folder.glob(given.files))
    if not files:
        raise SystemExit(f"{given.folder}: no {given.files} in it")
    given.cache.mkdir(parents=True, exist_ok=True)
    warnings.filterwarnings("ignore")
    free = given.free.split(",")
    if len(free) > 5:
        raise SystemExit(f"--free {given.free}: at most five numbers a file")
    tell = lambda text: print(text, file=sys.stderr)  # noqa: E731
    print(table([score(path, given.cache, free, given.every, tell) for path in files]))


if __name__ == "__main__":
    main()
