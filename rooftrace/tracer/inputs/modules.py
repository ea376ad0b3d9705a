"""Inputs of a module at the sizes of a request: its own, described in text, or guessed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from rooftrace.errors import RequestError
from rooftrace.tracer.asking import Request
from rooftrace.tracer.dtypes import dtype_name
from rooftrace.tracer.inputs.arguments import parsed_inputs
from rooftrace.tracer.inputs.calls import Inputs, call_inputs, check_names
from rooftrace.tracer.inputs.huggingface_inputs import model_inputs
from rooftrace.tracer.twins import inputs_on_meta


def module_inputs(
    module: nn.Module,
    request: Request,
    inputs: Any = None,
    target: str = "",
    attribute: str = "",
) -> Inputs:
    """Inputs of a module at the sizes of the request.

    They come with the module, from the request, or from the config of a Hugging Face model.  Raises
    RequestError where there are none, or for a size that the inputs do not have.
    """
    target = target or type(module).__name__
    args, kwargs = _arguments(inputs)
    described = parsed_inputs(request.inputs)
    check_names(module, described)
    if not args and not kwargs and hasattr(module, "main_input_name"):
        return model_inputs(module, request)  # a Hugging Face model says what it takes
    if not args and not kwargs and not described:
        raise RequestError(
            f"{target}: no inputs; let {attribute} return (module, inputs), or pass "
            "--input NAME=SHAPE:DTYPE, for example --input x=8,3,224,224:fp32"
            if attribute
            else f"{target}: no inputs; pass them, or their shapes, for example "
            'inputs={"x": "8,3,224,224:fp32"}'
        )
    return _fixed_inputs(module, args, {**kwargs, **described}, target, request)


def _fixed_inputs(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], target: str, request: Request
) -> Inputs:
    """Inputs that the target's own code, or --input, gave: only their batch can be changed."""
    for flag in ("seq", "kv"):
        if getattr(request, flag) is not None:
            raise RequestError(
                f"--{flag} {getattr(request, flag)}: {target} makes its own inputs; change their "
                "length there, or pass --input NAME=SHAPE:DTYPE"
            )
    inputs = call_inputs(module, args, kwargs, request.batch)
    shown = _described(inputs.args, inputs.kwargs)
    return replace(inputs, workload={**inputs.workload, "inputs": shown})


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs that a target returned with its module, as arguments of a call on meta."""
    inputs = inputs_on_meta(inputs)
    if inputs is None:
        return (), {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, (tuple, list)) else ((inputs,), {})


def _described(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, str]:
    """Each argument in a few characters: "fp32[8, 3, 224, 224]"."""
    named = {**{str(i): item for i, item in enumerate(args)}, **kwargs}
    return {
        name: f"{dtype_name(item.dtype)}[{', '.join(map(str, item.shape))}]"
        if isinstance(item, Tensor)
        else repr(item)[:60]
        for name, item in named.items()
    }
