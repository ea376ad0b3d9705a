"""Command lines of launchers (torchrun, accelerate, deepspeed ...) read as programs to run."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import io
import logging
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rooftrace.errors import RequestError, hint
from rooftrace.scripts.launch.records import CommandLine, check_runner

# -- accelerate ------------------------------------------------------------------------------------
# `accelerate launch`: its arguments and configuration, parsed by accelerate itself.

_PORT = 29500
_COMMAND = "accelerate.commands.launch"
"""A module of the user's environment, used where it is installed."""


def accelerate(words: Sequence[str]) -> CommandLine:
    """`accelerate launch`: the variables are those that accelerate itself would set."""
    if importlib.util.find_spec("accelerate") is None:
        raise RequestError(
            f"accelerate launch {' '.join(words)}: accelerate is not installed; "
            "install it, or name the script and --ranks"
        )
    launch: Any = importlib.import_module(_COMMAND)
    args = parsed("accelerate launch", launch.launch_command_parser(), words)
    requested = args.num_processes
    try:
        with _quiet():
            environment = _environment(launch, args, words)
    except (ValueError, OSError, RuntimeError, AssertionError, KeyError, TypeError) as error:
        raise RequestError(f"accelerate launch {' '.join(words)}: {error}") from error
    if args.no_python:
        raise RequestError("accelerate launch --no_python: only programs of Python can be run here")
    machines = int(args.num_machines or 1)
    parallel = args.multi_gpu or args.use_fsdp or args.use_deepspeed or args.use_megatron_lm
    total = args.num_processes if requested or args.config_file or args.num_processes else None
    total = total if parallel or total != 0 else None
    return CommandLine(
        program=args.training_script,
        module=bool(args.module),
        arguments=tuple(args.training_script_args),
        launcher="accelerate",
        processes=None if total in (None, 0) else max(int(total or 1) // machines, 1),
        nodes=machines,
        environment=environment,
        master=(args.main_process_ip or "127.0.0.1", str(args.main_process_port or _PORT)),
    )


def _environment(launch: Any, args: Any, words: Sequence[str]) -> dict[str, str]:
    """The variables that accelerate sets for every process, on top of torchrun's."""
    several = (args.num_processes or 0) > 1
    args, defaults, from_config = launch._validate_launch_command(args)
    explicit = args.cpu or args.tpu or args.use_deepspeed or args.use_fsdp or args.use_megatron_lm
    if several and not explicit:
        args.multi_gpu = True  # as accelerate does where it sees more than one GPU
    if args.tpu or (defaults is not None and "SAGEMAKER" in str(defaults.compute_environment)):
        raise RequestError(
            f"accelerate launch {' '.join(words)}: launches on TPUs and on SageMaker are not "
            "understood; name the script and --ranks"
        )
    port, args.main_process_port = args.main_process_port, 0  # no port is opened
    if args.use_deepspeed and not args.cpu:
        fields = [*(defaults.deepspeed_config if defaults else ())]
        fields += ["mixed_precision"] if from_config else []
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        made = launch.prepare_deepspeed_cmd_env(args)[1]
    elif (args.use_fsdp or args.use_megatron_lm or args.multi_gpu) and not args.cpu:
        made = launch.prepare_multi_gpu_env(args)
    else:
        made = launch.prepare_simple_launcher_cmd_env(args)[1]
    args.main_process_port = port
    leave = {"MASTER_ADDR", "MASTER_PORT"}
    changed = {name: str(value) for name, value in made.items() if os.environ.get(name) != value}
    return {name: value for name, value in changed.items() if name not in leave}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Inside, accelerate says nothing of defaults, and the environment stays as it is."""
    before, level = dict(os.environ), logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        os.environ.clear()
        os.environ.update(before)


# -- launchers -------------------------------------------------------------------------------------
# Each takes the words after its name and gives a CommandLine whose program is as it was written.
# The launcher's parser reads them where it is installed.

_DEFAULT_PORT = "29500"


def parsed(launcher: str, parser: argparse.ArgumentParser, words: Sequence[str]) -> Any:
    """Words parsed by a launcher's parser.  Raises RequestError with the parser's message."""

    def error(message: str) -> Any:
        raise RequestError(f"{launcher} {' '.join(words)}: {message}")

    def leave(status: int = 0, message: str | None = None) -> Any:
        raise RequestError(f"{launcher} {' '.join(words)}: {message or 'it runs no program'}")

    vars(parser).update(error=error, exit=leave)
    return parser.parse_args(list(words))


def count(launcher: str, option: str, value: Any) -> int | None:
    """A number of processes or nodes; None for "as many as there are"."""
    text = str(value)
    if text in ("gpu", "cpu", "auto", "xpu", "-1", "None"):
        return None
    text = text.rpartition(":")[2]  # of an elastic range the largest
    if not re.fullmatch(r"[1-9]\d*", text):
        raise RequestError(
            f"{launcher} {option}={value}: expected a whole number of at least 1, or 'gpu' for as "
            "many as the node has"
        )
    return int(text)


def torchrun(words: Sequence[str]) -> CommandLine:
    """`torchrun`, and `python -m torch.distributed.run`."""
    from torch.distributed.run import get_args_parser

    return of_torchrun("torchrun", parsed("torchrun", get_args_parser(), words), words)


def torch_launch(words: Sequence[str]) -> CommandLine:
    """`python -m torch.distributed.launch`, which tells each program its rank by an option."""
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.add_argument("--use-env", "--use_env", default=False, action="store_true")
    args = parsed("torch.distributed.launch", parser, words)
    rank_argument = "" if args.use_env else "--local-rank"
    return of_torchrun("torch.distributed.launch", args, words, rank_argument)


def of_torchrun(
    launcher: str, args: Any, words: Sequence[str], rank_argument: str = ""
) -> CommandLine:
    """The launch of arguments that torchrun's parser has read."""
    if args.no_python:
        raise RequestError(f"{launcher} --no-python: only programs of Python can be run here")
    stated = _written(words, "nproc-per-node", "nproc_per_node")
    processes = count(launcher, "--nproc-per-node", args.nproc_per_node) if stated else None
    nodes = count(launcher, "--nnodes", args.nnodes) if _written(words, "nnodes") else None
    address = args.master_addr or args.rdzv_endpoint.partition(":")[0]
    run = args.rdzv_id if args.rdzv_id and args.rdzv_id != "none" else "none"
    return CommandLine(
        program=args.training_script,
        module=bool(args.module),
        arguments=tuple(args.training_script_args),
        launcher=launcher,
        processes=processes,
        nodes=nodes,
        environment={
            "ROLE_NAME": str(args.role),
            "TORCHELASTIC_MAX_RESTARTS": str(args.max_restarts),
            "TORCHELASTIC_RUN_ID": str(run),
        },
        master=(address or "127.0.0.1", str(args.master_port or _DEFAULT_PORT)),
        rank_argument=rank_argument,
    )


def _written(words: Sequence[str], *names: str) -> bool:
    """Whether an option is among the words before the program."""
    starts = tuple(f"{dashes}{name}" for name in names for dashes in ("--", "-"))
    return any(word.partition("=")[0] in starts for word in words)


def deepspeed(words: Sequence[str]) -> CommandLine:
    """`deepspeed`, which tells each program its rank by `--local_rank` too."""
    args = _deepspeed_arguments(words)
    if getattr(args, "no_python", False):
        raise RequestError("deepspeed --no_python: only programs of Python can be run here")
    if args.include and args.num_gpus in (-1, 0):
        processes, hosts = _included(args.include)
        nodes: int | None = hosts
    else:
        processes = None if args.num_gpus in (-1, 0) else args.num_gpus
        nodes = None if args.num_nodes in (-1, 0) else args.num_nodes
    return CommandLine(
        program=args.user_script,
        module=bool(args.module),
        arguments=tuple(args.user_args),
        launcher="deepspeed",
        processes=processes,
        nodes=nodes,
        master=(args.master_addr or "127.0.0.1", str(args.master_port)),
        rank_argument="" if getattr(args, "no_local_rank", False) else "--local_rank",
    )


def _included(text: str) -> tuple[int | None, int]:
    """Processes on each node and nodes of `localhost:0,1@worker-2:0,1`."""
    parts = [part.partition(":")[2] for part in text.split("@")]
    sizes = {len(part.split(",")) if part else None for part in parts}
    if len(sizes) > 1:
        raise RequestError(
            f"deepspeed --include {text}: nodes with different numbers of processes; "
            "say how many there are as --ranks"
        )
    return sizes.pop(), len(parts)


def _deepspeed_arguments(words: Sequence[str]) -> Any:
    parser = argparse.ArgumentParser(prog="deepspeed", add_help=False, allow_abbrev=False)
    for names, default in (
        (("-H", "--hostfile"), ""),
        (("-i", "--include"), ""),
        (("-e", "--exclude"), ""),
        (("--master_addr",), ""),
        (("--launcher",), "pdsh"),
        (("--launcher_args",), ""),
        (("--save_pid_path",), ""),
        (("--venv_script",), ""),
        (("--autotuning",), ""),
        (("--bind_core_list",), ""),
        (("--log_level",), ""),
        (("--elastic_training_config",), ""),
        (("--node_rank",), ""),
    ):
        parser.add_argument(*names, default=default)
    for names, number in (
        (("--num_nodes",), -1),
        (("--num_gpus", "--num_accelerators"), -1),
        (("--min_elastic_nodes",), -1),
        (("--max_elastic_nodes",), -1),
        (("--master_port",), 29500),
        (("--ssh_port",), 22),
    ):
        parser.add_argument(*names, type=int, default=number)
    for name in (
        "--no_ssh",
        "--no_ssh_check",
        "--force_multi",
        "--module",
        "--no_python",
        "--no_local_rank",
        "--save_pid",
        "--enable_each_rank_log",
        "--elastic_training",
        "--bind_cores_to_rank",
    ):
        parser.add_argument(name, action="store_true")
    parser.add_argument("user_script")
    parser.add_argument("user_args", nargs=argparse.REMAINDER)
    return parsed("deepspeed", parser, words)


def lightning(words: Sequence[str]) -> CommandLine:
    """`fabric run`, `lightning run model`: torchrun, with variables for Fabric."""
    words = list(words[1:] if words[:1] == ["model"] else words)
    parser = argparse.ArgumentParser(prog="fabric run", add_help=False, allow_abbrev=False)
    options: tuple[tuple[str, Callable[[str], Any], Any], ...] = (
        ("accelerator", str, None),
        ("strategy", str, None),
        ("devices", str, "1"),
        ("num-nodes", int, 1),
        ("node-rank", int, 0),
        ("main-address", str, "127.0.0.1"),
        ("main-port", int, 29400),
        ("precision", str, None),
    )
    for name, kind, default in options:
        parser.add_argument(f"--{name}", f"--{name.replace('-', '_')}", type=kind, default=default)
    parser.add_argument("script")
    parser.add_argument("script_args", nargs=argparse.REMAINDER)
    args = parsed("fabric run", parser, words)
    listed = [part for part in args.devices.split(",") if part]
    several = len(listed) > 1 or args.devices.endswith(",")
    processes = len(listed) if several else count("fabric run", "--devices", args.devices)
    variables = {
        "LT_CLI_USED": "1",
        "LT_ACCELERATOR": args.accelerator,
        "LT_STRATEGY": args.strategy,
        "LT_DEVICES": args.devices,
        "LT_NUM_NODES": str(args.num_nodes),
        "LT_PRECISION": args.precision,
    }
    return CommandLine(
        program=args.script,
        arguments=tuple(args.script_args),
        launcher="fabric run",
        processes=processes,
        nodes=args.num_nodes,
        environment={name: variables[name] for name in variables if variables[name]},
        master=(args.main_address, str(args.main_port)),
    )


# -- words -----------------------------------------------------------------------------------------
# From a command line to the program that runs and the settings of its launcher.

_PYTHON = re.compile(r"(python|pypy)[\d.]*(\.exe)?")
_FLAGS = frozenset("bBdEiIOPqsSuvx")
"""Options of Python without a value, which change nothing here."""
_RUNNERS = frozenset({"uv", "poetry", "pipenv", "pdm", "hatch", "rye"})
"""Programs whose `run` starts the words after it in an environment."""
_SCHEDULERS = frozenset({"srun", "mpirun", "mpiexec", "jsrun", "horovodrun", "torchx", "ray"})
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")

_BY_NAME: dict[str, Callable[[Sequence[str]], CommandLine]] = {
    "torchrun": torchrun,
    "deepspeed": deepspeed,
    "deepspeed.launcher.runner": deepspeed,
    "torch.distributed.run": torchrun,
    "torch.distributed.launch": torch_launch,
    "accelerate-launch": accelerate,
    "accelerate.commands.launch": accelerate,
}
_WITH_COMMAND = {
    ("accelerate", "launch"): accelerate,
    ("accelerate.commands.accelerate_cli", "launch"): accelerate,
    ("lightning", "run"): lightning,
    ("fabric", "run"): lightning,
}


def understood(words: Sequence[str], folder: str | os.PathLike[str] | None = None) -> CommandLine:
    """The program of a command line: `["torchrun", "--nproc_per_node=8", "train.py", "a.yaml"]`.

    folder: the working directory; None for that of this process.  Understood are a script, `python`
    with a script or `-m`, torchrun and torch.distributed.launch, accelerate launch, deepspeed,
    lightning and fabric run, programs of Python on PATH, and assignments of variables in front.
    Raises RequestError, which quotes the word, for a program that is not there and for an option
    that its launcher does not know.
    """
    words = [os.fspath(word) for word in words]
    here = os.path.abspath(folder or os.getcwd())
    environment: dict[str, str] = {}
    words = _start(words, environment)
    if not words:
        raise RequestError("a command line without a program: expected train.py and its arguments")
    launch = _understood(words)
    environment = {**environment, **launch.environment}
    program = launch.program if launch.module else _script(launch.program, here)
    if launch.module and not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", launch.program):
        raise RequestError(f"-m {launch.program}: expected the dotted name of a module, as in a.b")
    written = launch.program
    return replace(launch, program=program, written=written, environment=environment, folder=here)


def _start(words: list[str], environment: dict[str, str]) -> list[str]:
    """The words after assignments, `env`, `--` and `uv run`; assignments go to `environment`."""
    while words:
        if _ASSIGNMENT.match(words[0]):
            name, _, value = words[0].partition("=")
            environment[name] = value
            words = words[1:]
        elif words[0] in ("env", "--", "exec", "nohup", "time"):
            words = words[1:]
        elif Path(words[0]).name in _RUNNERS and words[1:2] == ["run"]:
            words = words[2:]
        else:
            break
    return words


def _understood(words: Sequence[str]) -> CommandLine:
    first, name = words[0], Path(words[0]).name
    if _PYTHON.fullmatch(name):
        return _python(words)
    if first == "-m":
        return _module(words[1:])
    check_runner(name, [*words])
    if name in _SCHEDULERS:
        raise RequestError(
            f"{first}: a launcher that is not understood; write the program after it, and how many "
            "processes it starts as --ranks"
        )
    is_command = (
        name == first or not Path(first).suffix
    )  # a script of the user may have such a name
    if is_command and (name, *words[1:2]) in _WITH_COMMAND:
        return _WITH_COMMAND[name, words[1]](words[2:])
    if is_command and name in _BY_NAME:
        return _BY_NAME[name](words[1:])
    if first.startswith("-"):
        raise RequestError(
            f"{first}: expected a program before its options, as in train.py {first}"
        )
    return CommandLine(program=first, arguments=tuple(words[1:]))


def _python(words: Sequence[str]) -> CommandLine:
    """The program of `python ...`."""
    at = 1
    while at < len(words):
        word = words[at]
        if word == "-m" or (word.startswith("-m") and not word.startswith("--")):
            return _module(words[at + 1 :] if word == "-m" else [word[2:], *words[at + 1 :]])
        if word in ("-W", "-X", "--check-hash-based-pycs"):
            at += 2
        elif word.startswith(("-W", "-X")) or (
            word[:1] == "-" and set(word[1:]) <= _FLAGS != set()
        ):
            if word == "-":
                break
            at += 1
        elif word.startswith("-"):
            raise RequestError(
                f"{words[0]} {word}: expected a script or -m with a module; write code of -c "
                "into a file"
                if word.startswith("-c")
                else f"{words[0]} {word}: not an option of Python that is understood here"
            )
        else:
            return _understood_script(words[at:])
    raise RequestError(f"{' '.join(words)}: expected a script, or -m with a module, after Python")


def _understood_script(words: Sequence[str]) -> CommandLine:
    """A script after `python`, which may be a launcher: `python /usr/bin/torchrun`."""
    if not Path(words[0]).suffix and Path(words[0]).name in (*_BY_NAME, "accelerate"):
        return _understood([Path(words[0]).name, *words[1:]])
    return CommandLine(program=words[0], arguments=tuple(words[1:]))


def _module(words: Sequence[str]) -> CommandLine:
    if not words:
        raise RequestError("-m: expected the name of a module after it")
    check_runner(words[0], [*words])
    if (words[0], *words[1:2]) in _WITH_COMMAND:
        return _WITH_COMMAND[words[0], words[1]](words[2:])
    if words[0] in _BY_NAME:
        return _BY_NAME[words[0]](words[1:])
    return CommandLine(program=words[0], module=True, arguments=tuple(words[1:]))


def _script(word: str, folder: str) -> str:
    """The path of a script, absolute; raises RequestError where there is none."""
    path = Path(folder, os.path.expanduser(word))
    if path.is_file() or (path / "__main__.py").is_file():
        return str(path)
    program = shutil.which(word) if os.sep not in word else None
    if program and _is_python(program):
        return program
    if program:
        raise RequestError(f"{word}: {program} is no program of Python, so it cannot be run here")
    if path.is_dir():
        raise RequestError(f"{word}: a folder without __main__.py; name a script in it")
    near = path.parent if path.parent.is_dir() else Path(folder)
    others = sorted(other.name for other in near.glob("*.py"))[:200]
    raise RequestError(
        f"{word}: no such script (looked in {path.parent}){hint(path.name, others)}; name a "
        "script, -m with a module, or a launcher such as torchrun and its script"
    )


def _is_python(path: str) -> bool:
    """Whether a file is text that begins by calling Python."""
    with open(path, "rb") as file:
        start = file.readline(200)
        return start.startswith(b"#!") and (
            b"python" in start or (b"/sh" in start and b"python" in file.readline(200))
        )
