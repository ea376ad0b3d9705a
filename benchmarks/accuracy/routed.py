"""How many rows each expert of a measured layer got: the draws of the published collectors.

Of a layer of E experts on one of P processes, the busiest.  `balanced`: token t takes the experts
t + j S (j < k, S = ceil(E / k)).  `power_law_A`: shares of experts are drawn from a density x^-A
between 1 and 0.8 T (between 0.01 and 2 where T k is at most E), rounded, limited to T, and brought
to T k rows in all: by raising the least or lowering the most, in later versions evenly over
processes.  Experts are dealt to tokens in order of their rows.  A router of groups then keeps the 4
of 8 groups that have most of a token's experts (2 at most count), and fills up with the first ones.
Source of these facts: aiconfigurator (collector/helper.py, Apache-2.0).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

DRAWS = 5
"""Layers are measured on as many draws, one after another."""


GROUPS, KEPT = 8, 4
"""Groups of experts of DeepSeek's router, and how many a token keeps."""


@dataclass(frozen=True)
class Draw:
    """What one process gets, on average over draws."""

    rows: float  # of its experts
    hit: float  # its experts that have rows
    tokens: float  # with at least one of them


@cache
def drawn(
    tokens: int,
    experts: int,
    k: int,
    processes: int,
    rule: str,
    evenly: bool,
    grouped: bool = False,
) -> Draw:
    """The draw of T tokens over E experts.

    evenly: by the later versions of the rule.  grouped: through a router of groups.
    """
    rng, local = np.random.default_rng(0), experts // processes
    if not rule.startswith("power_law"):
        chosen = _balanced(tokens, experts, k)
        each = [np.bincount(chosen.ravel(), minlength=experts)]
        choices = [chosen]
    else:
        exponent = float(rule.rpartition("_")[2])
        each = [_drawn(rng, tokens, experts, k, processes, exponent, evenly) for _ in range(DRAWS)]
        dealt = processes > 1 or grouped
        choices = [_dealt(counts, tokens, k) for counts in each] if dealt else []
    if grouped and experts % GROUPS == 0:
        choices = [_of_groups(chosen, experts) for chosen in choices]
        each = [np.bincount(chosen.ravel(), minlength=experts) for chosen in choices]
    mine = [counts[:local] for counts in each]
    some = [float((chosen < local).any(axis=1).sum()) for chosen in choices] or [float(tokens)]
    return Draw(
        rows=float(np.mean([counts.sum() for counts in mine])),
        hit=float(np.mean([(counts > 0).sum() for counts in mine])),
        tokens=float(np.mean(some)),
    )


def _of_groups(chosen: np.ndarray, experts: int) -> np.ndarray:
    """What a router of groups makes of the experts [T, k] of tokens."""
    tokens, k = chosen.shape
    wanted = np.zeros((tokens, experts), dtype=np.int16)
    np.put_along_axis(wanted, chosen, 1, axis=1)
    inside = wanted.reshape(tokens, GROUPS, -1)
    best = np.argsort(-np.minimum(inside.sum(axis=2), 2), axis=1, kind="stable")[:, :KEPT]
    kept = np.zeros((tokens, GROUPS, 1), dtype=np.int16)
    np.put_along_axis(kept[:, :, 0], best, 1, axis=1)
    score = (inside * kept + kept).reshape(tokens, experts)
    return np.argsort(-score, axis=1, kind="stable")[:, :k]


def _balanced(tokens: int, experts: int, k: int) -> np.ndarray:
    step = -(-experts // k)
    token, choice = np.arange(tokens)[:, None], np.arange(k)[None, :]
    first = token if tokens >= step else token * step / tokens
    return ((first + choice * step) % experts).astype(int)


def _drawn(
    rng: np.random.Generator,
    tokens: int,
    experts: int,
    k: int,
    processes: int,
    exponent: float,
    evenly: bool,
) -> np.ndarray:
    """The rows of each expert, those of the busiest process first."""
    least, most = (1.0, 0.8 * tokens) if tokens * k > experts else (0.01, 2.0)
    power = 1 - exponent
    shares = (
        (most**power - least**power) * rng.random(experts) + least**power
    ) ** (1 / power)  # fmt: skip
    counts = np.minimum(np.rint(shares / shares.sum() * tokens * k), tokens).astype(int)
    if evenly:
        parts = counts.reshape(processes, -1)
        wanted = _spread(parts, tokens * k, tokens)
        by_process = np.stack(
            [_level(part, total, tokens) for part, total in zip(parts, wanted, strict=True)]
        )
    else:
        by_process = _level(counts, tokens * k, tokens).reshape(processes, -1)
    busiest = by_process.sum(axis=1).argmax()
    by_process[[0, busiest]] = by_process[[busiest, 0]]
    return by_process.ravel()


def _spread(parts: np.ndarray, total: int, most: int) -> list[int]:
    """Rows of each process, so that they are `total`: as many more, or fewer, for each."""
    sums = parts.sum(axis=1)
    left = total - int(sums.sum())
    sign, left = (1, left) if left > 0 else (-1, -left)
    room = parts.shape[1] * most - sums if sign > 0 else sums
    more = np.zeros(len(parts), dtype=int)
    while left:
        open_ = np.flatnonzero(more < room)[:left]
        each = np.minimum(max(left // len(open_), 1), room[open_] - more[open_])
        more[open_] += each
        left -= int(each.sum())
    return [int(x) for x in sums + sign * more]


def _level(counts: np.ndarray, total: int, most: int) -> np.ndarray:
    """Counts that are `total`, by raising the least, or lowering the most, to one level."""
    missing = total - int(counts.sum())
    if not missing:
        return counts
    raising = missing > 0
    clip = np.maximum if raising else np.minimum
    low, high = 0, most if raising else int(counts.max())
    while low < high:  # the highest level below `total`, or the lowest above
        middle = (low + high + raising) // 2
        fits = (
            clip(counts, middle).sum() <= total if raising else clip(counts, middle).sum() >= total
        )
        if raising:
            low, high = (middle, high) if fits else (low, middle - 1)
        else:
            low, high = (low, middle) if fits else (middle + 1, high)
    levelled = clip(counts, low)
    rest = total - int(levelled.sum())
    at_level = np.flatnonzero(levelled == low)[: abs(rest)]
    levelled[at_level] += np.sign(rest)
    return levelled


def _dealt(counts: np.ndarray, tokens: int, k: int) -> np.ndarray:
    """Experts [T, k] of tokens: those with most rows first, down the columns."""
    order = np.argsort(-counts, kind="stable")
    return np.repeat(order, counts[order]).reshape(k, tokens).T
