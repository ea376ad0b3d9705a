"""Names that may be asked for: phases, and what a target names by its spelling; no torch.

A target that is a script is a command line, and how it is to be run.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rooftrace._extensions import failures, load, refuse_second, track
from rooftrace.errors import RequestError, TargetError, hint, one_of
from rooftrace.graph import looks_saved

BOUNDARIES = ("auto", "batch", "call", "optimizer", "mark")
"""Events that may begin a turn of a script."""
CHECKPOINTS = ("none", "full", "selective")
"""none: all are kept.  full: those inside of a layer are made again.  selective: as full, but every
second matrix product, attention and what is exchanged are kept."""
PLANS = ("engines", "transformers")
"""Whose tensor parallelism a Hugging Face model has."""
ZERO = (1, 2, 3)
"""Stages of ZeRO (Rajbhandari et al., arXiv:1910.02054).  1: replicas share states of the
optimizer, as in Megatron-LM's distributed optimizer.  2: gradients, too: FSDP2 that keeps weights
whole from forward to backward.  3: weights, too: FSDP2 as transformers' plan has it."""
SHARDED = ("dp", "fsdp", "dp_shard")
"""Axes of replicas, over which a Hugging Face model that trains is shared, and over cp."""


def is_shared(mesh: Mapping[str, int]) -> bool:
    """Whether a mesh has replicas that share a Hugging Face model that trains."""
    return any(mesh.get(axis, 1) > 1 for axis in (*SHARDED, "cp"))


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
            f"{name!r} already is a phase", getattr(old, "run", None), run, override=override
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
        expected = f"phase {name!r:.60}: {one_of(name, known)}"
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


_CONFIGS = Path(__file__).parent / "targets" / "configs"


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


def unnamed(target: str) -> TargetError:
    """The error of a target that nothing is named by."""
    return TargetError(
        f"target {target!r}: expected package.module:attr, path/file.py:attr, a Hugging Face "
        "config.json, hf:ORG/NAME, an exported program (.pt2, .onnx), a saved graph (.json.gz), or "
        f"a config that comes along: {', '.join(configs())}{hint(target, configs())}"
    )


def check_named(target: str) -> None:
    """Raise TargetError for a target that is of no form, before any other is traced."""
    named = (names_code, is_config, is_program, looks_saved)
    if ":" not in target and not target.endswith(".json.gz") and not any(f(target) for f in named):
        raise unnamed(target)


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


# -- scripts and their command lines ---------------------------------------------------------------

RUN = "run:"
"""The prefix of a target that is a command."""
_SCRIPTS = (".py", ".ipynb")
STEPS = 3
"""How many training steps a script runs, if nobody says."""
_NUMBERS = ("steps", "ranks", "rank")
_OPTIONS = ("chip", "system", "boundary", *_NUMBERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptCommand:
    """A target that is a script.

    words: its command line.  chip, system: what it sees, by name or path; None: the usual chip.
    steps: after so many training steps it is ended; None: nobody says.  ranks: of how many
    processes it is the one with number `rank`, where no launcher says.  boundary: what begins a
    turn.
    """

    words: tuple[str, ...]
    chip: str | None = None
    system: str | None = None
    steps: int | None = None
    ranks: int | None = None
    rank: int = 0
    boundary: str = "auto"

    @staticmethod
    def of(target: str) -> ScriptCommand:
        """The script that a target is: "train.py --flag", or "run:--ranks 8 train.py".

        Raises RequestError for options of ours that are not there.
        """
        words = _words(target)
        asked: dict[str, Any] = {}
        while target.startswith(RUN) and words and words[0].startswith("--"):
            option, *words = words
            if option == "--":
                break
            name, equals, value = option[2:].partition("=")
            if not equals and words:
                value, *words = words
            asked[name] = _value(target, name, value)
        if not words:
            raise RequestError(f"target {target!r}: expected a script, as in run:train.py")
        return ScriptCommand(words=tuple(words), **asked)

    @staticmethod
    def parted(target: str) -> tuple[str, list[str]]:
        """A target's "run:" where it has one, and its words, options of ours among them."""
        return RUN if target.startswith(RUN) else "", _words(target)

    @property
    def where(self) -> str:
        """The file of the script, or the dotted name of its module."""
        after = dict(zip(self.words, self.words[1:], strict=False)).get("-m", "")
        return next((word for word in self.words if word.endswith(_SCRIPTS)), after)


def is_script(target: str) -> bool:
    """Whether a target is a script: run:COMMAND, or one that begins with a Python file or a
    notebook."""
    if target.startswith(RUN):
        return True
    if not any(end in target for end in _SCRIPTS) or target.startswith("hf:"):
        return False
    words = _words(target)
    return bool(words) and words[0].endswith(_SCRIPTS)


def _words(target: str) -> list[str]:
    """The words of a command.  Raises RequestError for a quotation that does not end."""
    text = target.removeprefix(RUN)
    if os.path.isfile(text):  # a path with spaces
        return [text]
    try:
        return shlex.split(text)
    except ValueError as error:
        if target.startswith(RUN):
            raise RequestError(f"target {target!r}: {error}") from None
        return []


def _value(target: str, name: str, value: str) -> Any:
    if name not in _OPTIONS:
        raise RequestError(
            f"target {target!r}: --{name} stands before the script, and is none of "
            f"{', '.join(f'--{option}' for option in _OPTIONS)}{hint(name, _OPTIONS)}"
        )
    least = 0 if name == "rank" else 1
    if name in _NUMBERS:
        if not (value.isascii() and value.isdigit() and len(value) < 10 and int(value) >= least):
            raise RequestError(
                f"target {target!r}: --{name} {value}: expected a whole number of at least {least}"
            )
        return int(value)
    if not value:
        raise RequestError(f"target {target!r}: --{name}: expected a name or a TOML path")
    return value


# -- checkpoints, by their names alone; no file is opened ------------------------------------------

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
