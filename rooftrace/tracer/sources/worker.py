"""The process that `apart` starts: traces one target and answers on stdout in lines of JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from rooftrace._progress import telling
from rooftrace.errors import is_ours
from rooftrace.tracer.graphfiles import save_graphs
from rooftrace.tracer.sources.apart import job_told
from rooftrace.tracer.sources.tracing import traced_target

_COST_MODELS = "rooftrace.costmodels.registry.lookup"


def work(told: Mapping[str, Any]) -> None:
    """Do the job that was told, and end this process."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # prints of the target are no answers

    def answer(**said: Any) -> None:
        answers.write(json.dumps(said) + "\n")
        answers.flush()

    try:
        with telling(lambda text: answer(progress=text)):
            traced = traced_target(job_told(told))
        save_graphs(traced.graphs, told["out"])
        answer(files=dict(traced.files), rules=_COST_MODELS in sys.modules)
    except (ValueError, LookupError, RuntimeError, OSError) as error:
        if not (is_ours(error) or isinstance(error, OSError)):
            raise
        answer(error=[kind.__name__ for kind in type(error).__mro__], message=str(error))
    sys.stdout.flush()
    sys.stderr.flush()
    answers.close()
    os._exit(0)  # taking down a large model object by object takes seconds
