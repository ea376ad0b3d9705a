"""What a step of any nn.Module costs on a chip, in FLOPs, bytes and time.

    import rooftrace as rt

    graph = rt.trace(model, x)                     # any module, any arguments; no weights, no GPU
    print(rt.estimate(graph, chip="h200-sxm"))     # the table
    rt.report(model, x, chip="h200-sxm", out="report/")

Importing this package imports neither torch nor anything else that is slow to load: names are
looked up when they are first used.
"""

from __future__ import annotations

import contextlib
import sys
from types import FunctionType
from typing import TYPE_CHECKING, Any

from rooftrace._face import face

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rooftrace.costmodels.advice import Headroom
    from rooftrace.costmodels.estimates import Estimate

_public, _names, __all__ = face(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("rooftrace")
    return _uncompiled(_public(name))


def _uncompiled(value: Any) -> Any:
    """A public name; functions are marked, so that code that torch.compile compiles calls them as
    they are.  With fullgraph=True, Dynamo refuses the call and says the reason that stands here.
    """
    if isinstance(value, FunctionType):
        vars(value)["_torchdynamo_disable"] = True
        vars(value)["_torchdynamo_disable_msg"] = (
            f"rooftrace.{value.__name__} is no part of a graph; call it outside of torch.compile"
        )
        if "torch" in sys.modules:  # what a function calls is not compiled either
            with contextlib.suppress(AttributeError):  # an older release has no word for it
                dynamo = sys.modules["torch"]._C._dynamo.eval_frame
                skipped = dynamo._FrameAction.SKIP
                strategy = dynamo._FrameExecStrategy(skipped, skipped)
                dynamo.set_code_exec_strategy(value.__code__, strategy)
    return value


def __dir__() -> list[str]:
    return [*_names(), "__version__"]


def _render(result: Any, form: str, **how: Any) -> Any:
    """What print(result) shows ("text"), rich ("rich"), a notebook ("cell"); made by reporting."""
    from rooftrace.reporting.text import shown

    return shown(result, form, **how)


def _headroom(estimate: Estimate) -> Headroom:
    """What estimate.headroom() returns: findings import estimates, not the other way round."""
    from rooftrace.costmodels.advice import headroom

    return headroom(estimate)


def _write(result: Any, out: Path, figures: Sequence[str]) -> list[Path]:
    """Write the files of a validation into a folder; only reporting knows how."""
    from rooftrace.reporting.reportfolder import write_validation

    return write_validation(result, out, figures)
