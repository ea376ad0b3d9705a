"""What looks after the tests: what one leaves behind is named, and faults are planted as said."""

from __future__ import annotations

import ast
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import faults, left_behind

pytestmark = pytest.mark.quick


@contextmanager
def a_thread() -> Iterator[None]:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait, name="serves for ever")
    thread.start()
    yield
    ended.set()
    thread.join()


@contextmanager
def a_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@contextmanager
def a_gradient_mode() -> Iterator[None]:
    torch.set_grad_enabled(False)
    yield
    torch.set_grad_enabled(True)


@contextmanager
def a_hook() -> Iterator[None]:
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    yield
    handle.remove()


@contextmanager
def set_to(place: Any, name: str, value: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, name, value)
        yield


@contextmanager
def a_variable() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LEFT_BEHIND", "1")
        yield


@contextmanager
def a_folder() -> Iterator[None]:
    with tempfile.TemporaryDirectory():
        yield


@contextmanager
def a_path() -> Iterator[None]:
    sys.path.insert(0, "/nowhere")
    yield
    sys.path.remove("/nowhere")


@contextmanager
def elsewhere() -> Iterator[None]:
    before = os.getcwd()
    os.chdir(tempfile.gettempdir())
    yield
    os.chdir(before)


LEAKS: list[tuple[Callable[[], Any], str]] = [
    (a_thread, "threads: serves for ever is new"),
    (a_dtype, "the default dtype: was torch.float32, is torch.float64"),
    (a_gradient_mode, "gradients: was (True, False), is (False, False)"),
    (a_hook, "hooks of all modules: _global_forward_hooks: was 0, is 1"),
    (a_variable, "the environment: LEFT_BEHIND was None, is '1'"),
    (a_folder, "temporary files: "),
    (a_path, "sys.path: was "),
    (elsewhere, "the working directory: was "),
    (lambda: set_to(torch, "manual_seed", len), "torch.manual_seed: was "),
    (lambda: set_to(torch.nn.Module, "__call__", len), "torch.nn.Module.__call__: was "),
    (lambda: set_to(sys, "excepthook", lambda *_: None), "hooks: was "),
]


@pytest.mark.parametrize(("leak", "said"), LEAKS, ids=[said for _, said in LEAKS])
def test_what_is_left_behind_is_named_and_what_is_put_back_is_not(
    leak: Callable[[], Any], said: str
) -> None:
    before, names = left_behind.looked_at(), left_behind.Names()
    names.replaced()
    with leak():
        found = [*left_behind.changes(before, left_behind.looked_at()), *names.replaced()]
    assert found and found[0].startswith(said), found
    assert left_behind.changes(before, left_behind.looked_at()) == []


CODE = '''
def rate(flops, seconds, busy=1):
    """FLOP/s, unless nothing ran."""
    if seconds == 0 or not flops:
        return 0
    return max(flops, 0.5) / seconds + busy
'''


def test_each_fault_is_one_edit_of_the_function_that_compiles(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(CODE)
    source = faults.Source(tmp_path / "code.py")
    ((name, function),) = faults.functions(ast.parse(source.text))
    made = {}
    for kind, start, end, new in faults.edits(source, function):
        old = source.text[start:end]
        fault = faults.Fault("code.py", name, 2, kind, start, end, old, new)
        planted = fault.planted(source.text)
        compile(planted, "code.py", "exec")
        made[kind, old] = new
    assert made["returned early", ""].startswith("return None\n")
    assert made["bound", "=="] == "!="
    assert made["condition", "or"] == "and"
    assert made["constant", "0"] == "1"
    assert made["constant", "0.5"] == "1.5"
    assert made["sign", "/"] == "*" and made["sign", "+"] == "-"
    assert made["swapped arguments", "flops, 0.5"] == "0.5, flops"
