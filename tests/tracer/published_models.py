"""Published checkpoints beside rooftrace: the table of tests/tracer/published, and its page.

python tests/tracer/published_models.py > docs/published-sizes.md
make published
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

import rooftrace as rt

FOLDER = Path(__file__).parent / "published"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "published-sizes.md"
LENGTHS = (10_240, 12_288)
"""Cached lengths: longer than each window, and multiples of what a compressor sums up."""
ARITHMETIC = re.compile(r"[\d_\s+*/()-]+")


def value(expression: str) -> int:
    """The whole number of an expression of the table."""
    assert ARITHMETIC.fullmatch(expression), expression
    number = eval(expression)
    assert isinstance(number, int), expression
    return number


@dataclass(frozen=True)
class Published:
    """A row of models.toml, which says what each field means."""

    folder: str
    format: str
    published: str
    source: str
    url: str
    cache: str
    beside: str = "0"
    why: str = ""
    predictors: bool = False
    undeclared: bool = False
    undated: bool = False
    lengths: Sequence[int] = LENGTHS

    @property
    def config(self) -> str:
        """The path of its config."""
        return str(FOLDER / self.folder / "config.json")

    @property
    def in_parameters(self) -> bool:
        """Whether the numbers are parameters, as no file says what they are stored in."""
        return self.undeclared or self.undated


def models() -> list[Published]:
    """The rows of the table."""
    with (FOLDER / "models.toml").open("rb") as file:
        return [Published(**row) for row in tomllib.load(file)["model"]]


def counted(model: Published, made: rt.types.ModelInfo) -> int:
    """What rooftrace counts for this row: bytes, or parameters."""
    return made.total_params if model.in_parameters else made.bytes_parameters


def cached(model: Published) -> int | None:
    """Bytes of the cache that one more token takes by rooftrace; None where nothing is cached."""
    if not model.cache:
        return None
    sizes = []
    for length in model.lengths:
        request = rt.types.Request(batch=1, kv=length)
        graph = rt.tools.trace_target(model.config, ["decode"], request)["decode"]
        sizes.append(rt.estimate(graph, "h200-sxm").memory.kv)
    size, rest = divmod(sizes[1] - sizes[0], model.lengths[1] - model.lengths[0])
    assert not rest, model.folder
    return size


# -- the page --------------------------------------------------------------------------------------

HEAD = """# Sizes of published checkpoints

`make published` writes this page from `tests/tracer/published`, which has the configs and the
sources. Each row sets the bytes of a published checkpoint beside those that `rt.inventory` counts
for its config, and the bytes that one more token takes in the cache, by hand, beside the cache of a
decode step. The tests hold the weights to 1 %, and the cache to the byte. What the Hub says was
read where public repositories quote it.

"""
COLUMNS = (
    "checkpoint", "format", "parameters", "published", "ours", "beside", "difference",
    "cache, by hand", "ours", "source",
)  # fmt: skip
FOOT = """
**ours** is what the class of the config holds. **beside** is what the checkpoint holds and the
class does not build, by hand; the difference is that of both together from what is published:

"""
END = """
(p) counts parameters, as these files do not say what the weights are stored in. Two lack the
`hf_quant_config.json` that declares it: rooftrace prices their weights unquantised, and says so.
Three have no dtype: it takes bf16 and says so, where the checkpoint has fp32. `--weights-dtype` and
`--dtype` tell it.

The cache is that of one sequence with 10,240 tokens (Whisper: 128) and more. What a window drops
and states that do not grow are not in it. An engine rounds its cache up to blocks, and may keep it
in another precision (`--kv-dtype`).
"""


def weights_columns(model: Published, made: rt.types.ModelInfo) -> list[str]:
    """The columns of a row on weights."""
    published, ours, beside = value(model.published), counted(model, made), value(model.beside)
    unit = " (p)" if model.in_parameters else ""
    off = f"{(ours + beside) / published - 1:+.2%}"
    return [
        model.folder.replace("--", "/"),
        model.format,
        f"{made.total_params:,}",
        f"{published:,}{unit}",
        f"{ours:,}",
        f"{beside:,}" if beside else "",
        "0.00%" if off[1:] == "0.00%" else off,
    ]


def row(model: Published, made: rt.types.ModelInfo, cache: int | None) -> str:
    """The row of a checkpoint: its inventory, and bytes of its cache for one more token."""
    by_hand = model.cache.replace("*", "\N{MULTIPLICATION SIGN}")
    if cache is None:
        cells = ["none", "none"]
    elif cache == 0:
        cells = ["0", "0"]
    else:
        cells = [f"{by_hand} = {value(model.cache):,}", f"{cache:,}"]
    cells = [*weights_columns(model, made), *cells, f"[{model.source}]({model.url})"]
    return f"| {' | '.join(cells)} |"


def page(rows: Sequence[str]) -> str:
    """The page with these rows."""
    head = [f"| {' | '.join(COLUMNS)} |", f"| --- | --- | {'---: | ' * 7}--- |"]
    others = [f"- {m.folder.replace('--', '/')}: {m.why}." for m in models() if m.why]
    return HEAD + "\n".join([*head, *rows]) + "\n" + FOOT + "\n".join(others) + "\n" + END


if __name__ == "__main__":
    print(page([row(m, rt.inventory(m.config), cached(m)) for m in models()]), end="")
