"""The precision that a model of a config computes in, and where that stands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rooftrace._reading import FileKind, json_of, text_of
from rooftrace.errors import RequestError, TargetError
from rooftrace.tracer.dtypes import dtype_name
from rooftrace.tracer.weightfiles import CheckpointError, open_checkpoint

DEFAULT = torch.bfloat16
"""What models are published in, where nothing says."""
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
        """What the bytes of a parameter say, where nothing else did and an index has them."""
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
    """What the model of a config computes in.

    A dtype of the whole config decides, else that of a config inside (of the language model first),
    else what most numbers of the checkpoint in `folder` are stored in, else bfloat16, which is
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
    """fp32 for a model of which nothing says what it computes in, and that bf16 does not do for."""
    text = (
        "nothing says what the model computes in: fp32 is taken (--dtype), as it does not run in "
        f"{dtype_name(DEFAULT)} ({error!s:.160})"
    )
    return ComputeDtype(torch.float32, text)


def _fields(data: Mapping[str, Any], place: str) -> Iterator[tuple[str, torch.dtype]]:
    """Dtypes of a config and of those inside, outermost and language models first."""
    for name in _FIELDS:
        value = data.get(name)
        if value is not None and value != "auto":
            where = f"{place}{name}"
            yield where, _dtype(value, where)
            break
    inside = [k for k, v in data.items() if isinstance(v, Mapping) and k.endswith("config")]
    inside += [k for k in ("decoder", "encoder") if isinstance(data.get(k), Mapping)]
    for name in sorted(inside, key=lambda k: (k not in _FIRST, inside.index(k))):
        if "quant" not in name:
            yield from _fields(data[name], f"{place}{name}.")


def _dtype(value: Any, where: str) -> torch.dtype:
    name = value.removeprefix("torch.") if isinstance(value, str) else value
    known = vars(torch).get(name) if isinstance(name, str) else name
    if not isinstance(known, torch.dtype) or not known.is_floating_point or known.itemsize < 2:
        raise TargetError(
            f"{where} is {value!r:.60}: expected the name of a dtype of torch, for example bfloat16"
        )
    return known


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
    known = {dtype_name(each): each for each in (torch.bfloat16, torch.float16, torch.float32)}
    return next((known[name] for name, _ in sizes.most_common() if name in known), None)
