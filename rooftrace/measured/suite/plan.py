"""A plan of what to measure, and the command line that repeats it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rooftrace.measured.bench import devices

BUDGET_S, QUICK_S = 480.0, 90.0
"""The usual budget of the suite, and of a quick trial [s]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuitePlan:
    """A plan: which cases to measure, on which device, into which file."""

    out: Path  # the run; one that is there is gone on with
    device: str  # "cpu", "cuda", "cuda:1"
    budget_s: float = BUDGET_S  # s to spend
    quick: bool = False  # a trial of everything in about a minute
    # Models of the suite (wildcards too) or targets as `rooftrace report` takes them; none: all.
    names: tuple[str, ...] = ()
    phases: tuple[str, ...] | None = None  # of a target; None: all that it has
    batch: int | None = None  # of a target
    seq: int | None = None  # of a target

    @staticmethod
    def of(
        names: Sequence[str] = (),
        *,
        out: str | None = None,
        device: str | None = None,
        budget_s: float | None = None,
        quick: bool = False,
        phases: Sequence[str] | None = None,
        batch: int | None = None,
        seq: int | None = None,
    ) -> SuitePlan:
        """A plan with defaults for arguments that are None.

        out: measurements/DEVICE-DATE.json.gz; where a launcher has started this process as another
        rank than the first, the file has the rank in its name.  device: cuda where there is one.
        budget_s: 480, of a quick trial 90.  Raises MeasureError for a device that does not exist.
        """
        device = device or devices.default_device()
        usual = QUICK_S if quick else BUDGET_S
        return SuitePlan(
            out=_of_rank(Path(out) if out else _usual_file(device)),
            device=device,
            budget_s=usual if budget_s is None else budget_s,
            quick=quick,
            names=tuple(names),
            phases=tuple(phases) if phases else None,
            batch=batch,
            seq=seq,
        )

    def arguments(self, budget_s: float) -> list[str]:
        """The arguments of the command that repeats this plan, with another budget."""
        arguments = [*self.names, "--out", str(self.out), "--device", self.device]
        arguments += ["--budget", f"{budget_s:.0f}"]
        arguments += ["--quick"] if self.quick else []
        arguments += ["--phase", ",".join(self.phases)] if self.phases else []
        arguments += ["--batch", str(self.batch)] if self.batch is not None else []
        return [*arguments, "--seq", str(self.seq)] if self.seq is not None else arguments


def _of_rank(path: Path) -> Path:
    """The file of this process: each that a launcher has started has its own."""
    rank = os.environ.get("RANK", "0")
    if not rank.isdigit() or int(rank) == 0:
        return path
    name, dot, ending = path.name.partition(".")
    return path.with_name(f"{name}-rank{int(rank)}{dot}{ending}")


def _usual_file(device: str) -> Path:
    facts = devices.device_facts(devices.checked_device(device))
    name = devices.slug(str(facts["name"])).removesuffix("-measured")
    return Path("measurements") / f"{name}-{time.strftime('%Y-%m-%d', time.gmtime())}.json.gz"
