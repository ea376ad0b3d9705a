"""Names that may be asked for: phases, and what a target names by its spelling; no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rooftrace._extensions import failures, load, refuse_second, track
from rooftrace.errors import RequestError
from rooftrace.tracer.asking.commands import (
    RUN as RUN,
    STEPS as STEPS,
    ScriptCommand as ScriptCommand,
    is_script as is_script,
)
from rooftrace.tracer.graphfiles import looks_saved

BOUNDARIES = ("auto", "batch", "call", "optimizer", "mark")
"""What may begin a turn of a script."""
CHECKPOINTS = ("none", "full", "selective")
"""none: all are kept.  full: those inside of a layer are made again.  selective: as full, but every
second matrix product, attention and what is exchanged are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A kind of step: what is run of a module."""

    name: str
    # From a PhaseRunner and the Recorder that is on, to the Step that it leaves.
    run: Callable[[Any, Any], Any]
    tokens: int = 0  # that one call runs after a cache, whose length is --kv; 0: it needs none
    cached: bool = False  # only a module that keeps a cache has it
    trains: bool = False  # train mode, with labels, loss and optimizer


PHASES = (
    Phase(name="forward", run=lambda runner, recorder: runner.forward(recorder)),
    Phase(name="training", run=lambda runner, recorder: runner.training(recorder), trains=True),
    Phase(name="prefill", run=lambda runner, recorder: runner.prefill(recorder), cached=True),
    Phase(
        name="decode",
        run=lambda runner, recorder: runner.decode(recorder),
        tokens=1,
        cached=True,
    ),
    Phase(name="requests", run=lambda runner, recorder: runner.requests(recorder), cached=True),
)
"""The phases of this package."""
NAMES = tuple(ours.name for ours in PHASES)
"""Their names."""
MEASURED = ("forward", "training", "prefill", "decode")
"""Those that can also be measured on a device."""

_OWN: dict[str, Phase] = track({})

Run = TypeVar("Run", bound=Callable[[Any, Any], Any])


def phase(
    name: str, *, tokens: int = 0, trains: bool = False, override: bool = False
) -> Callable[[Run], Run]:
    """Register the decorated function `run(runner, recorder) -> Step` as a phase of this name.

    It runs the module once; what it runs is recorded, except `with recorder.paused():`.  runner: a
    PhaseRunner, with the `module`, its `inputs` and `calls`, and a method for each phase of
    rooftrace to build on.  tokens: how many one call runs after a cache of `kv` positions, which
    `runner.decode` then does; 0: the phase needs no cache.  trains: the module is in train mode,
    and loss and optimizer may be asked for.

    A second phase of one name raises ValueError, unless override=True or it is the same function
    defined again; so does the name of one of rooftrace's own.
    """
    if name in NAMES:
        raise ValueError(f"{name!r} is a phase of rooftrace's own; use another name")

    def register(run: Run) -> Run:
        old = _OWN.get(name)
        refuse_second(
            f"{name!r} already is a phase",
            old.run if old is not None else None,
            run,
            override=override,
        )
        _OWN[name] = Phase(name=name, run=run, tokens=tokens, cached=tokens > 0, trains=trains)
        return run

    return register


def phases() -> dict[str, Phase]:
    """Every phase that may be asked for, by name."""
    load("rooftrace.phases")
    return {known.name: known for known in (*PHASES, *_OWN.values())}


def phase_of(name: str) -> Phase:
    """The phase of this name.  Raises RequestError where there is none."""
    known = phases()
    if name not in known:
        broken = failures("rooftrace.phases")
        expected = f"phase {name!r:.60}: expected one of {', '.join(known)}"
        raise RequestError("; ".join((expected, *broken)))
    return known[name]


def is_own(name: str) -> bool:
    """Whether a phase was registered in this process, by a user or a package."""
    return name in _OWN


def usual(module: Any) -> tuple[str, ...]:
    """The phases of a module without a cache, where the user names none.

    Training is left out where no parameter can be trained.
    """
    trains = any(parameter.requires_grad for parameter in module.parameters())
    return ("forward", "training") if trains else ("forward",)


_CONFIGS = Path(__file__).parents[1] / "targets" / "configs"


def configs() -> tuple[str, ...]:
    """Names of the Hugging Face configs that come with rooftrace: targets by themselves."""
    return tuple(sorted(path.stem for path in _CONFIGS.glob("*.json")))


def config_file(target: str) -> Path | None:
    """The Hugging Face config that a target names; None for any other target.

    It is a JSON file, the folder of a config.json, a GGUF file, which has one in its header, or the
    name of a config that comes along.
    """
    path = Path(target)
    if target.endswith((".json", ".gguf")):
        return path
    if (path / "config.json").is_file():
        return path / "config.json"
    return _CONFIGS / f"{target}.json" if target in configs() else None


def is_config(target: str) -> bool:
    """Whether a target is a Hugging Face config, its folder, or the name of one of ours."""
    return config_file(target) is not None


_PROGRAMS = (".pt2", ".onnx")


def is_program(target: str) -> bool:
    """Whether a target is a file of torch.export.save (.pt2) or of ONNX (.onnx)."""
    return target.endswith(_PROGRAMS)


def names_code(target: str) -> bool:
    """Whether a target is Python code: package.module:attr, path/file.py:attr, or a script."""
    return is_script(target) or (
        ":" in target
        and not target.startswith("hf:")
        and not is_config(target)
        and not is_program(target)
        and not looks_saved(target)
    )


def where_of(target: str) -> str:
    """The file of a target that is Python code, or the dotted name of its module."""
    if is_script(target):
        return ScriptCommand.of(target).where
    return target.rpartition(":")[0]
