"""JSON files of models that are no configs of transformers: what they are, and what to do.

timm and diffusers build a module from theirs where they are installed; each other kind gets one
error that says what the file is.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rooftrace.errors import TargetError
from rooftrace.tracer.targets.remote_code import CHECKPOINTS
from rooftrace.tracer.values import META

_PLAIN = re.compile(r"[A-Za-z_]\w*(\.\w+)*")


def other_model(data: Mapping[str, Any], target: str) -> tuple[nn.Module, tuple[Any, ...] | None]:
    """The module of a file that is not transformers', on meta, and arguments for a batch of one.

    None for arguments that its library does not know.  Raises TargetError for any other file.
    """
    where = f"target {target!r}"
    if isinstance(data.get("architecture"), str):
        return _of_timm(data, where)
    if isinstance(data.get("_class_name"), str):
        return _of_diffusers(data, where), None
    raise TargetError(f"{where}: {_what(data)}")


def _what(data: Mapping[str, Any]) -> str:
    """What a file is that no library builds a module from, and what to name instead."""
    if "weight_map" in data:
        return (
            "the index of a sharded checkpoint, which names tensors and no model: name its "
            "config.json; `rooftrace inventory` reads the shards"
        )
    if "peft_type" in data:
        base = data.get("base_model_name_or_path")
        return (
            f"a PEFT adapter ({data['peft_type']!s:.20}, r={data.get('r')!r:.20}) of {base!r:.80}: "
            "name the config.json of that model, or code that returns get_peft_model(...) as "
            "file.py:attr"
        )
    if "dim" in data and ("n_layers" in data or "n_heads" in data):
        return (
            "the params.json of Mistral's or Meta's own code: name the config.json of the same "
            "model, which its repository has for transformers"
        )
    of_modelopt = "quant_algo" in str(data.get("quantization", ""))
    packed = "weight_bits" in data or "w_bit" in data or ("bits" in data and "group_size" in data)
    if of_modelopt or packed or "config_groups" in data:
        return "a declaration of quantisation: name the config.json beside it, which reads it"
    return "a Hugging Face config has a model_type; this one has none"


def _of_timm(data: Mapping[str, Any], where: str) -> tuple[nn.Module, tuple[Any, ...]]:
    name, arguments = data["architecture"], data.get("model_args") or {}
    if not _PLAIN.fullmatch(name):
        raise TargetError(f"{where}: architecture {name!r:.60}: expected the name of a timm model")
    if not isinstance(arguments, Mapping) or set(arguments) & set(CHECKPOINTS):
        raise TargetError(f"{where}: model_args {arguments!r:.60}: expected sizes, no checkpoint")
    timm = _library("timm", f"a timm config of {name!r}", where)
    more = {"num_classes": data["num_classes"]} if isinstance(data.get("num_classes"), int) else {}
    try:
        with torch.device(META):
            module: nn.Module = timm.create_model(name, pretrained=False, **{**more, **arguments})
    except Exception as error:  # whatever its code may raise
        raise _refused("timm", error, where) from error
    own = getattr(module, "pretrained_cfg", None) or data.get("pretrained_cfg") or {}
    size = own.get("input_size") or (3, 224, 224)
    return module, (torch.zeros(1, *size, device=META),)


def _of_diffusers(data: Mapping[str, Any], where: str) -> nn.Module:
    name = data["_class_name"]
    parts = [k for k, v in data.items() if isinstance(v, list) and len(v) == 2 and v[0]]
    if name.endswith("Pipeline") and parts:
        raise TargetError(
            f"{where}: a pipeline of diffusers ({', '.join(sorted(parts)[:6])}): name the "
            "config.json of one part, in the folder of its name"
        )
    diffusers = _library("diffusers", f"a config of diffusers' {name}", where)
    kind = getattr(diffusers, name, None) if _PLAIN.fullmatch(name) else None
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise TargetError(f"{where}: {name!r:.60} is no model of diffusers {diffusers.__version__}")
    try:
        with torch.device(META):
            module: nn.Module = kind.from_config(dict(data))  # type: ignore[attr-defined]
    except Exception as error:  # whatever its code may raise
        raise _refused("diffusers", error, where) from error
    return module


def _library(name: str, what: str, where: str) -> Any:
    if importlib.util.find_spec(name) is None:
        raise TargetError(
            f"{where}: {what}: pip install {name} to build it, or name code that returns the "
            "module as file.py:attr"
        )
    try:
        return importlib.import_module(name)
    except Exception as error:  # a broken installation raises anything
        raise _refused(f"importing {name}: it", error, where) from error


def _refused(library: str, error: Exception, where: str) -> TargetError:
    return TargetError(f"{where}: {library} fails: {' '.join(str(error).split()):.300}")
