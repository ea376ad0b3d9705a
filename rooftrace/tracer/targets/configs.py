"""Hugging Face configs: computing precision, weights not built, and fields that load code."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from rooftrace._reading import FileKind, json_of, text_of
from rooftrace.errors import RequestError, TargetError
from rooftrace.hardware.precisions import storage_bytes
from rooftrace.hardware.units import format_count, format_traffic
from rooftrace.tracer.targets.checkpoints import CheckpointError, open_checkpoint
from rooftrace.tracer.targets.declared import Declared
from rooftrace.tracer.targets.quantized_weights import forms_of_copy
from rooftrace.tracer.values import dtype_name

# -- precision -------------------------------------------------------------------------------------
# The precision that a model of a config computes in, and where that stands.

DEFAULT = torch.bfloat16
"""The precision of published models whose config names none."""
_FIELDS = ("dtype", "torch_dtype")
_HALF = 1.5, 3.0
"""Bytes of a parameter between which most are stored in 16 bits."""
_INDEX = FileKind("JSON file", TargetError)
_FIRST = ("text_config", "llm_config", "language_config", "thinker_config", "decoder")


class ComputeDtype(NamedTuple):
    """A dtype, and a sentence for the reader where it was not plainly said.

    assumed: whether nothing said it.  total: bytes of a checkpoint that has an index alone.
    """

    dtype: torch.dtype
    text: str = ""
    assumed: bool = False
    total: int = 0

    def by_size(self, parameters: int) -> ComputeDtype:
        """The precision by the bytes of a parameter in an index, if nothing else names one."""
        each = self.total / (parameters or 1) if self.assumed else 0.0
        if each < _HALF[0]:
            return self
        dtype = self.dtype if each < _HALF[1] else torch.float32
        text = (
            f"no dtype in the config: the index beside it has {each:.1f} bytes a parameter, so "
            f"{dtype_name(dtype)} is taken (--dtype)"
        )
        return ComputeDtype(dtype, text)


def precision_of(data: Mapping[str, Any], folder: Path | None) -> ComputeDtype:
    """The precision in which the model of a config computes.

    A dtype of the outer config decides, else that of an inner config (the language model's first),
    else that of most numbers of the checkpoint in `folder`, else bfloat16, which is
    assumed.  Raises TargetError for a dtype that torch does not have.
    """
    fields = list(_fields(data, ""))
    if fields:
        where, dtype = fields[0]
        others = [f"{place} says {dtype_name(d)}" for place, d in fields if d is not dtype]
        if "." not in where or not others:
            return ComputeDtype(dtype)
        text = (
            f"{where} says {dtype_name(dtype)}, and the whole model is taken to compute in it; "
            f"{', '.join(others[:4])}"
        )
        return ComputeDtype(dtype, text)
    stored = None if folder is None else _stored_in(folder)
    if stored is not None:
        text = f"no dtype in the config: most of the checkpoint beside it is {dtype_name(stored)}"
        return ComputeDtype(stored, text)
    text = f"nothing says what the model computes in: {dtype_name(DEFAULT)} is taken (--dtype)"
    return ComputeDtype(DEFAULT, text, assumed=True, total=_total_in(folder))


def in_fp32(error: RequestError) -> ComputeDtype:
    """fp32 for a model that names no precision and does not run in bf16."""
    text = (
        "nothing says what the model computes in: fp32 is taken (--dtype), as it does not run in "
        f"{dtype_name(DEFAULT)} ({error!s:.160})"
    )
    return ComputeDtype(torch.float32, text)


def _fields(data: Mapping[str, Any], path: str) -> Iterator[tuple[str, torch.dtype]]:
    """Dtypes of a config and of those inside, outermost and language models first."""
    for name in _FIELDS:
        value = data.get(name)
        if value is not None and value != "auto":
            where = f"{path}{name}"
            yield where, _dtype(value, where)
            break
    inside = [k for k, v in data.items() if isinstance(v, Mapping) and k.endswith("config")]
    inside += [k for k in ("decoder", "encoder") if isinstance(data.get(k), Mapping)]
    for name in sorted(inside, key=lambda k: (k not in _FIRST, inside.index(k))):
        if "quant" not in name:
            yield from _fields(data[name], f"{path}{name}.")


def _dtype(value: Any, where: str) -> torch.dtype:
    name = value.removeprefix("torch.") if isinstance(value, str) else value
    dtype = vars(torch).get(name) if isinstance(name, str) else name
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise TargetError(
            f"{where} is {value!r:.60}: expected the name of a dtype of torch, for example bfloat16"
        )
    return dtype


def _total_in(folder: Path | None) -> int:
    """`total_size` of the index of a sharded checkpoint; 0 without one."""
    index = None if folder is None else folder / "model.safetensors.index.json"
    if index is None or not index.is_file():
        return 0
    data = json_of(text_of(index, _INDEX), str(index), _INDEX)
    metadata = data.get("metadata") if isinstance(data, dict) else None
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return total if isinstance(total, int) else 0


def _stored_in(folder: Path) -> torch.dtype | None:
    """The dtype of most floating numbers of the checkpoint in a folder; None without one."""
    try:
        tensors = open_checkpoint(folder).tensors
    except (CheckpointError, OSError):
        return None
    sizes: Counter[str] = Counter()
    for tensor in tensors.values():
        sizes[tensor.dtype] += tensor.elements
    dtypes = {dtype_name(each): each for each in (torch.bfloat16, torch.float16, torch.float32)}
    return next((dtypes[name] for name, _ in sizes.most_common() if name in dtypes), None)


# -- unbuilt ---------------------------------------------------------------------------------------
# Weights that a checkpoint holds, and the class of its model does not build.

_PREDICTORS = re.compile(r"num_nextn_predict_layers|(num_|n_)?mtp_(num_)?(hidden_)?layers")
"""Fields with the number of layers that predict further tokens (DeepSeek-V3, section 2.2)."""
_BUILT = re.compile(r"(^|[._])(mtp|nextn)")


def unbuilt(data: Mapping[str, Any], module: nn.Module, declared: Sequence[Declared]) -> str:
    """A sentence on layers for further tokens that a config counts and a module lacks; "" without.

    Each is taken to be as large as the largest layer of the longest stack, with a projection of two
    hidden states to one, in the formats that `declared` gives a module of its name: checkpoints
    call it the next layer of the stack, or mtp.layers.0.  Some hold further tables of embeddings
    with it, which no config says: a second number has them.
    """
    counted = next(_counted(data, ""), None)
    if counted is None or any(_BUILT.search(path) for path, _ in module.named_modules()):
        return ""
    where, count = counted
    stacks = [
        (path, m) for path, m in module.named_modules() if isinstance(m, nn.ModuleList) and len(m)
    ]
    if not stacks:
        return ""
    path, stack = max(stacks, key=lambda each: len(each[1]))
    params, size, layer = max(
        (*_size(layer, {}), f"{path}.{name}") for name, layer in stack.named_children()
    )
    names = [f"{path}.{len(stack)}", "mtp.layers.0"]
    params, size = _size(module.get_submodule(layer), forms_of_copy(module, declared, layer, names))
    tables = [_table(module, "get_input_embeddings"), _table(module, "get_output_embeddings")]
    hidden = max((t.shape[-1] for t in tables if t is not None), default=0)
    element = next((t.element_size() for t in tables if t is not None), 2)
    params, size = params + 2 * hidden**2, size + 2 * hidden**2 * element
    table_elements = sum(t.numel() for t in tables if t is not None)
    traffic = format_traffic(count * (size + table_elements * element))
    more = f", or {traffic} where they have embeddings and an output head of their own"
    return (
        f"{where} is {count}: the checkpoint also holds layers that predict further tokens, which "
        f"{type(module).__name__} does not build; they are not counted: about "
        f"{format_count(count * params)} parameters, {format_traffic(count * size)}"
        + (more if table_elements else "")
    )


def _counted(data: Mapping[str, Any], path: str) -> Iterator[tuple[str, int]]:
    for name, value in data.items():
        if isinstance(value, Mapping):
            yield from _counted(value, f"{path}{name}.")
        elif _PREDICTORS.fullmatch(name) and type(value) is int and value > 0:
            yield f"{path}{name}", value


def _table(module: nn.Module, getter: str) -> nn.Parameter | None:
    weight = getattr(getattr(module, getter, lambda: None)(), "weight", None)
    return weight if isinstance(weight, nn.Parameter) else None


def _size(layer: nn.Module, forms: Mapping[int, str]) -> tuple[int, int]:
    """Parameters of a layer, and their bytes in these formats, by the id of a tensor."""
    params = size = 0
    for tensor in layer.parameters():
        params += tensor.numel()
        form = forms.get(id(tensor))
        bytes_here = tensor.numel() * tensor.element_size()
        size += bytes_here if form is None else storage_bytes(form, tensor.numel())
    return params, size


# -- remote code -----------------------------------------------------------------------------------
# Fields of a Hugging Face config that make transformers load code or ask the hub.
#
# A config is data.  Without `trust_remote_code` such a field is refused, at any depth; `auto_map`
# is taken out, because a config that transformers knows has its class there.  docs/security.md
# lists them.

ATTENTION = ("eager", "sdpa", "flex_attention")
"""Implementations of attention in torch or transformers.  transformers takes a name
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
    for path, table in _tables(with_own_attention(data)[0]):
        for key, value in table.items():
            reason = _reason(key, value, table)
            if reason:
                where = f"{path}.{key}" if path else str(key)
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

    They say how the model was saved, and need a package; torch's attention runs the same
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
    """A field without its mark of privacy."""
    return str(key).lstrip("_").removesuffix("_internal")


def _without_code(value: Any) -> Any:
    if isinstance(value, Mapping):
        return without_code(value)
    return [_without_code(item) for item in value] if isinstance(value, list) else value


def _tables(data: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every table of a config with the path of its keys."""
    left: list[tuple[str, Any]] = [("", data)]
    while left:
        path, value = left.pop()
        if isinstance(value, Mapping):
            yield path, value
            left += [(f"{path}.{key}" if path else str(key), v) for key, v in value.items()]
        elif isinstance(value, list):
            left += [(f"{path}[{number}]", item) for number, item in enumerate(value)]


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
    may_load = key == "model_type" and value in (*KERNELS, *KERNELS_OF_4)
    if may_load and importlib.util.find_spec("kernels") and value in _kernels():
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
