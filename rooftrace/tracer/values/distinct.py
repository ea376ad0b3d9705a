"""How many different classes a number of rows reach, when each chooses k of them: expected numbers.

The rows choose independently of each other.  A class that a row chooses with probability p is then
reached by some of T rows with 1 - (1 - p)^T, however a row's own choices depend on each other; the
expected number of classes reached is the sum of that.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from rooftrace.errors import RequestError
from rooftrace.tracer.asking import assumptions as asked
from rooftrace.tracer.formulas import functions

_STEP = 0.05
_LEAST, _MOST = -39.0, 3.7
"""The integral over log t: from where 1e-17 of the likeliest has arrived, to where 1e-17 of the
least likely has not."""
_MOST_SIZE = 1 << 14
"""The most classes times choices for which shares of a skewed choice are integrated."""
_AT_ONCE = 1 << 22
"""Numbers in memory at once while integrating."""


def expected_distinct(rows: int, k: int, classes: int, shares: Tensor | None = None) -> float:
    """The expected number of classes that at least one of `rows` rows chooses.

    shares: how likely a row is to choose each class; None: k / classes each.
    """
    if rows <= 0 or k <= 0:
        return 0.0
    if shares is not None:
        missed = torch.exp(rows * torch.log1p(-shares.clamp(0, 1)))  # log1p(-1) is -inf: never
        return functions.snapped(float((1 - missed).sum()))
    return functions.expected_distinct(rows, k, classes)


def shares_of(policy: asked.Policy, k: int, classes: int) -> Tensor | None:
    """How likely a row is to choose each class: they sum to k.  None where all are equal.

    Raises RequestError for a histogram that k different choices of a row cannot give.
    """
    if policy.name == "skewed" and policy.exponent and k < classes:
        return _skewed(policy.exponent, k, classes)
    if policy.name != "histogram" or k > classes:
        return None
    counts = torch.tensor(policy.counts, dtype=torch.float64)
    shares = torch.zeros(classes, dtype=torch.float64)
    shares[: len(counts)] = k * counts / counts.sum()
    most = int(shares.argmax())
    if float(shares[most]) > 1 + 1e-9:
        raise RequestError(
            f"assumption routing={policy}: class {most} has {float(shares[most]) / k:.1%} of the "
            f"counts, but of {k} different choices of a row it can be only one, {1 / k:.1%}"
        )
    return shares.clamp(max=1)


@functools.cache
def _skewed(exponent: float, k: int, classes: int) -> Tensor:
    """The shares of classes with weights w = 1, 2 ** -exponent, 3 ** -exponent ...

    A row draws one class after the other in proportion to w, without those that it has (Plackett
    and Luce).  Equally: it takes the k largest of log w plus independent Gumbel noise, which is how
    a top-k of noisy scores chooses (Yellott 1977; Kool, van Hoof and Welling 2019).  Equally again:
    each class arrives at a time of rate w, and the first k are taken (Efraimidis and Spirakis
    2006); so its share is the integral of w exp(-w t), times the chance that fewer than k others
    arrive before t.  With too many classes times choices, all that arrive before a fixed time by
    which k are expected are taken instead.
    """
    weights = torch.arange(1, classes + 1, dtype=torch.float64).pow(-exponent)
    if k == 1:
        return weights / weights.sum()
    if classes * k > _MOST_SIZE:
        return _until_k(weights, k)
    end = _MOST + exponent * math.log(classes)
    times = torch.arange(_LEAST, end + _STEP, _STEP, dtype=torch.float64).exp()
    step = max(1, _AT_ONCE // (classes * k))
    parts = [_arriving(weights, part, k) for part in torch.split(times, step)]
    return (torch.stack(parts).sum(0) * _STEP).clamp(max=1)


def _arriving(weights: Tensor, times: Tensor, k: int) -> Tensor:
    """The sum over times of t w exp(-w t) P(fewer than k others before t), for each class."""
    waits = weights[:, None] * times
    here, gone = -torch.expm1(-waits), torch.exp(-waits)
    first = torch.zeros(len(times), k, dtype=torch.float64)
    first[:, 0] = 1  # of no class, none has arrived
    before, state = [], first
    for arrived, waiting in zip(here, gone, strict=True):
        before.append(state)
        state = _with_one_more(state, arrived, waiting)
    chances, state = [first[:, 0]] * len(weights), first
    for place in range(len(weights) - 1, -1, -1):
        fewer = state.cumsum(1).flip(1)  # of the classes behind: at most k - 1, k - 2 ... 0
        chances[place] = (before[place] * fewer).sum(1)
        state = _with_one_more(state, here[place], gone[place])
    return (waits * gone * torch.stack(chances)).sum(1)


def _with_one_more(state: Tensor, arrived: Tensor, waiting: Tensor) -> Tensor:
    """The chances that 0 ... k - 1 have arrived, with another class."""
    after = state * waiting[:, None]
    after[:, 1:] += state[:, :-1] * arrived[:, None]
    return after


def _until_k(weights: Tensor, k: int) -> Tensor:
    """1 - exp(-w t), with the time t at which they sum to k."""
    low, high = _LEAST, -math.log(float(weights.min())) + _MOST + math.log(len(weights))
    for _ in range(200):
        middle = (low + high) / 2
        if float((-torch.expm1(-weights * math.exp(middle))).sum()) < k:
            low = middle
        else:
            high = middle
    shares: Tensor = -torch.expm1(-weights * math.exp(high))
    return shares


_SPARSE = 8
"""How many times more numbers than elements there may be for marks to be cheaper than sorting."""


def counted(index: Tensor) -> int:
    """How many different numbers there are in a tensor of whole numbers on the host.

    Marks take time in proportion to the elements and to the range; sorting takes far longer.
    """
    if index.dtype == torch.bool or not index.numel():
        return int(torch.unique(index).numel())
    index = index.detach()
    least, most = (int(end) for end in index.aminmax())
    if most - least > _SPARSE * index.numel():
        return int(torch.unique(index).numel())
    import numpy as np

    numbers = index.numpy()
    marks = np.zeros(most - least + 1, dtype=bool)
    marks[numbers - least if least else numbers] = True
    return int(np.count_nonzero(marks))
