"""State of torch and of other libraries that a program may change, and that is as before after it.

A library that was not imported before a program has no state to keep.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from rooftrace.tracer.launching.kept import PROCESS, KeptState, attribute


def _of(
    module: str, read: Callable[[Any], Any], restore: Callable[[Any, Any], object]
) -> KeptState:
    """A state of a library that may not be imported."""

    def now() -> Any:
        home = sys.modules.get(module)
        return None if home is None else (home, read(home))

    def put_back(before: Any) -> None:
        if before is not None:
            restore(*before)

    return KeptState(module, now, put_back)


def _changed(read: Callable[[], Any], write: Callable[[Any], object], name: str) -> KeptState:
    """A state that is written only where it has changed."""

    def restore(before: Any) -> None:
        if read() != before:
            write(before)

    return KeptState(name, read, restore)


_loose: Any = torch


def _default_device() -> torch.device | None:
    context = getattr(_loose._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


def _deterministic() -> tuple[bool, bool]:
    enabled = torch.are_deterministic_algorithms_enabled()
    return enabled, torch.is_deterministic_algorithms_warn_only_enabled()


_FLAGS = (
    ("cuda.matmul", "allow_tf32"),
    ("cuda.matmul", "fp32_precision"),
    ("cuda.matmul", "allow_fp16_reduced_precision_reduction"),
    ("cuda.matmul", "allow_bf16_reduced_precision_reduction"),
    ("cuda.matmul", "allow_fp16_accumulation"),
    ("cudnn", "enabled"),
    ("cudnn", "benchmark"),
    ("cudnn", "benchmark_limit"),
    ("cudnn", "deterministic"),
    ("cudnn", "allow_tf32"),
    ("cudnn", "fp32_precision"),
    ("mkldnn", "enabled"),
    ("opt_einsum", "enabled"),
    ("opt_einsum", "strategy"),
)


def _flags() -> dict[tuple[str, str], Any]:
    """(home, value) of the flags of torch.backends that can be read here."""
    flags = {}
    for path, name in _FLAGS:
        home: Any = torch.backends
        for part in path.split("."):
            home = getattr(home, part, None)
        with contextlib.suppress(RuntimeError, AttributeError, AssertionError):
            flags[path, name] = home, getattr(home, name)
    return flags


def _restore_flags(before: dict[tuple[str, str], Any]) -> None:
    now = _flags()
    for key, (home, value) in before.items():
        if key in now and now[key][1] != value:
            with contextlib.suppress(RuntimeError, AttributeError):
                setattr(home, key[1], value)


_backends: Any = torch.backends
_ALLOWED = "__allow_nonbracketed_mutation_flag"


def _unfrozen() -> bool:
    """Let the program set flags of torch.backends, also where torch's test helpers froze them."""
    allowed = not _backends.flags_frozen()
    _freeze(allowed=True)
    return allowed


def _freeze(allowed: bool) -> None:
    _backends.flags_frozen.__globals__[_ALLOWED] = allowed


def _attention() -> tuple[bool, ...]:
    cuda: Any = torch.backends.cuda
    return (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    )


def _restore_attention(before: tuple[bool, ...]) -> None:
    cuda: Any = torch.backends.cuda
    for write, value in zip(
        (
            cuda.enable_flash_sdp,
            cuda.enable_mem_efficient_sdp,
            cuda.enable_math_sdp,
            cuda.enable_cudnn_sdp,
        ),
        before,
        strict=True,
    ):
        write(value)


_AUTOCAST = ("cpu", "cuda")


def _autocast() -> dict[str, tuple[bool, torch.dtype]]:
    return {
        kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in _AUTOCAST
    }


def _restore_autocast(before: dict[str, tuple[bool, torch.dtype]]) -> None:
    for kind, (enabled, dtype) in before.items():
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)


_hooks: Any = torch.nn.modules.module
_HOOKS = tuple(
    name
    for name, value in vars(_hooks).items()
    if name.startswith("_global_") and name.endswith("hooks") and hasattr(value, "items")
)


def _global_hooks() -> dict[str, dict[Any, Any]]:
    return {name: dict(vars(_hooks)[name]) for name in _HOOKS}


def _restore_global_hooks(before: dict[str, dict[Any, Any]]) -> None:
    for name, hooks in before.items():
        now = vars(_hooks)[name]
        for key in [key for key in now if key not in hooks]:
            del now[key]


def _no_group() -> bool:
    return not (torch.distributed.is_available() and torch.distributed.is_initialized())


def _end_group(was_none: bool) -> None:
    if was_none and not _no_group():
        torch.distributed.destroy_process_group()


def _config(module: str) -> KeptState:
    """The settings of a part of the compiler."""

    def read(home: Any) -> Any:
        return getattr(home, "get_config_copy", home.shallow_copy_dict)()

    def restore(home: Any, before: Any) -> None:
        now = read(home)
        for name, value in before.items():
            if name in now and now[name] != value:
                setattr(home, name, value)

    return _of(module, read, restore)


def _numpy(home: Any) -> Any:
    return home.random.get_state(), home.geterr(), home.get_printoptions()


def _restore_numpy(home: Any, before: Any) -> None:
    home.random.set_state(before[0])
    home.seterr(**before[1])
    home.set_printoptions(**before[2])


_STATES = ("AcceleratorState", "PartialState", "GradientState")
"""Classes of accelerate whose objects all share one state: the device, the processes, the type."""


def _shared_states() -> list[dict[str, Any]]:
    home = sys.modules.get("accelerate.state")
    return [] if home is None else [getattr(home, name)._shared_state for name in _STATES]


def _set_aside() -> list[dict[str, Any]]:
    """What accelerate knows of this process; the program finds it as in a process of its own."""
    states = [dict(state) for state in _shared_states()]
    _restore_shared([])
    return states


def _restore_shared(before: list[dict[str, Any]]) -> None:
    for place, state in enumerate(_shared_states()):
        state.clear()
        state.update(before[place] if before else {})


def _restore_backend(home: Any, before: Any) -> None:
    if dict.get(home.rcParams, "backend") != before:
        dict.__setitem__(home.rcParams, "backend", before)


_printed: Any = torch._tensor_str.PRINT_OPTS

LIBRARIES = (
    KeptState("default process group", _no_group, _end_group),
    _changed(torch.get_default_dtype, torch.set_default_dtype, "default dtype"),
    _changed(_default_device, torch.set_default_device, "default device"),
    KeptState("random numbers of torch", torch.get_rng_state, torch.set_rng_state),
    _changed(torch.is_grad_enabled, torch.set_grad_enabled, "gradients"),
    _changed(
        _deterministic,
        lambda was: torch.use_deterministic_algorithms(was[0], warn_only=was[1]),
        "deterministic algorithms",
    ),
    KeptState(
        "precision of products",
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    KeptState("whether flags of torch.backends can be set", _unfrozen, _freeze),
    KeptState("flags of torch.backends", _flags, _restore_flags),
    _changed(_attention, _restore_attention, "kernels of attention"),
    _changed(_autocast, _restore_autocast, "autocast"),
    _changed(torch.get_num_threads, torch.set_num_threads, "threads of torch"),
    _changed(torch.is_anomaly_enabled, torch.set_anomaly_enabled, "anomaly detection"),
    _changed(torch.is_warn_always_enabled, torch.set_warn_always, "warnings of torch"),
    attribute(_printed, "precision", "threshold", "edgeitems", "linewidth", "sci_mode"),
    attribute(torch.utils.deterministic, "fill_uninitialized_memory"),
    KeptState("global hooks of modules", _global_hooks, _restore_global_hooks),
    _changed(
        torch.multiprocessing.get_sharing_strategy,
        torch.multiprocessing.set_sharing_strategy,
        "sharing of tensors",
    ),
    _config("torch._dynamo.config"),
    _config("torch._inductor.config"),
    _config("torch._functorch.config"),
    KeptState("state of accelerate", _set_aside, _restore_shared),
    _of("numpy", _numpy, _restore_numpy),
    _of(
        "matplotlib",
        lambda home: dict.get(home.rcParams, "backend"),
        _restore_backend,
    ),
)
"""States of torch, numpy, accelerate and matplotlib."""


@contextlib.contextmanager
def all_kept() -> Iterator[None]:
    """After the block every state of `PROCESS` and `LIBRARIES` is as before it."""
    with contextlib.ExitStack() as undo:
        for kept in (*PROCESS, *LIBRARIES):
            undo.callback(_put_back, kept, kept.read())
        yield


def _put_back(kept: KeptState, before: Any) -> None:
    """Restore a state; one that the operating system no longer allows stays."""
    with contextlib.suppress(OSError):
        kept.restore(before)
