"""`dump_model_info`: an inventory, its figure and a report in one call, for those who type it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rooftrace._formats import FORMATS
from rooftrace._writing import write_bytes
from rooftrace.costmodels.execution import ExecutionModel, execution_model
from rooftrace.errors import RequestError, worded
from rooftrace.hardware import Chip
from rooftrace.reporting.estimates import Module
from rooftrace.reporting.inventories import inventory
from rooftrace.reporting.text import as_markdown, shown
from rooftrace.tracer.inventory.records import ModelInfo

PLOT = "model_weight_distributions.png"
"""Where the figure goes if no path is named."""
_WITHOUT_USE = {
    "include_architecture_diagrams": "modules stand in tables; rt.summary(model, ...) is a tree",
    "include_appendix_derivations": "formulas stand in docs/rules.md, words in each report",
    "sensitivity_enable": "a report has no grid of factors",
    "sensitivity_profile": "a report has no grid of factors",
    "roofline_x_limits": "the axes of a roofline follow its points",
    "roofline_y_limits": "the axes of a roofline follow its points",
    "roofline_label_mode": "labels stand where there is room for them",
}
"""Arguments that are taken and change nothing, and why."""
_OF_A_REPORT = ("enable_tensor_core_model", "tensor_core_b_sat")
"""Arguments that change nothing without report_path."""


def dump_model_info(
    model: Module,
    logger: logging.Logger | None = None,
    plot_distributions: bool = True,
    save_path: str | os.PathLike[str] | None = None,
    report_path: str | os.PathLike[str] | None = None,
    include_architecture_diagrams: bool | None = None,
    include_appendix_derivations: bool | None = None,
    enable_tensor_core_model: bool | None = None,
    tensor_core_b_sat: float | None = None,
    sensitivity_enable: bool | None = None,
    sensitivity_profile: str | None = None,
    roofline_x_limits: Sequence[float] | None = None,
    roofline_y_limits: Sequence[float] | None = None,
    roofline_label_mode: str | None = None,
    *,
    input_data: Any = None,
    chip: str | Chip | None = None,
    **sizes: Any,
) -> ModelInfo:
    """Print the inventory of a module, draw its weights, and write a report if a path is given.

    logger: gets the lines in place of stdout.  plot_distributions: draw a histogram of each tensor
    into save_path (model_weight_distributions.png here, if left out).

    report_path: a .md file for the inventory and the costs of a step on `chip`, with a folder of
    the same name for figures and data; or a folder for all.  It needs a call of the module:
    input_data (a tensor, a tuple, or a dict of arguments), or sizes as `rt.report` takes them.
    Without one the file has the inventory and the reason.  enable_tensor_core_model and
    tensor_core_b_sat add the execution model `seed-efficient`, with that saturation.

    The other arguments change nothing and are told, and so is what fails about figure or report.
    Raises RequestError for a model that is no module, and for arguments that make no sense.
    """
    asked = dict(locals())
    _check(report_path, input_data, sizes)
    names = (*_WITHOUT_USE, *(_OF_A_REPORT if report_path is None else ()))
    executions = _executions(enable_tensor_core_model, tensor_core_b_sat)
    made = inventory(model)
    tell, warn = _outputs(logger)
    tell(shown(made, "text"))
    for line in _told({name: asked[name] for name in names}):
        warn(line)
    if plot_distributions:
        _trying("figure", warn, lambda: _draw(made, Path(save_path or PLOT), tell))
    elif save_path is not None:
        warn(f"save_path={os.fspath(save_path)!r}: nothing is drawn with plot_distributions=False")
    if report_path is not None:
        path, how = Path(report_path), {"chip": chip, "execution": executions, **sizes}
        _trying("report", warn, lambda: _report(model, made, path, input_data, how, tell))
    return made


def _check(report_path: Any, input_data: Any, sizes: Mapping[str, Any]) -> None:
    if report_path is None:
        asked = [*sizes, *(["input_data"] if input_data is not None else [])]
        if asked:
            raise RequestError(f"{', '.join(asked)}: they are of a report; say report_path= too")
    elif Path(report_path).suffix not in ("", ".md"):
        raise RequestError(
            f"report_path={os.fspath(report_path)!r}: expected a .md file or a folder"
        )


def _executions(tensor_core: bool | None, b_sat: float | None) -> list[str | ExecutionModel]:
    usual: list[str | ExecutionModel] = ["naive", "efficient"]
    if tensor_core is False and b_sat is not None:
        raise RequestError(f"tensor_core_b_sat={b_sat!r} beside enable_tensor_core_model=False")
    if not tensor_core and b_sat is None:
        return usual
    seed = execution_model("seed-efficient")
    if b_sat is not None:
        number = isinstance(b_sat, (int, float)) and not isinstance(b_sat, bool)
        if not number or not 0 < b_sat < float("inf"):
            raise RequestError(f"tensor_core_b_sat={b_sat!r}: expected a positive number of rows")
        seed = execution_model(seed, utilization=replace(seed.utilization, b_sat=float(b_sat)))
    return [*usual, seed]


def _outputs(logger: logging.Logger | None) -> tuple[Callable[[str], None], Callable[[str], None]]:
    """What tells a text, and what warns: print, or a logger, line by line."""
    if logger is None:
        return print, lambda line: print(f"note: {line}")

    def tell(text: str) -> None:
        for line in text.splitlines():
            logger.info("%s", line)

    return tell, lambda line: logger.warning("%s", line)


def _told(unused: Mapping[str, Any]) -> Iterable[str]:
    """A sentence for each reason why arguments change nothing."""
    by_reason: dict[str, list[str]] = {}
    for name, value in unused.items():
        if value is not None:
            reason = _WITHOUT_USE.get(name, "it is of a report; say report_path= too")
            by_reason.setdefault(reason, []).append(f"{name}={value!r:.40}")
    return [f"{', '.join(names)}: not used; {reason}" for reason, names in by_reason.items()]


def _trying(what: str, warn: Callable[[str], None], do: Callable[[], None]) -> None:
    """Do it, or tell why not: nobody loses a training run by a figure."""
    try:
        do()
    except (ValueError, LookupError, RuntimeError, OSError) as error:
        warn(f"no {what}: {worded(error)}")


def _draw(made: ModelInfo, path: Path, tell: Callable[[str], None]) -> None:
    from rooftrace.reporting.distributions import write_distributions

    write_distributions(made, path)
    tell(f"weights drawn to {path}")


def _report(
    model: Module,
    made: ModelInfo,
    path: Path,
    input_data: Any,
    how: Mapping[str, Any],
    tell: Callable[[str], None],
) -> None:
    """The inventory and the report as one page, or the inventory and why there is no more."""
    from rooftrace.reporting.reports import report

    folder = path.with_suffix("")
    page = path if path.suffix else folder / "inventory.md"
    named = dict(input_data) if isinstance(input_data, Mapping) else {}
    args = () if named or input_data is None else input_data
    args = tuple(args) if isinstance(args, (tuple, list)) else (args,)
    try:
        result = report(model, *args, **named, **how)
        result.write(folder)
        rest = f"{as_markdown(result)}\nFigures and data: `{folder.name}/`\n"
    except (ValueError, LookupError, RuntimeError, OSError) as error:
        reason = worded(error)
        if not named and input_data is None:
            reason += "; pass input_data=, or sizes such as batch=8"
        rest = f"No costs of a step: {' '.join(reason.split())}\n"
        tell(f"{page} has the inventory alone: {reason}")
    text = f"{as_markdown(made)}\n{rest}{FORMATS['md'].mark}"
    write_bytes(page, text.encode(), own_name=not path.suffix)
    tell(f"report written to {page}")
