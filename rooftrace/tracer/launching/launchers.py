"""Launchers of many processes: what each makes of its words.

Each takes the words after its name and gives a CommandLine whose program is as it was written.  The
launcher's own parser is asked where it is installed.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from typing import Any

from rooftrace.errors import RequestError
from rooftrace.tracer.launching.records import CommandLine

_PORT = "29500"


def parsed(launcher: str, parser: argparse.ArgumentParser, words: Sequence[str]) -> Any:
    """What a launcher's parser makes of words.  Raises RequestError with what it says."""

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
    told = "" if args.use_env else "--local-rank"
    return of_torchrun("torch.distributed.launch", args, words, told)


def of_torchrun(launcher: str, args: Any, words: Sequence[str], told: str = "") -> CommandLine:
    """The launch of arguments that torchrun's parser has read."""
    if args.no_python:
        raise RequestError(f"{launcher} --no-python: only programs of Python can be run here")
    asked = _written(words, "nproc-per-node", "nproc_per_node")
    processes = count(launcher, "--nproc-per-node", args.nproc_per_node) if asked else None
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
        master=(address or "127.0.0.1", str(args.master_port or _PORT)),
        rank_argument=told,
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
    asked: tuple[tuple[str, Callable[[str], Any], Any], ...] = (
        ("accelerator", str, None),
        ("strategy", str, None),
        ("devices", str, "1"),
        ("num-nodes", int, 1),
        ("node-rank", int, 0),
        ("main-address", str, "127.0.0.1"),
        ("main-port", int, 29400),
        ("precision", str, None),
    )
    for name, kind, default in asked:
        parser.add_argument(f"--{name}", f"--{name.replace('-', '_')}", type=kind, default=default)
    parser.add_argument("script")
    parser.add_argument("script_args", nargs=argparse.REMAINDER)
    args = parsed("fabric run", parser, words)
    listed = [part for part in args.devices.split(",") if part]
    several = len(listed) > 1 or args.devices.endswith(",")
    processes = len(listed) if several else count("fabric run", "--devices", args.devices)
    told = {
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
        environment={name: told[name] for name in told if told[name]},
        master=(args.main_address, str(args.main_port)),
    )
