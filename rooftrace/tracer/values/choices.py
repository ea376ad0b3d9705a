"""Choices by unknown scores: drawn indices, and expected numbers of distinct classes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftrace.errors import RequestError
from rooftrace.graph import assumptions
from rooftrace.graph.formulas import polynomials
from rooftrace.tracer.recording import Call
from rooftrace.tracer.values import trees
from rooftrace.tracer.values.known import KnownTensors

# -- expected distinct -----------------------------------------------------------------------------
# How many different classes a number of rows reach, when each chooses k of them: expected numbers.
#
# The rows choose independently of each other.  A class that a row chooses with probability p is
# then reached by some of T rows with 1 - (1 - p)^T, however the choices of one row depend on each
# other; the expected number of classes reached is the sum of that.


def expected_distinct(rows: int, k: int, classes: int, shares: Tensor | None = None) -> float:
    """The expected number of classes that at least one of `rows` rows chooses.

    shares: how likely a row is to choose each class; None: k / classes each.
    """
    if rows <= 0 or k <= 0:
        return 0.0
    if shares is not None:
        return polynomials.expected_reached(rows, shares.numpy())
    return polynomials.expected_distinct(rows, k, classes)


def shares_of(policy: assumptions.Policy, k: int, classes: int) -> Tensor | None:
    """The probability that a row chooses each class; the sum is k.  None where all are equal.

    Raises RequestError for a histogram that k different choices of a row cannot give.
    """
    if policy.name == "skewed" and policy.exponent and k < classes:
        return torch.from_numpy(polynomials.skewed_shares(policy.exponent, k, classes))
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


_SPARSE = 8
"""How many times more numbers than elements there may be for marks to be cheaper than sorting."""


def counted(index: Tensor) -> int:
    """Number of different integers in a tensor on the host.

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


# -- choices ---------------------------------------------------------------------------------------
# The choices of topk, argmax, multinomial ... by unknown scores, as a policy has them.

EXPECTED = assumptions.Policy()


@dataclass(frozen=True, slots=True)
class Choices:
    """Indices for the code that runs, a text on them, and how many classes they are to reach."""

    indices: Tensor
    text: str  # continues the name of the op
    facts: Mapping[str, Any]  # see `Assumption.facts`


def in_order(shape: tuple[int, ...], classes: int, dimension: int) -> Choices:
    """The indices of a full sort: the order stays."""
    sizes = [-1 if i == dimension % len(shape) else 1 for i in range(len(shape))]
    indices = torch.arange(classes).reshape(sizes).expand(shape).contiguous()
    return Choices(indices, f"over {classes} classes on unknown scores keeps their order", {})


def chosen(
    policy: assumptions.Policy, shape: tuple[int, ...], classes: int, dimension: int | None
) -> Choices:
    """Indices of a shape, chosen among `classes` by a policy.

    dimension: along which a row has its choices; None where each row has one.  A histogram of other
    classes leaves the choice to the policy `expected`.  Raises RequestError for a histogram that a
    row cannot choose by.
    """
    aside = "" if policy.fits(classes) else f" ({policy} has other classes)"
    policy = EXPECTED if aside else policy
    rows, k = sizes_of(shape, classes, dimension)
    shares = shares_of(policy, k, classes)
    reached = expected_distinct(rows, k, classes, shares)
    hit = min(max(round(reached), min(k, classes)), rows * k)
    if policy.name == "balanced":
        indices = (torch.arange(rows * k) % classes).reshape(shape)
    elif policy.name == "uniform":
        indices = uniform(shape, classes, dimension)
    elif shares is None:
        indices = placed(spread(rows, k, classes, hit), shape, dimension)
    else:
        choices = in_proportion(rows, k, shares, hit)
        indices = placed(choices, shape, dimension)
    drawn = counted(indices)
    if policy.name in ("balanced", "uniform"):
        reached = float(drawn)
    facts = {
        "policy": str(policy),
        "rows": rows,
        "chosen": k,
        "classes": classes,
        "distinct": reached,
        "drawn": drawn,
    }
    return Choices(indices, f"{assumptions.said_of_routing(facts)}{aside}", facts)


# -- one concrete draw for the code that runs ------------------------------------------------------

_MAX_DRAWN = 1 << 22
"""The most random numbers that are drawn at once."""
_DRAWS = 32
"""The most draws that are tried."""


def sizes_of(shape: tuple[int, ...], classes: int, dimension: int | None) -> tuple[int, int]:
    """(rows, k): how many rows choose, and how many different classes each.

    shape: of the indices; the choices of a row stand along `dimension`, None for one choice each.
    A row that chooses more than there are classes chooses with replacement, so each choice counts
    as a row.
    """
    k = 1 if dimension is None else shape[dimension]
    k = 1 if k > classes else k
    return math.prod(shape) // max(k, 1), k


def placed(chosen: Tensor, shape: tuple[int, ...], dimension: int | None) -> Tensor:
    """The choices [rows, k] in the shape of the indices."""
    if dimension is None or chosen.shape[1] != shape[dimension]:
        return chosen.reshape(shape)
    along = dimension % len(shape)
    others = [n for i, n in enumerate(shape) if i != along]
    return chosen.reshape(*others, chosen.shape[1]).movedim(-1, along).contiguous()


def uniform(shape: tuple[int, ...], classes: int, dimension: int | None) -> Tensor:
    """Indices of this shape into equally likely `classes`, distinct along `dimension` (if any).

    The number of classes that a draw hits varies.  Of several draws by fixed seeds this is the one
    whose number is nearest to the expected number.
    """
    rows, k = sizes_of(shape, classes, dimension)
    expected = classes * (1 - (1 - k / classes) ** rows)
    best, distance = torch.zeros(rows, k, dtype=torch.long), math.inf
    for seed in range(_DRAWS):
        chosen = _chosen(rows, k, classes, torch.Generator().manual_seed(seed))
        off = abs(int((torch.bincount(chosen.flatten()) > 0).sum()) - expected)
        if off < distance:
            best, distance = chosen, off
        if distance <= 0.5 or rows * classes > _MAX_DRAWN:
            break
    return placed(best, shape, dimension)


def _chosen(rows: int, k: int, classes: int, generator: torch.Generator) -> Tensor:
    """k distinct classes in each row."""
    if k == 1:
        return torch.randint(classes, (rows, 1), generator=generator)
    step = max(1, _MAX_DRAWN // classes)
    return torch.cat(
        [
            torch.rand(min(step, rows - first), classes, generator=generator).topk(k).indices
            for first in range(0, rows, step)
        ]
        or [torch.zeros(0, k, dtype=torch.long)]
    )


def spread(rows: int, k: int, classes: int, hit: int) -> Tensor:
    """Choices [rows, k] that reach `hit` classes, in the middle of equal steps through all of them.

    Each is chosen as often as another, or once more.  hit: from k to rows k.
    """
    once = (torch.arange(hit) * classes + classes // 2) // hit
    return once.repeat(-(-rows * k // max(hit, 1)))[: rows * k].reshape(rows, k)


def in_proportion(rows: int, k: int, shares: Tensor, hit: int) -> Tensor:
    """Choices [rows, k], different in each row, that reach the `hit` likeliest classes.

    shares: how likely each class is.  Each is chosen in proportion to that, once to `rows` times.
    """
    order = shares.argsort(descending=True, stable=True)[:hit]
    counts = _apportioned(rows * k, shares[order], rows)
    # A class fills up to `rows` adjacent slots, which belong to different rows.
    slots = order.repeat_interleave(counts)
    return slots.reshape(k, rows).T.contiguous()


def _apportioned(total: int, shares: Tensor, most: int) -> Tensor:
    """Integers from 1 to `most` that sum to `total`, as near to the shares as can be."""
    counts = torch.ones(len(shares), dtype=torch.long)
    wanted = shares * (total / float(shares.sum()))
    while (left := total - int(counts.sum())) > 0:
        free = counts < most
        short = torch.where(free, (wanted - counts).clamp(min=0), 0.0)
        if not bool(short.any()):
            short = free.double()
        more = (short * (left / float(short.sum()))).floor().long()
        if not bool(more.any()):  # one each to the classes that are shortest of their share
            more[short.argsort(descending=True, stable=True)[:left]] = 1
            more = torch.where(free, more, 0)
        counts = (counts + more).clamp(max=most)
    return counts


# -- Draws of equally likely integers, followed through elementwise ops ----------------------------

_OF_EACH = ("aten.clone", "aten.index_put", "aten.index_put_")
"""Ops besides torch's pointwise ones that make each element from those at its index."""


class FollowedDraw(NamedTuple):
    """becomes: the present value of each class, [classes].  origin: the bytes that were drawn;
    draws of different origins are independent."""

    becomes: Tensor
    origin: int


class UniformDraws:
    """The draws of one capture, by their bytes.  values: of tensors."""

    def __init__(self, values: KnownTensors) -> None:
        self._values = values
        self._draws: dict[
            int, tuple[FollowedDraw, int, Tensor]
        ] = {}  # with the epoch; a view holds bytes

    def of(self, tensor: Tensor) -> FollowedDraw | None:
        """The draw that a tensor, or a view of it, holds; None of another tensor.

        A draw ends where something unknown is written to it.
        """
        draw, epoch, _ = self._draws.get(trees.bytes_of(tensor), (None, 0, None))
        return draw if epoch == self._values.epoch(tensor) else None

    def learn(self, tensor: Tensor, draw: FollowedDraw) -> None:
        """Remember that `tensor` holds a draw."""
        self._draws[trees.bytes_of(tensor)] = draw, self._values.epoch(tensor), tensor

    def learn_classes(self, tensor: Tensor, classes: range) -> None:
        """Remember that each number of `tensor` is one of these, all equally likely."""
        numbers = torch.arange(classes.start, classes.stop)
        self.learn(tensor, FollowedDraw(numbers, trees.bytes_of(tensor)))

    @contextmanager
    def followed(self, call: Call, outputs: Sequence[Tensor]) -> Iterator[None]:
        """Follow draws through a call; inside, the known values of its outputs change."""
        draw = self._made(call, outputs)
        yield
        if draw is not None:
            self.learn(outputs[0], draw)

    def _made(self, call: Call, outputs: Sequence[Tensor]) -> FollowedDraw | None:
        """The draw in the output of an elementwise call."""
        if not self._draws or len(outputs) != 1 or outputs[0].dtype.is_floating_point:
            return None
        if call.name not in _OF_EACH and torch.Tag.pointwise not in call.func.tags:
            return None
        values, origins = dict[int, Tensor](), set[int]()
        for tensor in call.tensors:
            draw = self.of(tensor)
            if draw is not None and tensor.shape == outputs[0].shape and _is_whole(tensor):
                origins.add(draw.origin)
                values[id(tensor)] = draw.becomes.clone() if call.info.mutated else draw.becomes
                continue
            entry = self._values.known(tensor) if tensor.dim() == 0 else None
            if entry is None:
                return None
            values[id(tensor)] = entry.value
        becomes = self._values.results.of(call, values) if len(origins) == 1 else None
        return FollowedDraw(becomes, *origins) if isinstance(becomes, Tensor) else None


def _is_whole(tensor: Tensor) -> bool:
    """Whether a tensor is all of its bytes, in order."""
    size = tensor.numel() * tensor.element_size()
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == size
