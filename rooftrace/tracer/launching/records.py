"""The records of a launch: what is run, as which rank, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rooftrace.errors import RequestError


class Stopped(BaseException):
    """The program is ended from outside, because enough of it has run.

    It is no `Exception` and no `SystemExit`: `except Exception` does not catch it, torch's
    `@record` does not write it into an error file, and blocks of `finally` and `with` run.
    """


class HardExit(BaseException):
    """The program called `os._exit`.  `code`: what it passed."""

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
        """The ranks of a launch, where the user asked for `world` processes, and to run `rank`.

        per_node: how many devices a node of the system has, where a system is known; a launcher
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
        known = world is not None or said is not None
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
        return cls(rank, world, rank % local, local, known)

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
    assumed: what was assumed of what is not there, as pairs of a kind and a text.
    """

    reason: Literal["end", "exit", "stopped", "error"]
    code: int = 0
    exception: BaseException | None = None
    thread: str = ""
    ranks: Ranks = field(default_factory=Ranks)
    assumed: tuple[tuple[str, str], ...] = ()
