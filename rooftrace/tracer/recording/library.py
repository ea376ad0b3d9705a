"""The operator library `torch.ops.rooftrace`, its use in user modes, and attention backends."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from rooftrace.tracer import torch_private
from rooftrace.tracer.recording.overrides import Scope
from rooftrace.tracer.recording.releases import Release, installed_release

Library: Any = torch.library.Library
_library = Library("rooftrace", "DEF")
OPS: Any = torch.ops.rooftrace


def define(schema: str, **kernels: Callable[..., Any]) -> None:
    """Add an operator of ours, with its kernels by dispatch key ("Meta", "CPU").

    The kernel of the CPU also tells the sizes on meta, unless there is one for that: it would loop
    over tokens, or look at values.
    """
    _library.define(schema)
    for device, kernel in {"Meta": kernels.get("CPU"), **kernels}.items():
        _library.impl(schema.partition("(")[0], kernel, device)


define("to_host(Tensor self) -> Tensor", CPU=torch.clone)
define("from_host(Tensor self) -> Tensor", CPU=torch.clone)
TO_HOST, FROM_HOST = OPS.to_host.default, OPS.from_host.default
"""Copies between the memory of the device and that of the host, where tensors stay on meta."""


@contextlib.contextmanager
def differentiable() -> Iterator[None]:
    """Inside, autograd follows ops, also where a dispatch mode asks for a value: it runs below."""
    excluded = torch_private.excluded_keys()
    for key in (
        torch_private.DispatchKey.AutogradFunctionality,
        torch_private.DispatchKey.ADInplaceOrView,
    ):
        excluded -= torch_private.DispatchKeySet(key)
    included = torch_private.included_keys()
    with torch_private.ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


# -- shown -----------------------------------------------------------------------------------------
# Ops that stay whole, as dispatch modes of the user's code see them.
#
# On a GPU a mode (a selective checkpoint's policy, a counter, a logger) is shown the op that
# PyTorch chooses there, and not ours.  While such a mode stands before the recorder, an op of
# ours calls that public op; the recorder, which gets it last, runs and records ours in its place.


class _Showing(threading.local):
    """The public op that is being shown, and the function that the recorder runs for it."""

    now: tuple[Any, Callable[..., Any]] | None = None


_showing = _Showing()


def watched() -> bool:
    """Whether a dispatch mode of the user's code sees the next op before the recorder does."""
    count = torch_private.len_torch_dispatch_stack()
    if not count:
        return False
    return not getattr(torch_private.get_dispatch_stack_at(count - 1), "runs_whole", False)


def show(public: Any, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a public op; where the recorder gets it, it does `run` with the same arguments."""
    outer, _showing.now = _showing.now, (public, run)
    try:
        return public(*args, **kwargs)
    finally:
        _showing.now = outer


def behind(func: Any) -> Callable[..., Any] | None:
    """The function that the recorder runs for an op that is only shown; None for other ops."""
    now = _showing.now
    return now[1] if now is not None and now[0] is func else None


def unrecorded() -> Tensor:
    """A stand-in for a tensor that only a GPU's kernel has (random state, reserve)."""
    with torch_private.disable_current_modes():
        return torch.empty((), device="meta")


# -- backends --------------------------------------------------------------------------------------
# Whether CUDA has one kernel for an attention, by its operands and the release of PyTorch.
#
# Conditions are from ATen's `sdp_utils.cpp` and `sdp_utils_cpp.h` (native/transformers).  Two
# things are left open, as a graph is for any chip and may be priced in another precision: fp32
# counts as a half, and grouped heads with a mask count as fused where cuDNN comes first on some
# chips.

_HALVES = (torch.float16, torch.bfloat16)
_FUSED = (*_HALVES, torch.float32)


def release() -> Release:
    """The release whose kernels run in the recording of this thread."""
    scope = Scope.current()
    return installed_release() if scope is None else scope.release


def why_math(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    enable_gqa: bool,
) -> str:
    """Why attention runs as separate products and a softmax; "" where one kernel takes it."""
    operands = (query, key, value)
    if not release().fuses_attention:
        return f"torch {release()} has none"
    shape = _why_shape(query, key, value, enable_gqa)
    if shape:
        return shape
    if any(t.dtype != query.dtype for t in operands) or query.dtype not in _FUSED:
        return "operands are of " + " and ".join(sorted({_short(t) for t in operands}))
    if any(t.stride(-1) != 1 and t.shape[-1] != 1 for t in operands):
        return "the width of an operand is not its innermost dimension in memory"
    if mask is not None and mask.stride(-1) != 1:
        return "the keys of the mask are not its innermost dimension in memory"
    if flash_takes(query, key, value, mask, is_causal) and _enabled("flash"):
        return ""
    if _cudnn_takes(query, value) and _enabled("cudnn"):
        installed = release()
        alone = not (_enabled("flash") or _enabled("mem_efficient") or _enabled("math"))
        if alone or installed.prefers_cudnn:
            return ""
    return _why_not_efficient(query, key, value, mask)


_broadcast: Any = torch.broadcast_shapes


def agree(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether precisions and sizes of operands go together; torch raises where not.

    Batches and heads are left to the kernel: they broadcast, or group.
    """
    if not query.dtype == key.dtype == value.dtype:
        return False
    if query.shape[-1:] != key.shape[-1:] or key.shape[-2:-1] != value.shape[-2:-1]:
        return False
    if mask is None:
        return True
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        return False
    try:
        scores = _broadcast(query.shape[:-1], (*key.shape[:-2], 1))
    except RuntimeError:  # heads that group
        scores = query.shape[:-1]
    shape = (*scores, key.shape[-2])
    try:
        return bool(_broadcast(mask.shape, shape) == shape)
    except RuntimeError:
        return False


def _why_shape(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> str:
    """Why sizes suit no fused kernel; "" where they do."""
    dims = {t.dim() for t in (query, key, value)}
    if dims != {4}:
        return f"operands have {' and '.join(map(str, sorted(dims)))} dimensions, not 4"
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        return "operands have different batches"
    heads = [t.shape[1] for t in (query, key, value)]
    grouped = enable_gqa and release().grouped_heads and heads[1] == heads[2]
    fits = grouped and heads[1] > 0 and heads[0] % heads[1] == 0
    if len(set(heads)) > 1 and not fits:
        return "operands have different numbers of heads"
    if not (query.shape[2] and key.shape[2]):
        return "a sequence is empty"
    return ""


def flash_takes(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool
) -> bool:
    """Whether flash attention takes these operands, in a half: one width, no mask, and a causal
    flag for square scores only."""
    installed, width = release(), query.shape[-1]
    square = query.shape[-2] == key.shape[-2] or not installed.flash_is_square
    return (
        query.dtype in _FUSED
        and mask is None
        and width == key.shape[-1] == value.shape[-1] <= installed.widest_flash
        and (square or not is_causal)
    )


def _cudnn_takes(query: Tensor, value: Tensor) -> bool:
    """Whether cuDNN's attention takes these widths; 192 with 128 on sm_90."""
    widths = query.shape[-1], value.shape[-1]
    return not any(w % 8 for w in widths) and (max(widths) <= 128 or widths == (192, 128))


def _why_not_efficient(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> str:
    """Why the memory-efficient kernel, the last of the fused ones, does not take it."""
    multiple = 4 if query.dtype == torch.float32 else 8
    if query.shape[1] != key.shape[1]:
        return "no fused kernel takes grouped heads with these operands"
    if mask is not None and not release().efficient_takes_masks:
        return f"no fused kernel of torch {release()} takes a mask"
    if query.shape[-1] != key.shape[-1]:
        return "query and key have different widths"
    if any(t.shape[-1] % multiple for t in (query, value)):
        widths = sorted({query.shape[-1], value.shape[-1]})
        return f"heads of {' and '.join(map(str, widths))} are no multiple of {multiple} wide"
    if not _enabled("mem_efficient"):
        return "the fused kernels that would take it are switched off"
    return ""


def _enabled(name: str) -> bool:
    """Whether a kernel is switched on (`torch.nn.attention.sdpa_kernel`)."""
    backends: Any = torch.backends.cuda
    enabled = getattr(backends, f"{name}_sdp_enabled", None)
    return True if enabled is None else bool(enabled())


def _short(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
