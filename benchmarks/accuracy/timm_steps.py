"""Step times that others measured, predicted: timm's published benchmarks.

    python benchmarks/accuracy/timm_steps.py FOLDER            # every timm-*.csv in it
    python benchmarks/accuracy/timm_steps.py FOLDER --every 8  # a sample
    make accuracy DATA=FOLDER

Each file is one GPU and one way to run.  Its rows have a split: of those marked `calib` forty
(sorted by model and size, every fifth) are fitted to, all marked `dev` are predicted.  The numbers
that are free are few (`--free`); shares between classes of kernels are those that come with
rooftrace.  Models are built by timm and traced on meta; precision, layout, chip and torch.compile
are read off the file's name, as timm's own results have them, and the host is a desktop
("infer-amp-nchw-pt240-cu124-rtx4090-dynamo").  Norms run in the precision of autocast in inference,
which is how the files were made as far as their times tell; training has norms as they are, cross
entropy and SGD with momentum.  A row whose parameters are those of the re-parameterised model is
traced so; one whose parameters are of neither form is left out and listed.  Traces are kept in
--cache.
"""

from __future__ import annotations

import csv
import re
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from points import Point, parser_of, write_points
from timm_models import PLAIN, Counts, Zoo, graph_of

import rooftrace as rt
from rooftrace.costmodels.fusion.executions import execution_model
from rooftrace.hardware.chip import Chip
from rooftrace.hardware.chipfile.reading import load_host
from rooftrace.measured.fit.calibrating import usual_start
from rooftrace.measured.fit.cases import Case, Errors, errors, predict, step_case
from rooftrace.measured.fit.fitting import fit

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
    parameters: float | None = None  # millions, of the model that ran

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
    typical: float  # mean error of the numbers that come along, with nothing fitted
    others: tuple[str, ...]  # rows of models that are not those that ran, with their counts
    folded: tuple[str, ...]  # rows that were traced re-parameterised


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
                line.get("split") or _split(line["model"]),
                "training" if kind == "train" else "forward",
                float(line["param_count"]) if line.get("param_count") else None,
            )
            for line in csv.DictReader(file)
            if line[f"{kind}_batch_size"] and line[f"{kind}_step_time"]
        ]
    return sorted(found, key=lambda row: (row.model, row.size))


def _split(model: str) -> str:
    """Of a file that does not say: a fifth of the families is for the fit."""
    return "calib" if zlib.crc32(model.partition("_")[0].encode()) % 5 == 0 else "dev"


@dataclass(frozen=True)
class Setting:
    """How a file was measured.  amp: what autocast runs in, "" where it is off; dtype: of the model
    and its input; layout: nchw or nhwc; torch: the release that ran, None before 2.0."""

    chip: Chip
    execution: str
    amp: str
    dtype: str
    layout: str
    torch: str | None = None

    @property
    def name(self) -> str:
        """What sets its graphs apart from the usual ones."""
        usual = (self.amp, self.dtype, self.layout) == ("float16", "float32", "nchw")
        how = "" if usual else f"-{self.amp or self.dtype}-{self.layout}"
        # From 2.2 to 2.4 the forms of these models' ops are the same.
        if self.torch is None:
            return f"{how}-torch1"
        same = (2, 1) < tuple(map(int, self.torch.split("."))) <= (2, 4)
        return how if same else f"{how}-torch{self.torch}"


_CHIPS = ("3090", "4090", "5090", "pro6000maxq", "pro6000")
_TORCH = re.compile(r"pt(\d)(\d+?)(\d?)")
"""In the name of a file: pt240 is torch 2.4.0, pt291 is 2.9.1, pt2100 is 2.10.0, pt113 is 1.13."""
_PRECISIONS = {
    "amp": ("float16", "float32"),
    "amp_fp16": ("float16", "float32"),
    "amp_bf16": ("bfloat16", "float32"),
    "fp16": ("", "float16"),
    "bf16": ("", "bfloat16"),
    "fp32": ("", "float32"),
}


def setting(path: Path) -> Setting | None:
    """What a file name tells: "...-infer-amp-nchw-pt240-cu124-rtx4090-dynamo.csv"; None where it
    names no chip, or no precision, that is known here.

    Before torch 2 attention was written out, as timm still has it: those files are "naive".
    """
    words = path.stem.split("-")
    chip = next((c for word in words for c in _CHIPS if word.removeprefix("rtx") == c), None)
    precision = next((_PRECISIONS[word] for word in words if word in _PRECISIONS), None)
    if chip is None or precision is None:
        return None
    release = next((m for word in words if (m := _TORCH.fullmatch(word))), None)
    torch = f"{release[1]}.{release[2]}" if release and int(release[1]) >= 2 else None
    eager = "naive" if any(word.startswith("pt1") for word in words) else "eager"
    execution = "compiled" if "dynamo" in words else eager
    name = chip if chip.startswith("pro") else f"rtx-{chip}"
    layout = "nhwc" if "nhwc" in words else "nchw"
    chip = load_host("desktop").under(rt.load_chip(name))  # such cards run in desktops
    return Setting(chip, execution, *precision, layout, torch)


def traced(row: Row, how: Setting, cache: Path, form: str = PLAIN) -> rt.types.OpGraph | None:
    """The graph of a row; None where its model does not build or trace here."""
    told = f"-{form}" if form else ""
    path = cache / f"{row.name}{how.name}{told}.json.gz"
    if path.exists():
        return rt.load(path)
    run = {"amp": how.amp, "dtype": how.dtype, "layout": how.layout, "torch": how.torch or ""}
    try:
        graph = graph_of(row.model, row.size, row.batch, form, row.phase, run)
    except Exception as error:  # whatever a library's model may raise
        print(f"{row.name}: {type(error).__name__}: {error}".splitlines()[0], file=sys.stderr)
        return None
    rt.save(graph, path)
    return graph


def case_of(row: Row, how: Setting, cache: Path, form: str = PLAIN) -> Case | None:
    graph = traced(row, how, cache, form)
    if graph is None:
        return None
    family = row.model.partition("_")[0]
    return step_case(row.name, graph, how.chip, how.execution, row.seconds, family)


def score(
    path: Path,
    how: Setting,
    cache: Path,
    free: Sequence[str],
    every: int,
    tell: Callable[[str], None],
) -> tuple[Score, list[Point]]:
    from scipy.stats import spearmanr

    rows = read(path)
    calib = [row for row in rows if row.split == "calib"][::EVERY_CALIB][:FITTED]
    dev = [row for row in rows if row.split == "dev"][::every]
    zoo = Zoo(cache)
    others: list[str] = []
    folded: list[str] = []

    def cases(chosen: Sequence[Row]) -> Iterator[Case]:
        for number, row in enumerate(chosen):
            if number % 50 == 0:
                tell(f"{path.stem}: {number} of {len(chosen)}")
                zoo.save()
            counts = zoo.counts(row.model)
            if counts is None:  # timm does not build it
                continue
            form = counts.form(row.parameters)
            if form is None:
                others.append(f"{row.model} ({row.parameters:g}, {_both(counts)})")
                continue
            if form:
                folded.append(f"{row.model} ({row.parameters:g})")
            one = case_of(row, how, cache, form)
            if one is not None:
                yield one
        zoo.save()

    start = usual_start(how.chip, execution_model(how.execution))
    found = fit(list(cases(calib)), start, free, check=False)
    held = list(cases(dev))
    predicted = predict(held, found.knobs)
    measured = [case.seconds for case in held]
    result = Score(
        path.stem.removeprefix("timm-"),
        len(dev),
        len(held),
        {p.name: p.value for p in found.parameters},
        found.unidentified,
        errors([case.name for case in held], predicted, measured),
        float(spearmanr(predicted, measured)[0]),
        errors([case.name for case in held], predict(held, start), measured).mean,
        tuple(dict.fromkeys(others)),
        tuple(dict.fromkeys(folded)),
    )
    labels = [case.name for case in held]
    usual = ("infer", "train", "amp", "nchw")
    words = [w for w in result.file.split("-") if w not in usual and not w.startswith("cu1")]
    group = " ".join(words)
    found = zip(labels, predict(held, start), measured, held, strict=True)
    return result, [
        Point(label, p, m, group).of(f"timm {result.file}", case) for label, p, m, case in found
    ]


def _both(counts: Counts) -> str:
    folded = "" if counts.fused is None else f", {counts.fused:.2f} re-parameterised"
    return f"{counts.plain:.2f} built{folded}"


def table(scores: Sequence[Score]) -> str:
    lines = [
        "| file | rows | mean | median | p90 | bias | Spearman | worst | as they come | fitted |",
        "|---|---:|---:|---:|---:|---:|---:|---|---:|---|",
    ]
    for s in scores:
        e = s.errors
        values = ", ".join(f"{name} {value:.3g}" for name, value in s.values.items())
        lines.append(
            f"| {s.file} | {s.built} of {s.rows} | {e.mean:.1%} | {e.median:.1%} | {e.p90:.1%} | "
            f"{e.bias:+.1%} | {s.rank:.3f} | {e.worst_case} {e.worst:+.0%} | {s.typical:.1%} | "
            f"{values} |"
        )
    mean = [
        sum(getattr(s.errors, n) for s in scores) / len(scores) for n in ("mean", "median", "p90")
    ]
    typical = sum(s.typical for s in scores) / len(scores)
    lines.append(
        f"| mean of the files | | {mean[0]:.1%} | {mean[1]:.1%} | {mean[2]:.1%} | | | | "
        f"{typical:.1%} | |"
    )
    for said, names in (("Left out", "others"), ("Traced re-parameterised", "folded")):
        found = [f"{s.file}: {', '.join(getattr(s, names))}" for s in scores if getattr(s, names)]
        listed = "; ".join(found) or "none"
        lines += ["", f"{said} (millions of parameters): {listed}."]
    return "\n".join(lines)


def main() -> None:
    parser = parser_of(__doc__, cached=True)
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
    scores: list[Score] = []
    points: list[Point] = []
    for path in files:
        how = setting(path)
        if how is None:
            tell(f"{path.name}: left out: its name says no chip or precision that is known here")
            continue
        one, more = score(path, how, given.cache, free, given.every, tell)
        scores, points = [*scores, one], [*points, *more]
    if not scores:
        raise SystemExit(f"{given.folder}: none of {len(files)} files could be used")
    print(table(scores))
    if given.points:
        write_points(given.points, points)


if __name__ == "__main__":
    main()
