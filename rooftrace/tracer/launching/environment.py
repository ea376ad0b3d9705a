"""Variables of the environment that a program sees: those of its launcher, and no network."""

from __future__ import annotations

from collections.abc import Mapping

from rooftrace.tracer.launching.records import CommandLine, Ranks

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
"""What a program is told unless the user has said otherwise: it downloads and sends nothing, and
opens no window."""
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
    told = {
        "RANK": ranks.rank,
        "WORLD_SIZE": ranks.world,
        "LOCAL_RANK": ranks.local_rank,
        "LOCAL_WORLD_SIZE": ranks.local_world,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    if launch.launcher == "deepspeed":
        told |= {"CROSS_RANK": ranks.node, "CROSS_SIZE": ranks.nodes}
        told |= {"LOCAL_SIZE": ranks.local_world}
    else:
        told |= {
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
    return {name: str(value) for name, value in told.items()} | dict(launch.environment)
