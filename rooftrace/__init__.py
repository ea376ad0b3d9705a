"""What a step of any nn.Module costs on a chip, in FLOPs, bytes and time.

    import rooftrace as rt

    graph = rt.trace(model, x)                     # any module, any arguments; no weights, no GPU
    print(rt.estimate(graph, chip="h200-sxm"))     # the table
    rt.report(model, x, chip="h200-sxm", out="report/")

Importing this package imports neither torch nor anything else that is slow to load: names are
looked up when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rooftrace._face import face

if TYPE_CHECKING:
    from rooftrace.costmodels.estimating import Estimate

_public, _names, __all__ = face(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("rooftrace")
    return _public(name)


def __dir__() -> list[str]:
    return [*_names(), "__version__"]


def _render(estimates: list[Estimate]) -> str:
    """The table that print(estimate) shows; costmodels may not import reporting itself."""
    from rooftrace.reporting.pages import render_estimates

    return render_estimates(estimates)
