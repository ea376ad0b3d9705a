"""State of the process that a program may change, and that is as before after it.

Each `KeptState` is one such state: how it is read, and how it is put back.  Those of torch and of
other libraries are in `keptlibraries`.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import locale
import logging
import multiprocessing.context
import os
import random
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast


@dataclass(frozen=True, slots=True)
class KeptState:
    """One state of the process.  read: what it is now.  restore: makes it what it was."""

    name: str
    read: Callable[[], Any]
    restore: Callable[[Any], object]


def attribute(owner: Any, *names: str) -> KeptState:
    """Attributes of a module or an object, as one state."""

    def restore(before: dict[str, Any]) -> None:
        for name, value in before.items():
            if getattr(owner, name) is not value:
                setattr(owner, name, value)

    shown = getattr(owner, "__name__", type(owner).__name__)
    return KeptState(
        f"{shown}.{names[0]}",
        lambda: {name: getattr(owner, name) for name in names if hasattr(owner, name)},
        restore,
    )


def _same_mapping(owner: Any) -> Callable[[dict[Any, Any]], None]:
    """A function that puts back the content of a dict that others hold."""

    def restore(before: dict[Any, Any]) -> None:
        for name in [name for name in owner if name not in before]:
            del owner[name]
        for name, value in before.items():
            if owner.get(name, owner) is not value:
                owner[name] = value

    return restore


def _same_list(owner: Callable[[], list[Any]]) -> KeptState:
    def restore(before: list[Any]) -> None:
        if owner() != before:
            owner()[:] = before

    return KeptState("", lambda: list(owner()), restore)


# -- the operating system --------------------------------------------------------------------------


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _signals() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


def _restore_signals(before: dict[int, Any]) -> None:
    if threading.current_thread() is not threading.main_thread():
        return  # no program could have set one from here
    if hasattr(signal, "setitimer") and signal.getitimer(signal.ITIMER_REAL)[0]:
        signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in before.items():
        if handler is not None and signal.getsignal(number) != handler:
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, handler)


def _limits() -> dict[int, Any]:
    try:
        import resource
    except ImportError:  # Windows
        return {}
    names = [name for name in vars(resource) if name.startswith("RLIMIT_")]
    return {vars(resource)[name]: resource.getrlimit(vars(resource)[name]) for name in names}


def _restore_limits(before: dict[int, Any]) -> None:
    for number, limit in before.items():
        import resource

        if resource.getrlimit(number) != limit:
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(number, limit)


def _processors() -> Any:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None


def _restore_processors(before: Any) -> None:
    if before is not None and os.sched_getaffinity(0) != before:
        os.sched_setaffinity(0, before)


# -- Python ----------------------------------------------------------------------------------------


def _loggers() -> dict[logging.Logger, tuple[Any, ...]]:
    named = logging.root.manager.loggerDict.values()
    every = [logging.root, *(item for item in named if isinstance(item, logging.Logger))]
    return {
        log: (log.level, list(log.handlers), list(log.filters), log.propagate, log.disabled)
        for log in every
    }


def _restore_loggers(before: dict[logging.Logger, tuple[Any, ...]]) -> None:
    for logger, now in _loggers().items():
        was = before.get(logger, (logging.NOTSET, [], [], True, False))
        if now == was:
            continue
        if logger not in before and not _of_program(logger):
            continue  # a library that was imported meanwhile has set up its own
        for handler in now[1]:
            if handler not in was[1] and isinstance(handler, logging.FileHandler):
                handler.close()
        logger.setLevel(was[0])
        logger.handlers[:], logger.filters[:] = was[1], was[2]
        logger.propagate, logger.disabled = was[3], was[4]


def _of_program(logger: logging.Logger) -> bool:
    """Whether a logger is named after no module that is imported."""
    return logger.name.partition(".")[0] not in sys.modules


def _restore_tracing(before: tuple[Any, Any]) -> None:
    if sys.gettrace() is not before[0]:
        sys.settrace(before[0])
    if sys.getprofile() is not before[1]:
        sys.setprofile(before[1])


def _restore_collector(before: tuple[bool, tuple[int, ...]]) -> None:
    (gc.enable if before[0] else gc.disable)()
    gc.set_threshold(*before[1])


def _locale() -> str:
    return locale.setlocale(locale.LC_ALL)


def _restore_locale(before: str) -> None:
    if _locale() != before:
        locale.setlocale(locale.LC_ALL, before)


def _folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was removed
        return ""


def _restore_folder(before: str) -> None:
    if before and _folder() != before:
        os.chdir(before)


_start_method: Any = multiprocessing.context._default_context

PROCESS = (
    KeptState("working directory", _folder, _restore_folder),
    KeptState("environment", lambda: dict(os.environ), _same_mapping(os.environ)),
    KeptState("umask", _umask, os.umask),
    KeptState("signal handlers", _signals, _restore_signals),
    KeptState("limits", _limits, _restore_limits),
    KeptState("processors", _processors, _restore_processors),
    KeptState("locale", _locale, _restore_locale),
    KeptState("builtins", lambda: dict(vars(builtins)), _same_mapping(vars(builtins))),
    attribute(sys, "argv", "stdout", "stderr", "stdin", "excepthook", "displayhook"),
    attribute(sys, "unraisablehook", "breakpointhook", "dont_write_bytecode", "path", "meta_path"),
    attribute(sys, "ps1", "pycache_prefix", "tracebacklimit"),
    _same_list(lambda: sys.argv),
    _same_list(lambda: sys.path_hooks),
    KeptState("recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
    KeptState("switch interval", sys.getswitchinterval, sys.setswitchinterval),
    KeptState("tracing", lambda: (sys.gettrace(), sys.getprofile()), _restore_tracing),
    attribute(threading, "excepthook", "_trace_hook", "_profile_hook"),
    KeptState("stack size", threading.stack_size, threading.stack_size),
    KeptState("collector", lambda: (gc.isenabled(), gc.get_threshold()), _restore_collector),
    _same_list(lambda: cast("list[Any]", warnings.filters)),
    attribute(warnings, "showwarning", "formatwarning", "filters"),
    KeptState("loggers", _loggers, _restore_loggers),
    attribute(logging.root.manager, "disable", "loggerClass"),
    attribute(logging, "_loggerClass", "_logRecordFactory", "raiseExceptions", "lastResort"),
    KeptState("random numbers", random.getstate, random.setstate),
    attribute(_start_method, "_actual_context"),
    KeptState("time limit of sockets", socket.getdefaulttimeout, socket.setdefaulttimeout),
)
"""States of the operating system's process and of Python."""
