"""What a trace may change in its process: looked at before, meanwhile from other threads, after."""

import gc
import os
import random
import sys
import threading
import warnings
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nested._internal import sdpa
from torch.nn.attention import flex_attention as flex
from torch.nn.modules import module as nn_module
from torch.optim.optimizer import Optimizer
from torch.utils import _device, _foreach_utils, _python_dispatch

from rooftrace.tracer.recording import overrides

import torch._dynamo.eval_frame as frames  # isort: skip

_ATTRIBUTES: tuple[tuple[Any, str], ...] = (
    *((torch.autocast, name) for name in ("__init__", "__enter__", "__exit__")),
    *(
        (torch, name)
        for name in (
            "is_autocast_enabled",
            "get_autocast_dtype",
            "set_autocast_enabled",
            "set_autocast_dtype",
            "is_autocast_cpu_enabled",
            "clear_autocast_cache",
            "manual_seed",
            "get_rng_state",
            "set_rng_state",
        )
    ),
    (torch.amp, "is_autocast_available"),
    (torch.amp.autocast_mode, "is_autocast_available"),
    (torch.amp.autocast_mode, "_cast"),
    (torch.cuda.amp.common, "amp_definitely_not_available"),
    *((torch.cuda, name) for name in ("synchronize", "current_device", "stream", "set_device")),
    (torch.cuda.Stream, "__new__"),
    (torch.cuda.Event, "record"),
    (torch.cuda.device, "__enter__"),
    (torch.autograd, "_engine_run_backward"),
    (nn.Module, "__call__"),
    (sdpa, "_is_computing_meta_flops"),
    (flex, "_validate_device"),
    (flex, "flex_attention_hop"),
    (flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"),
    (frames, "_callback_from_stance"),
    (frames, "_stance"),
    (_foreach_utils, "_get_foreach_kernels_supported_devices"),
    (threading.Thread, "start"),
    (ThreadPoolExecutor, "submit"),
    (ProcessPoolExecutor, "submit"),
    (BaseProcess, "start"),
    (random, "random"),
    (random, "randint"),
    (np.random, "rand"),
    (_device, "CURRENT_DEVICE"),
    (_python_dispatch, "_is_in_torch_dispatch_mode"),
    (_python_dispatch, "_is_in_any_mode_without_ignore_compile_internals"),
)
optimizer: Any = sys.modules[Optimizer.__module__]
_HELD = (
    ("scaled_dot_product_attention", "Meta"),
    ("lstm.input", "AutogradMeta"),
    ("dropout", "Meta"),
)
"""Where a release of torch cannot hold them, they stay while other threads run."""
_KERNELS = (
    *(_HELD if hasattr(torch.library, "get_kernel") else ()),
    ("mm", "AutocastIPU"),
    ("mm", "AutocastCUDA"),
)


def of_the_process(*modules: Any) -> dict[str, Any]:
    """What all threads share.  modules: those whose names and classes are looked at too."""
    state: dict[str, Any] = {
        f"{getattr(home, '__name__', home)}.{name}": vars(home).get(name, "absent")
        for home, name in _ATTRIBUTES
    }
    for name, key in _KERNELS:
        found = torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)
        state[f"{name} under {key}"] = found
    state["filters"] = list(warnings.filters)
    state["finders"] = list(sys.meta_path)
    state["collector"] = gc.isenabled()
    state["hooks"] = (
        list(nn_module._global_forward_pre_hooks.values()),
        list(nn_module._global_forward_hooks.values()),
        list(optimizer._global_optimizer_pre_hooks.values()),
        list(optimizer._global_optimizer_post_hooks.values()),
    )
    state["environment"] = dict(os.environ)
    state["path"] = list(sys.path)
    state["precision"] = torch.get_default_dtype()
    state["random"] = (
        random.getstate(),
        torch.get_rng_state().tolist(),
        np.random.get_state()[1].tolist(),  # type: ignore[index]
    )
    for module in modules:
        for name, item in {**vars(module)}.items():
            if name == "range" or (isinstance(item, type) and issubclass(item, nn.Module)):
                names = sorted(vars(item)) if isinstance(item, type) else item
                state[f"{module.__name__}.{name}"] = item, names
    return state


def of_this_thread() -> dict[str, Any]:
    """What each thread has of its own."""
    tls: Any = torch._C
    return {
        "modes": (tls._len_torch_dispatch_stack(), tls._len_torch_function_stack()),
        "keys": [tls._dispatch_tls_is_dispatch_key_included(f"Autocast{d}") for d in _DEVICES],
        "regions": [torch.is_autocast_enabled(d) for d in ("cpu", "cuda")],
        "precisions": [torch.get_autocast_dtype(d) for d in ("cpu", "cuda", "ipu")],
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "engine": tls._is_multithreading_enabled(),
        "script": tls._get_graph_executor_optimize(),
        "profile": (sys.getprofile(), sys.gettrace()),
        "device": overrides.default_device(),
    }


_DEVICES = ("CUDA", "CPU", "IPU")


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The names of what is not as it was."""
    return [name for name in before if before[name] != after.get(name)]
