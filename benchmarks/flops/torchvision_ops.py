"""Our multiply-adds and parameters beside those that torchvision publishes with its weights.

    make flops TORCHVISION=installed     every weights entry of the installed torchvision
    make flops TORCHVISION=FILE          a CSV with columns weights, entry, ops_gmacs, num_params

torchvision counts products and convolutions of one sample of 512 x 512 (a video: 16 such frames)
after the transforms of the weights entry, with aux_loss where the weights have it, attention dense,
and rounds to 0.001 G (`get_ops` in its test/common_extended_utils.py).  No weights are needed:
builders are called with the entry, which sets sizes and heads, and load nothing.  Figures of
quantized entries are those of the model before it was quantized, which is what is traced.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import rooftrace as rt
from rooftrace.tracer.targets.target import built

SIDE, FRAMES = 512, 16
TOLERANCE = 0.0006  # G: half of the last digit that is published, and its rounding


def builders() -> dict[str, Any]:
    """The function that builds a model by the name of its weights class."""
    from torchvision.models import get_model_builder, get_model_weights, list_models

    return {get_model_weights(name).__name__: get_model_builder(name) for name in list_models()}


def installed() -> list[dict[str, str]]:
    """A row for every weights entry, as its own metadata has it."""
    from torchvision.models import get_model_weights

    return [
        {
            "weights": name,
            "entry": entry.name,
            "ops_gmacs": str(entry.meta["_ops"]),
            "num_params": str(entry.meta["num_params"]),
        }
        for name, builder in builders().items()
        for entry in get_model_weights(builder)
    ]


def module_of(builder: Any, entry: Any) -> nn.Module:
    """The model of a weights entry on meta, with nothing loaded."""
    from torchvision.models._api import WeightsEnum

    with (
        mock.patch.object(WeightsEnum, "get_state_dict", lambda *_, **__: {}),
        mock.patch.object(nn.Module, "load_state_dict", lambda *_, **__: None),
    ):
        module: nn.Module = built(lambda: builder(weights=entry), entry.name)
    return module.eval()


def sample(entry: Any, kind: str) -> tuple[Any, ...]:
    """What the model is called with: one sample after the transforms of the entry."""
    transform = entry.transforms()
    shape = (3, SIDE, SIDE)
    if kind == "optical_flow":
        return tuple(transform(torch.rand(1, *shape), torch.rand(1, *shape)))
    if kind == "detection":
        return ([transform(torch.rand(shape)).to("meta")],)
    batch = (1, FRAMES, *shape) if kind == "video" else (1, *shape)
    return (transform(torch.rand(batch)),)


def found_in_noise(module: nn.Module) -> dict[str, float]:
    """Which share of its boxes a part of a trained detector keeps: none of noise gets a score.

    Parts without a threshold keep all.  What really passes one depends on the weights.
    """
    return {
        f"density@{name}": 0.0 if part.score_thresh > 0 else 1.0
        for name, part in module.named_children()
        if isinstance(getattr(part, "score_thresh", None), float)
    }


def measured(builder: Any, row: dict[str, str]) -> tuple[float, int]:
    """G multiply-adds and parameters of a row."""
    from torchvision.models import get_model_weights

    entry = get_model_weights(builder)[row["entry"]]
    entry = entry.meta.get("unquantized", entry)
    kind = builder.__module__.split(".")[2]  # torchvision.models.KIND.file, or the file
    module = module_of(builder, entry)
    args = tuple(a.to("meta") if isinstance(a, torch.Tensor) else a for a in sample(entry, kind))
    graph = rt.trace(module, *args, phase="forward", assume=found_in_noise(module))
    macs = rt.plan(graph, "eager").total.flops(("matmul", "convolution")) / 2
    return macs / 1e9, sum(p.numel() for p in module.parameters())


def compared(rows: Sequence[dict[str, str]]) -> Iterator[str]:
    """A line for each row that differs, and a count."""
    known = builders()
    equal = 0
    for row in rows:
        name = f"{row['weights']}.{row['entry']}"
        published, parameters = float(row["ops_gmacs"]), int(row["num_params"])
        try:
            ours, counted = measured(known[row["weights"]], row)
        except Exception as error:  # whatever a builder or a transform raises
            first = str(error).strip().partition("\n")[0]
            yield f"{name}: {type(error).__name__}: {first}"
            continue
        if abs(ours - published) <= TOLERANCE and counted == parameters:
            equal += 1
            continue
        yield (
            f"{name}: {ours:.4f} G, published {published:g} G ({ours - published:+.4f}); "
            f"{counted:,} parameters, published {parameters:,}"
        )
    yield f"{equal} of {len(rows)} entries equal"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", help="the CSV of published figures, or: installed")
    parser.add_argument("--filter", default="", help="only weights whose name contains this")
    given = parser.parse_args(arguments)
    if given.file == "installed":
        rows = installed()
    else:
        with Path(given.file).open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    for line in compared([row for row in rows if given.filter in row["weights"]]):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
