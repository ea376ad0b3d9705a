"""A run of a target with random weights: each of its phases, kernel by kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce

from rooftrace.errors import RequestError, TargetError
from rooftrace.measured.bench import Bench, devices
from rooftrace.measured.realsteps.measurement import measure
from rooftrace.measured.realsteps.realize import realized
from rooftrace.measured.runs import Run
from rooftrace.tracer.asking import Request, names

_SECONDS = 3.0
"""For the repetitions of one phase."""


def measured_target(
    target: str,
    request: Request | None = None,
    phases: Sequence[str] | None = None,
    compiled: bool = False,
    device: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Run:
    """Time each phase of a target, and each op or compiled kernel of it, on a device.

    phases: by default all that the target has.  device: by default cuda where there is one.
    Weights and inputs are random.  Raises TargetError or RequestError for a target, sizes or a
    phase that make no sense, and the errors of the module.
    """
    import torch

    if names.is_script(target):
        raise RequestError(
            f"--run {target!r}: a script is measured into a file, rooftrace measure {target!r} "
            "-o run.json.gz; then calibrate by it: rooftrace calibrate run.json.gz --trust-targets"
        )
    tell = progress or (lambda _: None)
    for phase in phases or ():
        if phase not in names.MEASURED:
            raise RequestError(f"phase {phase!r:.60}: expected one of {', '.join(names.MEASURED)}")
    bench = Bench(devices.checked_device(device or devices.default_device()), _SECONDS, tell)
    module, args, kwargs = realized(target, bench, request)
    runs: list[Run] = []
    missing: RequestError | None = None
    for phase in phases or names.MEASURED:
        tell(f"measuring {phase}{', compiled' if compiled else ''}")
        if compiled:
            torch._dynamo.reset()
        try:
            runs.append(
                measure(
                    module,
                    *args,
                    phase=phase,
                    compiled=compiled,
                    budget_s=_SECONDS,
                    name=target,
                    **kwargs,
                )
            )
        except RequestError as error:  # a phase that the target has not
            if phases:
                raise
            missing = error
    if not runs:
        raise TargetError(f"{target}: no phase of it can be measured: {missing}")
    return reduce(_joined, runs)


def _joined(first: Run, second: Run) -> Run:
    """Two runs of one device as one, with the quicker copy."""
    return replace(
        first,
        models=(*first.models, *second.models),
        micro=(min(first.micro + second.micro, key=lambda row: row.median),),
        graphs={**first.graphs, **second.graphs},
    )
