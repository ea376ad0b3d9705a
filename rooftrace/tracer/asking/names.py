"""Names that may be asked for: phases, and what a target names by its spelling; no torch."""

from __future__ import annotations

from pathlib import Path

from rooftrace.tracer.graph import looks_saved

PHASES = ("forward", "training", "prefill", "decode")
"""The phases: what can be run of a module."""
USUAL = ("forward", "training")
"""The phases of a module that is called with arguments, where the user names none."""


def is_config(target: str) -> bool:
    """Whether a target is a Hugging Face config, or the folder of one."""
    return target.endswith(".json") or (Path(target) / "config.json").is_file()


def names_code(target: str) -> bool:
    """Whether a target is Python code: package.module:attr or path/file.py:attr."""
    return (
        ":" in target
        and not target.startswith("hf:")
        and not is_config(target)
        and not looks_saved(target)
    )
