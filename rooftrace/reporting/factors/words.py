"""Measured factors on bytes: one sentence for a screen, one table for a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rooftrace.hardware.units import format_share
from rooftrace.reporting.view import model as view, units

if TYPE_CHECKING:
    from rooftrace.costmodels.bytefactors import ByteFactor, ByteFactors

_WEIGHTS = " weights"
_FUSION = {"activations": "fusion", "temporary": "elementwise"}
_FACTOR = units.Unit("", "number", lambda value: f"{value:.2f}")
factor_columns = (
    view.Column("kind", units.TEXT, "Bytes of", short="bytes of"),
    view.Column("factor", _FACTOR, "Measured over rules", short="factor"),
    view.Column("error", _FACTOR, "Std. error", short="+-"),
    view.Column("kernels", units.COUNT, "Kernels", short="kernels"),
    view.Column("by", units.TEXT, "By", short="by"),
    view.Column("grouping", _FACTOR, "Ran over detected", short="ran/det.", drop=1),
    view.Column("unfused", _FACTOR, "Over unfused", short="/unfused"),
    view.Column("residency", _FACTOR, "WRF", short="WRF"),
    view.Column("causes", units.TEXT, "Causes", short="causes", folded=True),
)


def factor_sentence(traffic: ByteFactors) -> str:
    """What was measured of bytes: "calibrated on L4, 2026-11-20: WRF dense 1.02 +- 0.03; ..."."""
    known = [_words(kind, factor) for kind, factor in traffic.identified.items()]
    where = f"calibrated on {traffic.measured}" if traffic.measured else "calibrated bytes"
    missing = ", ".join(_plain(kind) for kind in traffic.unknown)
    parts = [*known, *([f"not identified: {missing}"] if missing else [])]
    return f"{where}: {'; '.join(parts) or 'no factor was measured'}"


def factor_rows(factors: Mapping[str, ByteFactor]) -> list[dict[str, Any]]:
    """A row for each kind of bytes, by `factor_columns`; one not identified says why."""
    return [_row(kind, factor) for kind, factor in factors.items()]


def _words(kind: str, factor: ByteFactor) -> str:
    if kind.endswith(_WEIGHTS):
        name, value, error = "WRF " + _plain(kind), factor.residency, factor.residency_error
    elif kind in _FUSION:
        name, value, error = _FUSION[kind], factor.unfused, factor.unfused_error
    else:
        name, value, error = kind, factor.factor, factor.error
    derived = ["by seconds"] if factor.by == "seconds" else []
    left = ["left to the rates"] if factor.applied != factor.factor else []
    causes = ", ".join((*derived, *_causes(kind, factor), *left))
    return f"{name} {value:.2f} +- {error:.2f}{f' ({causes})' if causes else ''}"


def _plain(kind: str) -> str:
    """ "dense" of "dense weights"; others stay."""
    return kind.removesuffix(_WEIGHTS)


def _causes(kind: str, factor: ByteFactor) -> Iterator[str]:
    """What is behind a weight residency that is not 1, each by itself."""
    if not kind.endswith(_WEIGHTS):
        return
    if _differs(factor.experts):
        yield f"{format_share(1 / factor.experts)} of experts touched"
    if _differs(factor.rows):
        yield f"{format_share(1 / factor.rows)} of rows looked up"
    if _differs(factor.precision):
        yield f"stored {factor.precision:.3g} times as narrow as used"
    if _differs(factor.cache):
        yield f"{format_share(1 - 1 / factor.cache)} held by the last cache"
    if factor.identified and _differs(factor.unexplained, 2 * factor.error / (factor.factor or 1)):
        yield f"x{factor.unexplained:.2f} unexplained"


def _as_rate(factor: ByteFactor) -> Iterator[str]:
    """Says where a factor is left to the rates."""
    if factor.applied != factor.factor:
        yield "slower than the sustained rate, or more bytes: left to the rates"


def _differs(value: float, least: float = 0.0) -> bool:
    return abs(value - 1) > max(least, 0.005)


def _row(kind: str, factor: ByteFactor) -> dict[str, Any]:
    row: dict[str, Any] = {
        "kind": kind,
        "grouping": factor.grouping,
        "unfused": factor.unfused,
        "causes": "; ".join((*_causes(kind, factor), *_as_rate(factor))),
    }
    if not factor.identified:
        return row | {
            "factor": view.Cell("–", unit=units.TEXT),
            "causes": "; ".join((f"not identified: {factor.why}", *_causes(kind, factor))),
        }
    row |= {name: getattr(factor, name) for name in ("factor", "error", "kernels", "by")}
    if kind.endswith(_WEIGHTS):
        row["residency"] = factor.residency
    return row
