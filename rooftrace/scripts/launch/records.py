"""Records of a launch, variables of its environment, and notebooks read as programs."""

from __future__ import annotations

import json
import linecache
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Literal

from rooftrace.errors import RequestError

# -- environment -----------------------------------------------------------------------------------
# Variables of the environment that a program sees: those of its launcher, and no network.

OFFLINE: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "SWANLAB_MODE": "disabled",
    "MPLBACKEND": "Agg",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Variables of a program, unless the user sets them: it downloads and sends nothing, and opens no
window."""
OFFLINE_TEXT = (
    "nothing is downloaded or logged to a service: the program runs with "
    + ", ".join(f"{name}={value}" for name, value in OFFLINE.items())
    + ", but for those that were set before"
)


def of_ranks(launch: CommandLine, ranks: Ranks) -> dict[str, str]:
    """The variables by which a launcher tells a process its rank; {} where nobody says one.

    A program without a launcher gets those of torchrun where the user says how many ranks it has.
    """
    if not ranks.said and not launch.launcher:
        return {}
    if ranks.world == 1 and launch.launcher == "accelerate":
        return {}
    address, port = launch.master
    variables = {
        "RANK": ranks.rank,
        "WORLD_SIZE": ranks.world,
        "LOCAL_RANK": ranks.local_rank,
        "LOCAL_WORLD_SIZE": ranks.local_world,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    if launch.launcher == "deepspeed":
        variables |= {"CROSS_RANK": ranks.node, "CROSS_SIZE": ranks.nodes}
        variables |= {"LOCAL_SIZE": ranks.local_world}
    else:
        variables |= {
            "GROUP_RANK": ranks.node,
            "GROUP_WORLD_SIZE": ranks.nodes,
            "ROLE_NAME": "default",
            "ROLE_RANK": ranks.rank,
            "ROLE_WORLD_SIZE": ranks.world,
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 0,
            "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": 1,
        }
    return {name: str(value) for name, value in variables.items()} | dict(launch.environment)


# -- records ---------------------------------------------------------------------------------------


class Stopped(BaseException):
    """The program is ended from outside, because enough of it has run.

    It is no `Exception` and no `SystemExit`: `except Exception` does not catch it, torch's
    `@record` does not write it into an error file, and blocks of `finally` and `with` run.
    """


class HardExit(BaseException):
    """The program called `os._exit`.  `code`: its argument."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """A command line, understood.

    program: a script's path, or the dotted name of a module.  written: as the user wrote it.
    module: whether it is a module.  arguments: those of the program.  launcher: "torchrun",
    "accelerate", ...; "" for none.
    processes: how many the launcher starts on each node, and nodes: on how many; None where it does
    not say.  environment: variables that the launcher sets for every process.  ports: address and
    port of the first process, as the launcher says them.
    rank_argument: the option by which the launcher tells the program its local rank, or "".
    folder: the working directory.
    """

    program: str
    written: str = ""
    module: bool = False
    arguments: tuple[str, ...] = ()
    launcher: str = ""
    processes: int | None = None
    nodes: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    master: tuple[str, str] = ("127.0.0.1", "29500")
    rank_argument: str = ""
    folder: str = ""

    @property
    def world(self) -> int | None:
        """How many processes the launcher starts on all nodes; None where it does not say."""
        return None if self.processes is None else self.processes * (self.nodes or 1)


@dataclass(frozen=True, slots=True)
class Ranks:
    """Which process of how many runs here.

    rank: of all `world` processes.  local_rank: of the `local_world` processes of its node.  said:
    whether the user or a launcher says how many there are.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    said: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        for name, value, limit in (
            ("rank", self.rank, self.world),
            ("local rank", self.local_rank, self.local_world),
        ):
            if limit < 1 or not 0 <= value < limit:
                raise RequestError(
                    f"{name} {value} of {limit}: expected a rank from 0 to {max(limit, 1) - 1}"
                )

    @classmethod
    def of(
        cls,
        launch: CommandLine,
        world: int | None = None,
        rank: int = 0,
        per_node: int | None = None,
    ) -> Ranks:
        """The ranks of a launch, where the user sets `world` processes, and to run `rank`.

        per_node: how many devices a node of the system has, where there is one; a launcher
        that says how many processes it starts on a node overrules it.  Raises RequestError where
        the launcher and the user say different things.
        """
        said = launch.world
        if world is not None and said is not None and world != said:
            where = f" on {launch.nodes} nodes" if (launch.nodes or 1) > 1 else ""
            raise RequestError(
                f"--ranks {world}: {launch.launcher} starts {launch.processes} processes{where}, "
                f"which are {said}; leave one of the two out, or make them agree"
            )
        stated = world is not None or said is not None
        world = world or said or 1
        nodes = launch.nodes or 1
        local = launch.processes or (world // nodes if launch.nodes else per_node or world)
        local = max(min(local, world), 1)
        if world % local:
            raise RequestError(
                f"{world} ranks on nodes of {local}: expected a multiple of {local}, so that each "
                "node has as many"
            )
        if not 0 <= rank < world:
            raise RequestError(f"rank {rank} of {world}: expected a rank from 0 to {world - 1}")
        return cls(rank, world, rank % local, local, stated)

    @property
    def node(self) -> int:
        """The number of the node on which it runs."""
        return self.rank // self.local_world

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return -(-self.world // self.local_world)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a program ended.

    reason: "end": it ran to its end; "exit": it exited with `code`; "stopped": it was stopped from
    outside; "error": it raised `exception`; thread: in the thread of this name, "" for the main
    one.  ranks: as which it ran: a program that starts its processes itself says how many.
    assumed: assumptions on absent hardware, as pairs of a kind and a text.
    """

    reason: Literal["end", "exit", "stopped", "error"]
    code: int = 0
    exception: BaseException | None = None
    thread: str = ""
    ranks: Ranks = field(default_factory=Ranks)
    assumed: tuple[tuple[str, str], ...] = ()


# -- notebooks -------------------------------------------------------------------------------------
# A notebook as a program: its cells of code in order, in one namespace, without its kernel.

SUFFIX = ".ipynb"
_KERNELS = frozenset({"jupyter", "jupyter-nbconvert", "jupyter-execute", "nbconvert", "papermill"})
"""Programs and modules that run a notebook."""
_AROUND = ("time", "timeit", "capture", "prun", "memit", "mprun", "scalene")
"""Magics that run the code behind them."""
_MAGIC = re.compile(r"(?P<indent>\s*)(?P<name>[\w ,.]+=)?\s*(?P<magic>%%?\w+|!!?)(?P<rest>.*)")
_HELP = re.compile(r"(?P<indent>\s*)\??[\w.]+\?{1,2}\s*")


def check_runner(program: str, words: list[str]) -> None:
    """Raises RequestError for a program that has a kernel run a notebook, in another process."""
    if program in _KERNELS:
        notebook = next((word for word in words if word.endswith(SUFFIX)), f"notebook{SUFFIX}")
        raise RequestError(
            f"{program}: runs a notebook in a process of its own, which sees no device; name the "
            f"notebook itself, as in rooftrace run {notebook}"
        )


class NotebookCells:
    """The cells of a notebook, compiled, in their order.

    left_out: its magics and shell lines, which do not run.

    Raises RequestError for a file that is no notebook, and for a cell that is no Python.
    """

    def __init__(self, path: str) -> None:
        self.left_out: list[str] = []
        self.cells = [self._compiled(path, number, text) for number, text in _code(path)]

    def _compiled(self, path: str, number: int, text: str) -> CodeType:
        where = f"{path}[cell {number}]"
        try:
            code = compile(text, where, "exec", dont_inherit=True)
        except SyntaxError:
            text = "\n".join(self._plain(text.splitlines()))
            try:
                code = compile(text, where, "exec", dont_inherit=True)
            except (SyntaxError, ValueError) as error:
                line = getattr(error, "lineno", None)
                raise RequestError(
                    f"{path}: cell {number}, line {line}: no Python: {getattr(error, 'msg', error)}"
                ) from error
        lines = [f"{line}\n" for line in text.splitlines()]
        linecache.cache[where] = (len(text), None, lines, where)
        return code

    def _plain(self, lines: list[str]) -> Iterator[str]:
        """The lines of a cell, with `pass` or None where a magic or a line for the shell stood."""
        for number, line in enumerate(lines):
            matched = _MAGIC.fullmatch(line)
            if matched is None:
                help_ = _HELP.fullmatch(line)
                yield line if help_ is None else f"{help_['indent']}pass"
                continue
            magic, rest = matched["magic"], matched["rest"].strip()
            runs = magic.lstrip("%") in _AROUND
            if runs and not magic.startswith("%%") and not rest.startswith("-"):
                yield f"{matched['indent']}{matched['name'] or ''}{rest or 'pass'}"
                continue
            if not runs:
                self.left_out.append(f"{magic}{'' if magic[0] == '%' else rest.partition(' ')[0]}")
            yield f"{matched['indent']}{matched['name'] + ' None' if matched['name'] else 'pass'}"
            if magic.startswith("%%") and not runs:  # the cell is in another language
                yield from [""] * (len(lines) - number - 1)
                return


def _code(path: str) -> Iterator[tuple[int, str]]:
    """The cells of code of a notebook: the number of each among all cells, from 1, and its text."""
    try:
        cells = json.loads(Path(path).read_text(encoding="utf-8"))["cells"]
        for number, cell in enumerate(cells, 1):
            if cell["cell_type"] == "code":
                source = cell["source"]
                yield number, source if isinstance(source, str) else "".join(source)
    except OSError as error:
        raise RequestError(f"{path}: it cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise RequestError(f"{path}: no notebook of Jupyter (version 4): {error!r:.80}") from error
