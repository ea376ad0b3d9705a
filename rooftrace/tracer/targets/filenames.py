"""Which paths name a checkpoint, by their names alone; no file is opened."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SAFETENSORS = ".safetensors"
TORCH = (".bin", ".pt", ".pth", ".ckpt")
INDEX = ".index.json"
ENDS = (f"{SAFETENSORS}{INDEX}", SAFETENSORS, *(f"{suffix}{INDEX}" for suffix in TORCH), *TORCH)
"""How the names of checkpoints end; of those in one folder the first kind counts."""
MODEL = ("model", "pytorch_model")
"""Stems of the file that is meant where a folder has several of one kind."""
_STATES = ("training_args", "optimizer", "scheduler", "scaler", "rng_state")
"""Prefixes of files that a trainer writes next to the weights."""


def is_checkpoint(source: Any) -> bool:
    """Whether a source names a file of weights, an index of such files, or a folder with one."""
    if not isinstance(source, (str, os.PathLike)):
        return False
    path = Path(source)
    if path.name.endswith(ENDS):
        return True
    return os.path.isdir(path) and any(True for _ in in_folder(path))


def are_weights(before: Any, after: Any) -> bool:
    """Whether two sources are compared by their weights: they have no step that could be run.

    A folder with a config.json is a checkpoint where the other side is one too; next to a target it
    is the target of its config.
    """
    sides = before, after
    kinds = [is_checkpoint(side) for side in sides]
    files = [kind and not _has_config(side) for kind, side in zip(kinds, sides, strict=True)]
    return all(kinds) or any(files)


def _has_config(source: str | os.PathLike[str]) -> bool:
    return os.path.isfile(os.path.join(source, "config.json"))


def in_folder(folder: Path) -> Iterator[list[Path]]:
    """The checkpoints in a folder, kind by kind."""
    names = sorted(
        path
        for path in folder.iterdir()
        if path.name.endswith(ENDS) and not path.name.startswith(_STATES) and path.is_file()
    )
    for end in ENDS:
        matching = [path for path in names if path.name.endswith(end)]
        if matching:
            yield matching
