"""`accelerate launch`: what accelerate's own functions make of its words and its configuration."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from rooftrace.errors import RequestError
from rooftrace.tracer.launching.launchers import parsed
from rooftrace.tracer.launching.records import CommandLine

_PORT = 29500
_COMMAND = "accelerate.commands.launch"
"""A module of the user's environment, which is asked where it is there."""


def accelerate(words: Sequence[str]) -> CommandLine:
    """`accelerate launch`: the variables are those that accelerate itself would set."""
    if importlib.util.find_spec("accelerate") is None:
        raise RequestError(
            f"accelerate launch {' '.join(words)}: accelerate is not installed; "
            "install it, or name the script and --ranks"
        )
    launch: Any = importlib.import_module(_COMMAND)
    args = parsed("accelerate launch", launch.launch_command_parser(), words)
    asked = args.num_processes
    try:
        with _quiet():
            environment = _environment(launch, args, words)
    except (ValueError, OSError, RuntimeError, AssertionError, KeyError, TypeError) as error:
        raise RequestError(f"accelerate launch {' '.join(words)}: {error}") from error
    if args.no_python:
        raise RequestError("accelerate launch --no_python: only programs of Python can be run here")
    machines = int(args.num_machines or 1)
    many = args.multi_gpu or args.use_fsdp or args.use_deepspeed or args.use_megatron_lm
    total = args.num_processes if asked or args.config_file or args.num_processes else None
    total = total if many or total != 0 else None
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
    """The variables that accelerate sets for every process, beside those of torchrun."""
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
    port, args.main_process_port = args.main_process_port, 0  # no port is opened, none is asked
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
