"""Steps of language models on two A100 that NeuSight's authors measured, predicted.

    python benchmarks/accuracy/neusight.py FOLDER [--cache DIR] [--points FILE.csv]

FOLDER/llm has neusight_a100.csv and configs/ (NeuSight's labels, MIT).  They ran transformers
4.38.1 and torch 2.1 with attention written out, in fp32 without TF32: inference without gradients,
training in train mode with a forward and a backward that were timed apart, the loss between them in
neither.  There was no optimizer, and gradients were added to those of the step before.  Models are
those of the installed transformers, with the attention of 4.38.1.

Before each step they emptied the cache of the allocator, so a training forward asks the driver for
every block that it saves.  The backward, which finds blocks to use again, stands beside it.

Two numbers, what a GPU sustains of its arithmetic and of its bandwidth, are fitted to the eager
rows of a GPU without one model, and tested on that model; compiled rows take those of the eager
ones.
"""

from __future__ import annotations

import csv
import json
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from kept import kept
from points import Point, parser_of, write_points
from scores import HEAD, left_out, line, one_factor, with_numbers

import rooftrace as rt
from rooftrace.costmodels.fusion import Plan, plan
from rooftrace.costmodels.kernels import Knobs
from rooftrace.costmodels.kernels.seconds import KernelTable, kernel_table
from rooftrace.costmodels.timing.steps import time_plan
from rooftrace.graph import OpGraph
from rooftrace.measured.fit.cases import Case, predict
from rooftrace.measured.fit.fitting import FEW

CHIPS = {"NVIDIA_A100_80GB_PCIe": "a100-pcie-80", "NVIDIA_A100-PCIE-40GB": "a100-pcie-40"}


@dataclass(frozen=True)
class Row:
    """One measurement.  forward, backward: seconds; backward is 0 in inference."""

    chip: str
    model: str
    phase: str
    seq: int
    batch: int
    compiled: bool
    forward: float
    backward: float

    @property
    def name(self) -> str:
        ran = " compiled" if self.compiled else ""
        return f"{self.model} {self.phase} {self.batch}x{self.seq}{ran}"

    @property
    def trace(self) -> str:
        return f"neusight-{self.model}-{self.phase}-{self.batch}x{self.seq}"


def read(path: Path) -> list[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        return [
            Row(
                CHIPS[line["gpu"]],
                line["model"],
                {"train": "training", "inf": "forward"}[line["mode"]],
                int(line["seq"]),
                int(line["batch"]),
                line["fused"] == "True",
                float(line["fw_latency"]) * 1e-3,
                float(line["bwall_latency"]) * 1e-3,
            )
            for line in csv.DictReader(file)
        ]


# -- attention as transformers 4.38 wrote it out, by family ----------------------------------------


def _scores(query: Any, key: Any) -> Any:
    return query @ key.transpose(-1, -2)


def _finished(module: Any, scores: Any, value: Any, dropout: float) -> tuple[Any, None]:
    import torch

    shares = torch.nn.functional.softmax(scores, dim=-1)
    shares = torch.nn.functional.dropout(shares, p=dropout, training=module.training)
    return (shares @ value).transpose(1, 2).contiguous(), None


def _gpt2(
    module: Any, query: Any, key: Any, value: Any, mask: Any, dropout: float = 0.0, **_: Any
) -> Any:
    """The mask is of booleans, and chooses."""
    import torch

    scores = _scores(query, key) / query.shape[-1] ** 0.5
    scores = torch.where(mask[:1], scores, torch.finfo(scores.dtype).min)
    return _finished(module, scores, value, dropout)


def _bert(
    module: Any, query: Any, key: Any, value: Any, mask: Any, dropout: float = 0.0, **_: Any
) -> Any:
    """The mask is added, even where it hides nothing."""
    scores = _scores(query, key) / query.shape[-1] ** 0.5
    scores = scores + query.new_zeros(query.shape[0], 1, 1, key.shape[-2])
    return _finished(module, scores, value, dropout)


def _opt(
    module: Any, query: Any, key: Any, value: Any, mask: Any, dropout: float = 0.0, **_: Any
) -> Any:
    """Heads are copied apart; the mask is added, and minus infinity taken away."""
    import torch

    query, key, value = (each.contiguous() for each in (query, key, value))
    scores = _scores(query, key) + mask
    lowest = torch.finfo(scores.dtype).min
    scores = torch.max(scores, torch.full((), lowest, device=scores.device))
    return _finished(module, scores, value, dropout)


def _switch(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    dropout: float = 0.0,
    position_bias: Any = None,
    **_: Any,
):
    """One sum of positions and mask, made once, is added."""
    scores = _scores(query, key)
    scores += position_bias if position_bias is not None else mask
    return _finished(module, scores, value, dropout)


FORMS = {"gpt2": _gpt2, "bert": _bert, "opt": _opt, "switch_transformers": _switch}


def _written_out() -> None:
    """Register the forms with transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask, sdpa_mask

    def choosing(*given: Any, **named: Any) -> Any:
        return sdpa_mask(*given, **{**named, "allow_is_causal_skip": False})

    for family, form in FORMS.items():
        AttentionInterface.register(f"written_out_{family}", form)
        mask = choosing if family == "gpt2" else eager_mask
        AttentionMaskInterface.register(f"written_out_{family}", mask)


def built(config: Path, training: bool) -> Any:
    """The model on meta."""
    import torch
    import transformers

    told = json.loads(config.read_text(encoding="utf-8"))
    family = told["model_type"]
    told = {k: v for k, v in told.items() if k not in ("torch_dtype", "transformers_version")}
    read = transformers.AutoConfig.for_model(**told)
    read.use_cache = False
    kinds = {
        "bert": transformers.BertForPreTraining
        if training
        else transformers.BertForSequenceClassification,
        "gpt2": transformers.GPT2LMHeadModel,
        "opt": transformers.OPTForCausalLM,
        "switch_transformers": transformers.SwitchTransformersForConditionalGeneration,
    }
    read._attn_implementation = f"written_out_{family}"
    with torch.device("meta"):
        model = kinds[family](read)
    return model.train() if training else model.eval()


def training_step(model: Any, ids: Any) -> None:
    """Forward, loss and backward; gradients are added to those of the step before."""
    import torch

    more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    output = model(input_ids=ids, **more)
    logits = output["prediction_logits" if "prediction_logits" in output else "logits"]
    torch.nn.functional.cross_entropy(logits.view(-1, logits.size(-1)), ids.view(-1)).backward()


def traced(row: Row, folder: Path) -> OpGraph:
    import torch

    model = built(folder / "configs" / f"{row.model}.json", row.phase == "training")
    ids = torch.ones(row.batch, row.seq, dtype=torch.long, device="meta")
    if row.phase == "training":
        for weight in model.parameters():
            weight.grad = torch.empty_like(weight)
        return rt.trace(training_step, model, ids)
    more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    return rt.trace(model, input_ids=ids, **more)


# -- cases -----------------------------------------------------------------------------------------


def part_case(name: str, planned: Plan, chip: str, seconds: float, group: str, parts: str) -> Case:
    """The case of one part of a step, without the forward of its loss."""
    on = rt.load_chip(chip)
    table, place = kernel_table(planned, on)
    ops = planned.graph.ops
    leads = [ops[each.ops[0]] for each in planned.groups]
    chosen = [
        i
        for i, op in enumerate(leads)
        if (op.part == "forward") == (parts == "forward")
        and not (op.part == "forward" and op.family == "loss")
    ]
    rows = [place[i] for i in chosen]
    data = {column: values[rows] for column, values in table.data.items()}
    data["count"] = np.array([float(planned.groups[i].times) for i in chosen])
    return Case(
        name=name,
        table=KernelTable(on, table.kind[rows], data),
        seconds=seconds,
        dispatches=int(data["count"].sum()),
        group=group,
        cell=time_plan(planned, on).step.cell,
    )


@dataclass(frozen=True)
class Measured:
    """A row with the cases of its parts, forward first."""

    row: Row
    cases: tuple[Case, ...]


def measured(
    rows: Sequence[Row], folder: Path, cache: Path, tell: Callable[[str], None]
) -> list[Measured]:
    """Each row, traced."""
    found = []
    for row in rows:
        tell(row.name)
        graph = kept(cache / f"{row.trace}.json.gz", partial(traced, row, folder))
        planned = plan(graph, "compiled" if row.compiled else "eager")
        parts = [("forward", row.forward)]
        if row.phase == "training":
            parts.append(("backward", row.backward))
        cases = (
            part_case(f"{row.name} {part}", planned, row.chip, seconds, row.model, part)
            for part, seconds in parts
        )
        found.append(Measured(row, tuple(cases)))
    return found


# -- the table -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Predicted:
    """Seconds of a row: of its forward and, in training, of its backward."""

    row: Row
    measured: tuple[float, ...]
    by: dict[str, tuple[float, ...]]  # by what was fitted


@dataclass(frozen=True)
class Fitted:
    """By chip and model: the numbers of a fit to the other models."""

    numbers: dict[tuple[str, str], tuple[float, ...]]

    def told(self) -> str:
        """Their medians."""
        lines = []
        for chip in CHIPS.values():
            values = [numbers for (on, _), numbers in self.numbers.items() if on == chip]
            middle = (
                f"{name} {statistics.median(each[place] for each in values):.3g}"
                for place, name in enumerate(FEW)
            )
            lines.append(f"Fitted on {chip} (median over the models left out): {', '.join(middle)}")
        return "\n\n".join(lines)


def fitted_to(found: Sequence[Measured]) -> Fitted:
    """Two numbers for each chip, without each of its models, from eager rows."""
    numbers = {}
    for chip in CHIPS.values():
        here = [one for one in found if one.row.chip == chip]
        cases = [case for one in here if not one.row.compiled for case in one.cases]
        by_model = left_out(cases, _start(chip, False), (one.row.model for one in here))
        numbers |= {(chip, model): values for model, values in by_model.items()}
    return Fitted(numbers)


def _start(chip: str, compiled: bool) -> Knobs:
    return Knobs.typical(rt.load_chip(chip), compiled)


def predicted(found: Sequence[Measured], numbers: Fitted) -> list[Predicted]:
    """Each row by the typical shares, by these times one factor, and by two fitted numbers."""
    made = []
    for one in found:
        start = _start(one.row.chip, one.row.compiled)
        own = with_numbers(start, FEW, numbers.numbers[one.row.chip, one.row.model])
        by = {"nothing": tuple(predict(one.cases, start))}
        by["two numbers"] = tuple(predict(one.cases, own))
        made.append(Predicted(one.row, tuple(case.seconds for case in one.cases), by))
    for chip in CHIPS.values():
        here = [one for one in made if one.row.chip == chip]
        scaled = one_factor(
            [sum(one.by["nothing"]) for one in here],
            [sum(one.measured) for one in here],
            [one.row.model for one in here],
            [not one.row.compiled for one in here],
        )
        for one, seconds in zip(here, scaled, strict=True):
            one.by["one factor"] = (seconds,)
    return made


def table(made: Sequence[Predicted]) -> str:
    """Whole steps by kind, and the two parts of training."""
    trained = [one for one in made if one.row.phase == "training"]
    kinds = {
        "inference, A100 PCIe 40 GB": [one for one in made if one.row.phase == "forward"],
        "training, A100 PCIe 80 GB": trained,
        "all": list(made),
    }
    told = [HEAD]
    for kind, chosen in kinds.items():
        names, seconds = [one.row.name for one in chosen], [sum(one.measured) for one in chosen]
        for fit in ("nothing", "one factor", "two numbers"):
            told.append(line(kind, fit, names, [sum(one.by[fit]) for one in chosen], seconds))
    names = [one.row.name for one in trained]
    for part, kind in enumerate(("forward of training", "backward of training")):
        seconds = [one.measured[part] for one in trained]
        for fit in ("nothing", "two numbers"):
            told.append(line(kind, fit, names, [one.by[fit][part] for one in trained], seconds))
    return "\n".join(told)


def main() -> None:
    given = parser_of(__doc__, cached=True).parse_args()
    folder = given.folder / "llm"
    if not (folder / "neusight_a100.csv").exists():
        raise SystemExit(f"{folder}: no neusight_a100.csv in it")
    warnings.filterwarnings("ignore")
    _written_out()
    tell = lambda text: print(text, file=sys.stderr)  # noqa: E731
    found = measured(read(folder / "neusight_a100.csv"), folder, given.cache, tell)
    numbers = fitted_to(found)
    made = predicted(found, numbers)
    print(f"{table(made)}\n\n{numbers.told()}")
    if given.points:
        points = [
            Point(one.row.name, sum(one.by["nothing"]), sum(one.measured), one.row.phase).of(
                f"NeuSight {one.row.chip} {one.row.phase}", each.cases[0]
            )
            for one, each in zip(made, found, strict=True)
        ]
        write_points(given.points, points)


if __name__ == "__main__":
    main()
