"""What a test changes in the process it puts back, or it fails: a plugin that looks after each.

It looks at what another test could trip over: settings of torch, names that were replaced, the
environment, folders, threads, hooks.  What a fixture of a module changes on purpose is there until
its last test, and is looked at then.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Generator
from operator import is_
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
_TOOLS = ("hypothesis", "benchmarks", "coverage", "pytest_cache", "mypy_cache", "ruff_cache")
MADE_HERE = ("out", "build", "__pycache__", *(f".{tool}" for tool in _TOOLS))
"""What tools leave in the root of the repository, also beside the tests, and git ignores."""
KEPT_FOLDERS = ("setuptools/_vendor", "dask-scratch-space")
"""What setuptools and workers of Dask put into `sys.path`; theirs is a temporary one."""
OURS = ("rooftrace", "tests")
"""Whose finders must go; transformers and setuptools put theirs there for good."""
STAYS = "_Later"
"""A command's finder in `torch_private`, until something of Dynamo is used."""
_FOR_GOOD = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR", "_TORCHINDUCTOR", "PYTORCH_NVML")
"""Variables that pytest, torch.compile and Lightning set, for good."""
PATIENCE = 10  # s for a thread that ends, as that of a progress bar
KEPT_THREADS = ("tqdm_monitor", "ThreadPoolExecutor-", "Dask-")
"""One for the whole process, begun by whoever needs it first; a pool's go when it is collected."""


def process() -> dict[str, Any]:
    """What every Python program has, as records that compare by value."""
    return {
        "the environment": {k: v for k, v in os.environ.items() if not k.startswith(_FOR_GOOD)},
        "the working directory": os.getcwd(),
        "files in the repository's root": {
            name for name in os.listdir(ROOT) if not name.startswith(MADE_HERE)
        },
        "temporary files": {*os.listdir(tempfile.gettempdir())} - {*KEPT_FOLDERS},
        "threads": {
            t.name for t in threading.enumerate() if not any(n in t.name for n in KEPT_THREADS)
        },
        "sys.path": [entry for entry in sys.path if not any(n in entry for n in KEPT_FOLDERS)],
        "sys.meta_path": [
            id(finder)
            for finder in sys.meta_path
            if type(finder).__module__.startswith(OURS) and type(finder).__name__ != STAYS
        ],
        "sys.argv": [*sys.argv],
        "hooks": [*map(_hook, (sys.excepthook, threading.excepthook, sys.displayhook))],
        "trace and profile": (sys.gettrace() is None, sys.getprofile() is None),
        "the collector": (gc.isenabled(), gc.get_threshold()),
        "signals": [id(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM)],
        "logging": (logging.root.level, logging.root.manager.disable),
    }


def _hook(function: Any) -> int:
    """Which one it is; a group of processes of torch puts one there for good."""
    home = getattr(function, "__module__", "") or ""
    usual = function is sys.__excepthook__ or home.startswith("torch.distributed")
    return 0 if usual else id(function)


def of_torch(torch: Any) -> dict[str, Any]:
    """The settings of torch, of this thread and of the process."""
    c, backends = torch._C, torch.backends
    return {
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "modes": (c._len_torch_dispatch_stack(), c._len_torch_function_stack()),
        "the default dtype": torch.get_default_dtype(),
        "the default device": str(torch.get_default_device()),
        "threads of torch": torch.get_num_threads(),
        "autocast": [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES],
        "determinism": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "precision of products": torch.get_float32_matmul_precision(),
        "cuDNN": (
            backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic,
            backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32,
        ),
        "flags of backends that are frozen": backends.flags_frozen(),
        "kernels of attention": (
            backends.cuda.flash_sdp_enabled(), backends.cuda.math_sdp_enabled(),
            backends.cuda.mem_efficient_sdp_enabled(),
        ),
        "anomalies": torch.is_anomaly_enabled(),
        "processes": torch.distributed.is_available() and torch.distributed.is_initialized(),
    }  # fmt: skip


_DEVICES = ("cpu", "cuda")


def of_libraries() -> dict[str, Any]:
    """What libraries keep for all of a process."""
    state: dict[str, Any] = {}
    if accelerate := sys.modules.get("accelerate.state"):
        for name in ("PartialState", "AcceleratorState", "GradientState"):
            state[f"accelerate's {name}"] = {*getattr(accelerate, name)._shared_state}
    if module := sys.modules.get("torch.nn.modules.module"):
        for name, hooks in vars(module).items():
            if name.startswith("_global_") and isinstance(hooks, dict):
                state[f"hooks of all modules: {name}"] = len(hooks)
    return state


class Names:
    """What stands under the names that a recording, a patch or a stand-in may replace."""

    def __init__(self) -> None:
        self.known: dict[str, dict[str, Any]] = {}

    def replaced(self) -> list[str]:
        """The callables that are another than at the last look."""
        found = []
        for name, attribute in _PLACES:
            if (home := sys.modules.get(name)) is None:
                continue
            now = vars(getattr(home, attribute) if attribute else home)
            place = f"{name}.{attribute}".rstrip(".")
            before = self.known.get(place, {})
            if len(before) == len(now) and all(map(is_, before.values(), now.values())):
                continue  # the usual case, in a few microseconds
            for key, value in before.items():
                new = now.get(key)
                if new is not value and callable(value) and not _wrapped_for_good(new):
                    found.append(f"{place}.{key}: was {value!r}, is {new!r}")
            self.known[place] = {**now}
        return found


def _wrapped_for_good(new: Any) -> bool:
    """Whether it is what torch.compile or Lightning makes of a function of torch, once."""
    file = getattr(getattr(new, "__code__", None), "co_filename", "")
    return "_dynamo" in file or "lightning" in file or file.endswith("_compile.py")


_PLACES = (
    ("torch", ""), ("torch", "Tensor"), ("torch.cuda", ""), ("torch.nn.functional", ""),
    ("torch.nn", "Module"), ("torch.optim", "Optimizer"), ("torch.autograd", ""),
    ("torch.distributed", ""), ("threading", "Thread"), ("random", ""), ("time", ""), ("os", ""),
    ("subprocess", ""), ("builtins", ""),
)  # fmt: skip


def looked_at() -> dict[str, Any]:
    state = {**process(), **of_libraries()}
    if torch := sys.modules.get("torch"):
        state |= of_torch(torch)
    return state


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What is not as it was, each as a line.  What was not looked at before is no change."""
    return [
        f"{name}: {_difference(value, after.get(name))}"
        for name, value in before.items()
        if value != after.get(name)
    ]


def _difference(before: Any, after: Any) -> str:
    if isinstance(before, dict) and isinstance(after, dict):
        names = sorted(n for n in before.keys() | after.keys() if before.get(n) != after.get(n))
        return ", ".join(f"{n} was {before.get(n)!r}, is {after.get(n)!r}" for n in names)
    if isinstance(before, set) and isinstance(after, set):
        new, gone = sorted(map(str, after - before)), sorted(map(str, before - after))
        return "; ".join([*(f"{n} is new" for n in new), *(f"{n} is gone" for n in gone)])
    return f"was {before!r}, is {after!r}"


class LeftBehind:
    """The plugin.  One look between two tests: what one leaves is what the next one finds."""

    def __init__(self) -> None:
        self.before: dict[str, Any] = {}
        self.names = Names()
        self.held: dict[Any, dict[str, Any]] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        if not self.before:
            self.before = looked_at()
            self.names.replaced()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        result = yield
        before, self.before = self.before, looked_at()
        names = ("temporary files", "threads")
        if any(before[name] != self.before[name] for name in names):
            gc.collect()  # a folder may go with what holds it
            for thread in threading.enumerate():
                if thread.name in self.before["threads"] - before["threads"]:
                    thread.join(PATIENCE)  # it may have been told to end
            self.before = looked_at()
        if found := [*changes(before, self.before), *self.names.replaced()]:
            lines = "\n  ".join(found)
            pytest.fail(f"{item.nodeid} leaves behind:\n  {lines}", pytrace=False)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, object, object]:
        """What a fixture for several tests changes is there until it ends."""
        if fixturedef.scope == "function" or not self.before:
            return (yield)
        first = looked_at()
        result = yield
        now = looked_at()
        changed = [name for name in first if now[name] != first[name]]
        self.held[fixturedef] = {name: self.before[name] for name in changed}
        self.before = {**now, **self.before, **{name: now[name] for name in changed}}
        return result

    def pytest_fixture_post_finalizer(self, fixturedef: Any) -> None:
        self.before |= self.held.pop(fixturedef, {})
