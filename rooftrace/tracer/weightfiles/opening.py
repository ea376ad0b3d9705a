"""From a path to a checkpoint: one file, an index of shards, or the folder of either."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from rooftrace._reading import json_of, record_of, text_of
from rooftrace.hardware.units import plural
from rooftrace.tracer.weightfiles.filenames import (
    ENDS,
    INDEX,
    MODEL,
    SAFETENSORS,
    TORCH,
    in_folder,
)
from rooftrace.tracer.weightfiles.safetensorsfile import read_header
from rooftrace.tracer.weightfiles.stored import KIND, Checkpoint, CheckpointError, Stored
from rooftrace.tracer.weightfiles.torchfile import read_torch


@dataclass(frozen=True, slots=True)
class _Index:
    """Which file of a sharded checkpoint has which tensor."""

    weight_map: dict[str, str]
    metadata: dict[str, Any] = field(default_factory=dict)


def open_checkpoint(source: str | os.PathLike[str]) -> Checkpoint:
    """The tensors of a checkpoint; their bytes are read later, slice by slice.

    source: a file of safetensors or torch.save, the index.json of a sharded one, or the folder of
    one.  Raises CheckpointError for any other file, for a damaged one, and OSError.
    """
    path = Path(source)
    try:
        path = _file_of(path)
        if path.name.endswith(INDEX):
            return _sharded(path, os.fspath(source))
        tensors, notes = _read_file(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"{error.filename or source}: there is no such file") from None
    return _checkpoint(path, os.fspath(source), {t.name: t for t in tensors}, notes=notes)


def _file_of(path: Path) -> Path:
    """The file that a path names: itself, or the only checkpoint of a folder."""
    if not path.is_dir():
        return path
    kinds = list(in_folder(path))
    if not kinds:
        raise CheckpointError(f"{path}: expected a folder with one of *{', *'.join(ENDS)}")
    files = kinds[0]
    named = [file for file in files if file.name.partition(".")[0] in MODEL]
    if len(files) > 1 and len(named) != 1:
        names = ", ".join(file.name for file in files[:6]) + (" ..." if len(files) > 6 else "")
        raise CheckpointError(f"{path}: {len(files)} checkpoints ({names}); name one of them")
    return named[0] if named else files[0]


def _read_file(path: Path) -> tuple[list[Stored], tuple[str, ...]]:
    if path.name.endswith(SAFETENSORS):
        return read_header(path), ()
    if not path.name.endswith(TORCH):
        raise CheckpointError(f"{path}: expected a file *{', *'.join(ENDS)}, or its folder")
    tensors, others = read_torch(path)
    beside = f"{path.name}: {plural(others, 'value')} beside the tensors: not read"
    return tensors, (beside,) if others else ()


def _sharded(path: Path, source: str) -> Checkpoint:
    """A checkpoint of several files.  Its index has to name files in its folder, and no others."""
    where = str(path)
    data = json_of(text_of(path, KIND), where, KIND, unique=True)
    index = record_of(_Index, data, where, KIND)
    by_file: dict[str, list[str]] = {}
    for name, file in index.weight_map.items():
        by_file.setdefault(file, []).append(name)
    tensors: dict[str, Stored] = {}
    notes: list[str] = []
    for file, names in sorted(by_file.items()):
        shard = _shard(path, file)
        stored, beside = _read_file(shard)
        there = {tensor.name: tensor for tensor in stored}
        missing = [name for name in names if name not in there]
        if missing:
            raise KIND.refused(
                where,
                f"{file!r:.200} lacks {missing[0]!r:.200}"
                + (f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""),
            )
        tensors |= {name: there[name] for name in names}
        notes += beside
        if len(there) > len(names):
            more = plural(len(there) - len(names), "tensor")
            notes.append(f"{file}: {more} that the index leaves out: not read")
    return _checkpoint(path, source, tensors, files=len(by_file), notes=tuple(notes))


def _shard(index: Path, file: str) -> Path:
    """The path of a shard.  Raises CheckpointError where it is not there, or not in the folder."""
    parts = PurePosixPath(file).parts
    if not parts or ".." in parts or PurePosixPath(file).is_absolute() or "\\" in file:
        raise KIND.refused(str(index), f"shard {file!r:.200} is not in the folder of the index")
    if not file.endswith((SAFETENSORS, *TORCH)) or ":" in file or "\0" in file:
        raise KIND.refused(str(index), f"shard {file!r:.200}: expected a file of weights")
    path = index.parent / file
    if not path.is_file():
        raise KIND.refused(str(index), f"there is no shard {file!r:.200}")
    return path


def _checkpoint(
    path: Path,
    source: str,
    tensors: dict[str, Stored],
    files: int = 1,
    notes: tuple[str, ...] = (),
) -> Checkpoint:
    config = path.parent / "config.json"
    return Checkpoint(
        path=source,
        kind="safetensors" if SAFETENSORS in path.name else "torch",
        tensors=tensors,
        files=files,
        notes=notes,
        config=str(config) if config.is_file() else None,
    )
