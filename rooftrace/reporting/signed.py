"""The functions whose arguments stand in records, with all of them in the stub beside this file.

The stub is for editors and type checkers.  `python -m tests.reporting.signatures` writes it, and a
test holds it against what the functions take.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

WHERE = {
    "best_mesh": "meshes",
    "calibrate": "measurements",
    "compare": "differences",
    "diff": "differences",
    "estimate": "estimates",
    "explain": "explaining",
    "explore": "exploring",
    "graph_breaks": "graphbreaks",
    "largest_batch": "reports",
    "priced_graphs": "estimates",
    "profile": "habits",
    "report": "reports",
    "roofline": "rooflines",
    "run": "scripts",
    "scaling": "meshes",
    "sensitivity": "sensitivity",
    "solve": "solving",
    "summary": "habits",
    "sweep": "sweeps",
    "validate": "measurements",
}
"""The file of each function."""


def __getattr__(name: str) -> Any:
    if name not in WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"rooftrace.reporting.{WHERE[name]}"), name)
