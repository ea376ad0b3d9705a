"""The functions whose arguments stand in records, with all of them in the stub beside this file.

`python -m tests.reporting.signatures` writes the stub, and a test holds it against what the
functions take.  From the stub, editors follow the imports below to the function itself.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rooftrace._face import names
from rooftrace.reporting.commands.calls import takes

if TYPE_CHECKING:
    from rooftrace.reporting.commands import sweep_fleet as sweep_fleet
    from rooftrace.reporting.commands.compat import profile as profile, summary as summary
    from rooftrace.reporting.commands.differences import compare as compare, diff as diff
    from rooftrace.reporting.commands.estimates import (
        estimate as estimate,
        priced_graphs as priced_graphs,
        roofline as roofline,
        run as run,
    )
    from rooftrace.reporting.commands.explaining import (
        explain as explain,
        explore as explore,
        graph_breaks as graph_breaks,
    )
    from rooftrace.reporting.commands.measurements import (
        calibrate as calibrate,
        validate as validate,
    )
    from rooftrace.reporting.commands.meshes import (
        best_mesh as best_mesh,
        scaling as scaling,
        training_run as training_run,
    )
    from rooftrace.reporting.commands.reports import (
        largest_batch as largest_batch,
        report as report,
        reports as reports,
    )
    from rooftrace.reporting.commands.sensitivity import sensitivity as sensitivity
    from rooftrace.reporting.commands.solving import solve as solve
    from rooftrace.reporting.commands.sweeps import form as form, sweep as sweep
    from rooftrace.tracer import trace as trace

WHERE = {
    name: module
    for name, (module, _) in names(__name__, Path(__file__).read_text(encoding="utf-8")).items()
}
"""{function: its module}, by the imports above, which are made when a function is first used."""


def __getattr__(name: str) -> Any:
    if name not in WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return takes(getattr(import_module(WHERE[name]), name))
