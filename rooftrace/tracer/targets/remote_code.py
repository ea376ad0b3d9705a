"""Fields of a Hugging Face config that make transformers load code or ask the hub.

A config is data.  Without `trust_remote_code` such a field is refused, at any depth; `auto_map` is
taken out, because a config that transformers knows has its class there.  docs/security.md lists
them.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rooftrace.errors import TargetError

ATTENTION = ("eager", "sdpa", "flex_attention")
"""Implementations of attention that are torch's or transformers' own.  transformers takes a name
with a slash for a repository of kernels.  flash_attention_2 and its like are taken out."""
EXPERTS = ("eager", "grouped_mm", "batched_mm")
"""Implementations of a mixture of experts without kernels from the hub."""
KERNELS = ("mra", "rwkv", "sam3_video", "yoso")
"""Types of models whose classes load kernels from the hub where the package `kernels` is there."""
KERNELS_OF_4 = ("falcon_mamba", "mamba")
"""More such types, in transformers 4; later releases load theirs by `lazy_load_kernel`."""
CHECKPOINTS = ("checkpoint_path", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay")
"""Arguments of `timm.create_model` that read files (also pickles) or load from the hub."""

_ATTENTION = "attn_implementation"
_FLASH = re.compile(r"flash_attention_\d")
_PLAIN = re.compile(r"[\w.-]+")


def check_config(data: Mapping[str, Any], target: str) -> None:
    """Raise TargetError for a field of a config, at any depth, that would load code."""
    for place, table in _tables(with_own_attention(data)[0]):
        for key, value in table.items():
            reason = _reason(key, value, table)
            if reason:
                where = f"{place}.{key}" if place else str(key)
                raise TargetError(
                    f"target {target!r}: {where} is {value!r:.60}: {reason}; take it out of the "
                    "config, or pass --trust-remote-code (in Python trust_remote_code=True)"
                )


def without_code(data: Mapping[str, Any]) -> dict[str, Any]:
    """The config without `auto_map`, which names classes in a repository, at any depth."""
    cleaned = {key: _without_code(value) for key, value in data.items()}
    cleaned.pop("auto_map", None)
    return cleaned


def with_own_attention(data: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The config without names of flash attention, at any depth, and those names.

    They say what the model was saved with, and ask for a package; torch's attention runs the same
    kernel.
    """
    flash: dict[str, None] = {}

    def cleaned(value: Any, names: bool = False) -> Any:
        if isinstance(value, Mapping):
            inner = {k: cleaned(v, names or _field(k) == _ATTENTION) for k, v in value.items()}
            return {k: v for k, v in inner.items() if v is not _FLASH}
        if isinstance(value, list):
            return [cleaned(item) for item in value]
        if names and isinstance(value, str) and _FLASH.fullmatch(value):
            flash[value] = None
            return _FLASH
        return value

    made: dict[str, Any] = cleaned(data)
    return made, " and ".join(flash)


def _field(key: Any) -> str:
    """A field without what marks it as private."""
    return str(key).lstrip("_").removesuffix("_internal")


def _without_code(value: Any) -> Any:
    if isinstance(value, Mapping):
        return without_code(value)
    return [_without_code(item) for item in value] if isinstance(value, list) else value


def _tables(data: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every table of a config with the path of its keys."""
    left: list[tuple[str, Any]] = [("", data)]
    while left:
        place, value = left.pop()
        if isinstance(value, Mapping):
            yield place, value
            left += [(f"{place}.{key}" if place else str(key), v) for key, v in value.items()]
        elif isinstance(value, list):
            left += [(f"{place}[{number}]", item) for number, item in enumerate(value)]


def _reason(key: str, value: Any, table: Mapping[str, Any]) -> str:
    """Why a field is refused; "" where it is not."""
    plain = _field(key)
    if plain == _ATTENTION and not _all_in(value, ATTENTION):
        return f"transformers may load it as code from the hub; expected {', '.join(ATTENTION)}"
    if plain == "experts_implementation" and not _all_in(value, EXPERTS):
        return f"transformers may load it as code from the hub; expected {', '.join(EXPERTS)}"
    elsewhere = isinstance(value, str) and not _PLAIN.fullmatch(value)
    by_name = isinstance(value, str) and table.get("use_timm_backbone") is False
    if key == "backbone" and (elsewhere or by_name):
        return "transformers looks for it on the hub; expected a backbone_config"
    if key == "architecture" and elsewhere:
        return "timm would load it from the hub or a folder; expected the plain name of a model"
    if key == "model_args" and isinstance(value, Mapping) and set(value) & set(CHECKPOINTS):
        return "timm would read a checkpoint, which may hold code"
    if key == "model_type" and value in _kernels() and importlib.util.find_spec("kernels"):
        return "the class of this type loads kernels from the hub"
    return ""


def _kernels() -> tuple[str, ...]:
    """The types whose classes load kernels, in the installed release of transformers."""
    try:
        from transformers.integrations import hub_kernels
    except ImportError:
        return KERNELS
    return KERNELS if hasattr(hub_kernels, "lazy_load_kernel") else (*KERNELS, *KERNELS_OF_4)


def _all_in(value: Any, names: tuple[str, ...]) -> bool:
    """Whether a value, or each value of a table of sub-configs, is None or one of these names."""
    if isinstance(value, Mapping):
        return all(_all_in(item, names) for item in value.values())
    return value is None or value in names
