"""Functions in the style of torchinfo, thop, fvcore and FlopCounterMode, and `dump_model_info`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from rooftrace._formats import FORMATS
from rooftrace._shown import short
from rooftrace._writing import write_bytes
from rooftrace.costmodels.estimates import Estimate, flop_counts, moduletree
from rooftrace.costmodels.fusion import ExecutionModel, execution_model
from rooftrace.errors import RequestError, worded
from rooftrace.graph import OpGraph
from rooftrace.hardware import Chip
from rooftrace.reporting.commands.estimates import Module, Source, estimate, estimated
from rooftrace.reporting.commands.inventories import inventory
from rooftrace.reporting.commands.requests import StepRequest
from rooftrace.reporting.commands.rooflinesteps import SIZES
from rooftrace.reporting.views import as_markdown, shown
from rooftrace.weights.inventory import ModelInfo

# -- dump_model_info -------------------------------------------------------------------------------

PLOT = "model_weight_distributions.png"
"""The file of the figure if no path is named."""


def dump_model_info(
    model: Module,
    logger: logging.Logger | None = None,
    plot_distributions: bool = True,
    save_path: str | os.PathLike[str] | None = None,
    report_path: str | os.PathLike[str] | None = None,
    *,
    enable_tensor_core_model: bool | None = None,
    tensor_core_b_sat: float | None = None,
    input_data: Any = None,
    chip: str | Chip | None = None,
    **sizes: Any,
) -> ModelInfo:
    """Print the inventory of a module and the costs of its steps on `chip`, and draw its weights.

    logger: gets the lines in place of stdout.  plot_distributions: draw a histogram of each tensor
    into save_path (model_weight_distributions.png here, if left out).

    input_data: a tensor, a tuple, or a dict of arguments of the module's call; or sizes, as
    `rt.report` takes them.  Without either a model of Hugging Face is called with a batch of 1, and
    another one with an input for its first layer (`_guessed`); a line says so.  report_path: a .md
    file for all of it, with a folder of the same name for figures and data; or a folder.
    enable_tensor_core_model and tensor_core_b_sat add the execution model `seed-efficient`, with
    that saturation.

    A line names a figure or a report that fails; the page then has the inventory and the reason.
    Raises RequestError for a model that is no module, and for arguments that make no sense.
    """
    if report_path is not None and Path(report_path).suffix not in ("", ".md"):
        raise RequestError(
            f"report_path={os.fspath(report_path)!r}: expected a .md file or a folder"
        )
    executions = _executions(enable_tensor_core_model, tensor_core_b_sat)
    made = inventory(model)
    tell, warn = _outputs(logger)
    tell(shown(made, "text"))
    if plot_distributions:
        _trying("figure", warn, lambda: _draw(made, Path(save_path or PLOT), tell))
    elif save_path is not None:
        warn(f"save_path={os.fspath(save_path)!r}: nothing is drawn with plot_distributions=False")
    how = {"chip": chip, "execution": executions, **sizes}
    path = None if report_path is None else Path(report_path)
    _trying("report", warn, lambda: _report(model, made, path, input_data, how, tell))
    return made


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
    """Functions that show a text and a warning: print, or a logger, line by line."""
    if logger is None:
        return print, lambda line: print(f"note: {line}")

    def tell(text: str) -> None:
        for line in text.splitlines():
            logger.info("%s", line)

    return tell, lambda line: logger.warning("%s", " ".join(line.split()))


def _trying(output: str, warn: Callable[[str], None], do: Callable[[], None]) -> None:
    """Make an output, or warn: nobody loses a training run by a figure."""
    try:
        do()
    except (ValueError, LookupError, RuntimeError, OSError) as error:
        warn(f"no {output}: {worded(error)}")


def _draw(made: ModelInfo, path: Path, tell: Callable[[str], None]) -> None:
    from rooftrace.reporting.commands.inventories import write_distributions

    write_distributions(made, path)
    tell(f"weights drawn to {path}")


_SIDE, _LENGTH = 224, 128
"""Pixels of each side, and positions, of a guessed input."""


def _guessed(model: Any) -> tuple[tuple[Any, ...], str]:
    """An input for the first layer of a module, one sample, and words about it; () for none.

    Token ids for an embedding, rows for a linear layer, an image (or a line, or a volume) for a
    convolution, a sequence for a recurrent layer.  Of a timm model the size that it declares.
    """
    from rooftrace.tracer.inputs import calls

    declared = (getattr(model, "default_cfg", None) or {}).get("input_size")
    for name, layer in model.named_modules():
        kind = type(layer).__name__
        shape: tuple[int, ...] = ()
        if kind == "Embedding":
            return (calls.typed_input((1, _LENGTH), "int64"),), f"int64[1, {_LENGTH}], for {name}"
        if kind in ("Conv1d", "Conv2d", "Conv3d"):
            shape = (layer.in_channels, *[_SIDE] * len(layer.kernel_size))
        elif kind == "Linear":
            shape = (layer.in_features,)
        elif kind in ("LSTM", "GRU", "RNN"):
            shape = (_LENGTH, layer.input_size)
        if shape:
            shape = (1, *(declared or shape))
            return (calls.floating_input(model, shape),), f"{list(shape)}, for {name or kind}"
    return (), ""


def _called(
    model: Module, input_data: Any, how: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], str]:
    """Arguments for `report`, by place and by name, and a line on what is a guess."""
    if isinstance(input_data, Mapping):
        return (), {**input_data, **how}, ""
    if input_data is not None:
        many = isinstance(input_data, (tuple, list))
        return tuple(input_data) if many else (input_data,), dict(how), ""
    if any(name in how for name in ("inputs", *SIZES)):
        return (), dict(how), ""
    if hasattr(model, "main_input_name"):
        return (), {**how, "batch": 1}, "The batch is a guess: 1; batch= says another.\n"
    args, guess = _guessed(model)
    return args, dict(how), f"The input is a guess: {guess}; input_data= says another.\n"


def _report(
    model: Module,
    made: ModelInfo,
    path: Path | None,
    input_data: Any,
    how: Mapping[str, Any],
    tell: Callable[[str], None],
) -> None:
    """Price the module and show one screen; with a path, the inventory and the report as a page.

    Without a report the page has the inventory and the reason.
    """
    from rooftrace.reporting.commands.reports import report

    args, named, note = _called(model, input_data, how)
    folder = None if path is None else path.with_suffix("")
    try:
        result = report(model, *args, **named)
        tell(f"\n{shown(result, 'text')}\n{note}".rstrip())
        if folder is not None:
            result.write(folder)
            rest = f"{note}\n{as_markdown(result)}\nFigures and data: `{folder.name}/`\n"
    except (ValueError, LookupError, RuntimeError, OSError) as error:
        guess = f" ({note.strip()})" if note else ""
        rest = f"No costs of a step: {' '.join(worded(error).split())}{guess}\n"
        if path is None:
            raise RequestError(f"{worded(error)}{guess}") from error
        tell(rest)
    if path is not None and folder is not None:
        page = path if path.suffix else folder / "inventory.md"
        text = f"{as_markdown(made)}\n{rest}{FORMATS['md'].mark}"
        write_bytes(page, text.encode(), own_name=not path.suffix)
        tell(f"report written to {page}")


# -- counters --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Profile:
    """Counts of one forward pass.  Unpacks as `macs, params`, which is thop's order."""

    macs: int  # of matrix products and convolutions
    params: int
    flops: int  # a multiply-add as 2; with vector work
    unsupported: tuple[str, ...]  # names of ops without a rule
    estimate: Estimate

    def __iter__(self) -> Any:
        return iter((self.macs, self.params))


def profile(model: Module, inputs: Sequence[Any] = (), **kwargs: Any) -> Profile:
    """FLOPs, MACs and parameters of one forward pass of `model(*inputs, **kwargs)`."""
    result = estimated(StepRequest.of(profile, model, inputs, kwargs))
    return Profile(
        result.macs,
        int(result.graph.model["params"]),
        result.flops,
        tuple(u.target for u in result.unsupported_ops()),
        result,
    )


def summary(
    model: Source,
    input_size: Sequence[Any] | None = None,
    *,
    input_data: Any = None,
    dtypes: Any = None,
    depth: int = 3,
    col_names: Sequence[str] = moduletree.USUAL,
    **kwargs: Any,
) -> moduletree.Summary:
    """An estimate of one forward pass that prints as a tree of modules, as torchinfo's does.

    Give `input_size` (one shape, or a list of shapes) or `input_data` (a tensor, a tuple, or a dict
    of keyword arguments); for a target, a graph or a Hugging Face model sizes may stand in their
    place (batch=8), as for `estimate`.  dtypes: of the inputs that input_size makes, one for all or
    one for each, as torch.long or "int64"; by default the precision of the model's own floats.
    depth: how far down modules are printed.  col_names: some of input_size, output_size,
    num_params, params_percent, kernel_size, mult_adds, trainable, and of flops, bytes, time.

    Raises RequestError for an unknown column or dtype, and the errors of `estimate`.
    """
    columns = moduletree.check_columns(col_names)
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 0:
        raise RequestError(f"depth={depth!r}: expected a whole number from 0 on")
    request = _request(model, input_size, input_data, dtypes, kwargs)
    return _summary(estimated(request), _gradients(model), depth, columns)


def _summary(
    result: Estimate,
    gradients: Mapping[str, bool] | None,
    depth: int,
    columns: tuple[str, ...] = moduletree.USUAL,
) -> moduletree.Summary:
    tree = moduletree.module_tree(result, gradients)
    parts = {field.name: getattr(result, field.name) for field in fields(Estimate)}
    return moduletree.Summary(**parts, tree=tree, depth=depth, col_names=columns)


def _request(
    model: Source, input_size: Any, input_data: Any, dtypes: Any, kwargs: Mapping[str, Any]
) -> StepRequest:
    request = StepRequest.of(summary, model, (), kwargs)
    job = request.job
    sizes = job.is_named or job.is_graph or job.is_sized
    if dtypes is not None and input_size is None:
        raise RequestError("dtypes: they are those of the inputs that input_size= makes")
    if input_size is None and input_data is None and sizes:
        return request
    if (input_size is None) == (input_data is None):
        raise RequestError("summary: give either input_size=(8, 3, 224, 224) or input_data=")
    args: tuple[Any, ...] = ()
    if input_size is not None:
        args = _inputs(model, input_size, dtypes)
    elif isinstance(input_data, Mapping):
        kwargs = {**input_data, **kwargs}
    else:
        args = tuple(input_data) if isinstance(input_data, (tuple, list)) else (input_data,)
    return StepRequest.of(summary, model, args, kwargs)


def _inputs(model: Module, input_size: Any, dtypes: Any) -> tuple[Any, ...]:
    """A meta tensor for each shape."""
    from rooftrace.tracer.inputs import calls

    sizes = list(input_size)
    shapes = [sizes] if all(isinstance(size, int) for size in sizes) else sizes
    for shape in shapes:
        if not isinstance(shape, (tuple, list)) or not all(isinstance(n, int) for n in shape):
            raise RequestError(
                f"input_size={input_size!r:.60}: expected a shape, as (8, 3, 224, 224), or a list "
                "of shapes"
            )
    several = isinstance(dtypes, (tuple, list))
    types = list(dtypes) if several else [dtypes] * len(shapes)
    if len(types) != len(shapes):
        raise RequestError(f"dtypes: {len(types)} for {len(shapes)} inputs; give one for each")
    return tuple(
        calls.floating_input(model, tuple(shape))
        if dtype is None
        else calls.typed_input(tuple(shape), dtype)
        for shape, dtype in zip(shapes, types, strict=True)
    )


def _gradients(model: Source) -> dict[str, bool] | None:
    """Whether each parameter of a module asks for a gradient, by name; None for other sources."""
    named = getattr(model, "named_parameters", None)
    if named is None:
        return None
    return {name: bool(parameter.requires_grad) for name, parameter in named()}


def flop_count_table(source: Source, *args: Any, max_depth: int = 3, **kwargs: Any) -> str:
    """A table of parameters, FLOP and multiply-adds by module, as fvcore prints one.

    source, args: an Estimate, or whatever `estimate` takes.  max_depth: how far down modules are
    listed.  A multiply-add is 2 FLOP here; fvcore's own column "#flops" counts it as 1.
    """
    result = source if isinstance(source, Estimate) else estimate(source, *args, **kwargs)
    if isinstance(source, Estimate) and (args or kwargs):
        raise RequestError("flop_count_table: an Estimate is called already; leave arguments out")
    if isinstance(result, moduletree.Summary):
        made = replace(result, depth=max_depth, col_names=_FLOPS)
    else:
        made = _summary(result, _gradients(source), max_depth, _FLOPS)
    return as_markdown(made).rstrip()


_FLOPS = ("num_params", "flops", "mult_adds")


class Captured:
    """A block of code that is recorded; after its end `graph` has its ops, and it can be counted.

    `get_total_flops` and `get_flop_counts` are those of torch's FlopCounterMode.
    """

    def __init__(self, block: Any) -> None:
        self._block = block

    def __enter__(self) -> Captured:
        self._block.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._block.__exit__(*exception)

    @property
    def graph(self) -> OpGraph:
        """The graph of the block.  Raises RequestError before its end."""
        graph: OpGraph = self._block.graph
        return graph

    def get_total_flops(self) -> int:
        """FLOP in matrix products, convolutions and attention: forward, backward, optimizer.

        A multiply-add is 2 and attention is dense, as in FlopCounterMode.  `rt.estimate(c.graph)`
        has the vector work too.
        """
        return sum(flop_counts(self.graph).values())

    def get_flop_counts(self) -> dict[str, dict[str, int]]:
        """FLOP by module and op: {"Global": {"aten.mm": 4096}, "Net": ..., "Net.head": ...}.

        The sums of a module include the modules inside it.
        """
        root = str(self.graph.model.get("class") or "model")
        counts: dict[str, dict[str, int]] = {"Global": {}}
        for (path, op), flops in flop_counts(self.graph).items():
            for name in ("Global", *(".".join(filter(None, (root, p))) for p in _around(path))):
                sums = counts.setdefault(name, {})
                sums[op] = sums.get(op, 0) + flops
        return counts

    def get_table(self, depth: int = 2) -> str:
        """The FLOP by module as a table (`flop_count_table`)."""
        return flop_count_table(self.graph, max_depth=depth)

    def __repr__(self) -> str:
        return short(self, repr(self._block.graph) if self._block.ended else "not ended")


def _around(path: str) -> list[str]:
    """A module path after those of the modules around it: "", "a", "a.b"."""
    parts = path.split(".") if path else []
    return [".".join(parts[:n]) for n in range(len(parts) + 1)]


def capture(*modules: Module, assume: Mapping[str, Any] | None = None) -> Captured:
    """Record any code that uses `modules`; nothing is computed, and nothing changes.

        with rt.capture(model) as c:
            loss = my_step(model, batch)
        c.graph  # phase "training" if a backward ran inside, else "forward"
        c.get_total_flops()

    Inside, the modules and the optimizers of their weights are on the meta device; after it they
    have their weights, gradients and states again.  Real tensors that a module is called with
    become inputs; tensors that the block makes stay on meta.  In the graph, several modules have
    the names of their classes.  assume: as for `trace`.

    A trace or an estimate inside of the block is no part of it; building a module there is.
    Raises RequestError for a capture inside of a capture or a trace, and for a module that cannot
    move to meta: `trace` takes the step as a function.
    """
    from rooftrace.tracer import capture as block_of

    return Captured(block_of(*modules, assume=assume))
