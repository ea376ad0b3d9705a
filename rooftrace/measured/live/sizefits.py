"""Prices of calls at sizes that were not traced, from traced calls that differ in sizes alone.

Padding to the longest text of a batch gives nearly every batch a length of its own.  FLOP of such
calls are polynomials of their sizes, so a few traces tell all: a fit that meets each of them, with
traces left over, is taken, and only between sizes that were traced.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from rooftrace.measured.live.notes import CallNote
from rooftrace.measured.live.pricing import Price

LEAST = 5
"""Traces that a fit needs."""
_TOLERANCES = {"flops_matrix": 1e-6, "flops": 0.01, "useful_s": 0.01, "matrix_s": 0.1}
_NEAR = 0.05
"""Relative errors at traced sizes up to which a fit holds, of each sum and of others.

FLOP in products are polynomials; a kernel of attention that skips masked blocks rounds its own.
"""
_OF_ONE = ((0,), (1,), (2,))
_OF_TWO = ((0, 0), (1, 0), (0, 1), (1, 1), (1, 2), (2, 1))
"""Powers of the sizes in each term: of one that varies, and of two (a batch and a length)."""


def fitted(note: CallNote, traced: Mapping[CallNote, Price]) -> Price | None:
    """The price of a call between traced ones; None where no fit holds there."""
    alike = [other for other in traced if _shape(other) == _shape(note)]
    if len(alike) < LEAST:
        return None
    rows = [_numbers(other) for other in (*alike, note)]
    varying = dict.fromkeys(
        column for column in zip(*rows, strict=True) if len(set(column)) > 1
    )  # sizes that always are equal are one
    if not 1 <= len(varying) <= 2:
        return None
    if any(not min(column[:-1]) <= column[-1] <= max(column[:-1]) for column in varying):
        return None
    powers: Sequence[tuple[int, ...]] = _OF_ONE if len(varying) == 1 else _OF_TWO
    if len(alike) <= len(powers):
        return None
    terms = [[_term(point, power) for power in powers] for point in zip(*varying, strict=True)]
    values: dict[str, float] = {}
    for part in fields(Price):
        known = [getattr(traced[other], part.name) for other in alike]
        value = _fit(terms, known, _TOLERANCES.get(part.name, _NEAR))
        if value is None:
            return None
        values[part.name] = value
    return Price(**values)


def _fit(
    terms: Sequence[Sequence[float]], known: Sequence[float], tolerance: float
) -> float | None:
    """The value at the last point; None where a known one is missed by more than that."""
    import numpy

    if any(value != value for value in known):  # there is no interval
        return float("nan")
    matrix, values = numpy.array(terms), numpy.array(known)
    scale = numpy.abs(matrix).max(axis=0)
    solved: Any = numpy.linalg.lstsq(matrix[:-1] / scale, values, rcond=None)[0]
    errors = numpy.abs(matrix[:-1] / scale @ solved - values)
    if (errors > tolerance * numpy.abs(values) + 1e-12).any():
        return None
    return float(matrix[-1] / scale @ solved)


def _term(point: Sequence[int], power: Sequence[int]) -> float:
    result = 1.0
    for size, exponent in zip(point, power, strict=True):
        result *= size**exponent
    return result


def _shape(note: CallNote) -> Hashable:
    """What fitted calls have in common: everything but their sizes."""
    tensors, plain, names = note.sizes
    kinds = tuple((len(shape), dtype, gradient) for shape, dtype, gradient in tensors)
    settings = (note.module, note.training, note.gradients, note.autocast)
    return settings, note.roots, note.backwards, kinds, plain, names


def _numbers(note: CallNote) -> tuple[int, ...]:
    return tuple(size for shape, _, _ in note.sizes[0] for size in shape)
