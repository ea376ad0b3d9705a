"""The functions whose arguments stand in records, with all of them in the stub beside this file.

The stub is for editors and type checkers.  `python -m tests.reporting.signatures` writes it, and a
test holds it against what the functions take.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from rooftrace.reporting.requests.calls import takes

WHERE = {
    "best_mesh": "reporting.meshes",
    "calibrate": "reporting.measurements",
    "compare": "reporting.differences",
    "diff": "reporting.differences",
    "estimate": "reporting.estimates",
    "explain": "reporting.explaining",
    "explore": "reporting.explaining",
    "form": "reporting.stepforms",
    "graph_breaks": "reporting.explaining",
    "largest_batch": "reporting.reports",
    "priced_graphs": "reporting.estimates",
    "profile": "reporting.habits",
    "report": "reporting.reports",
    "reports": "reporting.reports",
    "roofline": "reporting.rooflines",
    "run": "reporting.scripts",
    "scaling": "reporting.meshes",
    "sensitivity": "reporting.sensitivity",
    "solve": "reporting.solving",
    "summary": "reporting.habits",
    "sweep": "reporting.sweeps",
    "sweep_fleet": "reporting.fleets.sweeps",
    "trace": "tracer.api",
    "validate": "reporting.measurements",
}
"""The file of each function."""


def __getattr__(name: str) -> Any:
    if name not in WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return takes(getattr(import_module(f"rooftrace.{WHERE[name]}"), name))
