"""torch.autocast on meta tensors: the casts that a GPU's autocast makes, as ops that run.

Autocast is a dispatch key that a device's tensors carry, and meta tensors carry none.  During a
capture every autocast region, of any device, includes a key in all calls of its thread that no
device of torch uses: our kernels stand there; the kernels of CUDA and of the CPU stay for others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rooftrace._processes import Shared
from rooftrace.tracer import torch_private
from rooftrace.tracer.recording.overrides import Scope, original_of, replaced
from rooftrace.tracer.values import trees

_KEY = "AutocastIPU"
_DEVICE = "ipu"
"""A device for which torch has an autocast state, and neither kernels nor tensors."""
_MODEL = "AutocastCUDA"
"""The key whose kernels ours are like."""
_aten: Any = torch.ops.aten

# What at::autocast does with each op (ATen/autocast_mode.h): `test_autocast.py` asks it.
_LOWER = """
    _convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d
    conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum
    mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
    _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    scaled_dot_product_attention
"""
"""In the region's precision."""
_RECURRENT = """
    lstm.input gru.input rnn_tanh.input rnn_relu.input lstm.data gru.data rnn_tanh.data
    rnn_relu.data
"""
"""In the region's precision too: their GPU kernels cast for themselves."""
_FP32 = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm group_norm
    rms_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss
    cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss
    huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm
    logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
    _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
    upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
    _upsample_bicubic2d_aa
"""
_FP32_RESULT = """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
    linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList
"""
"""Computed in fp32 by their `dtype` argument, where there is none."""
_PROMOTE = """
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
"""
"""In the widest precision of their inputs."""

_BY_DEVICE = (
    "is_autocast_enabled",
    "get_autocast_dtype",
    "set_autocast_enabled",
    "set_autocast_dtype",
)
_dtype_of = torch.get_autocast_dtype
_enabled_on = torch.is_autocast_enabled
_NAME = "autocast"
"""The key of `Scope.kept` for the `Autocast`."""

Kernel = Callable[..., Any]


class Autocast:
    """The autocast regions of one capture: their kernels, and the weights that they have cast."""

    def __init__(self) -> None:
        self._installed = False
        self._casts: dict[int, tuple[Tensor, Tensor]] = {}

    def install(self) -> None:
        """Make ops in an enabled region cast their inputs (once)."""
        if not self._installed:
            self._installed = True
            _KERNELS.take()

    def remove(self) -> None:
        """Undo `install`."""
        if self._installed:
            self._installed = False
            _KERNELS.give_back()
        self.forget()

    def forget(self) -> None:
        """The weights' casts end with the outermost region."""
        self._casts.clear()

    # -- policies ----------------------------------------------------------------------------------

    def lower(self, args: Any, kwargs: Any) -> Any:
        """Arguments in the region's precision."""
        dtype = _dtype_of(_DEVICE)
        return self._changed(args, dtype), self._changed(kwargs, dtype)

    def fp32(self, args: Any, kwargs: Any) -> Any:
        """Arguments in fp32."""
        return self._changed(args, torch.float32), self._changed(kwargs, torch.float32)

    def promote(self, args: Any, kwargs: Any) -> Any:
        """Arguments in the widest precision that one of them has."""
        tensors: list[Tensor] = []
        _eligible_in((args, kwargs), tensors)
        wide = any(tensor.dtype == torch.float32 for tensor in tensors)
        return (self.fp32 if wide else self.lower)(args, kwargs)

    def with_fp32_result(self, args: Any, kwargs: Any) -> Any:
        """Arguments that ask for a result in fp32, where they ask for no other."""
        if (
            _eligible(args[0])
            and kwargs.get("dtype") is None
            and torch.dtype not in map(type, args)
        ):
            kwargs = {**kwargs, "dtype": torch.float32}
        return args, kwargs

    def _changed(self, item: Any, dtype: torch.dtype) -> Any:
        if isinstance(item, Tensor):
            return self._cast(item, dtype) if _eligible(item) and item.dtype != dtype else item
        if isinstance(item, (list, tuple)):
            return type(item)([self._changed(x, dtype) for x in item])
        if isinstance(item, Mapping):
            return {name: self._changed(x, dtype) for name, x in item.items()}
        return item

    def _cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """A weight is cast once in the outermost region."""
        keep = (
            tensor.requires_grad
            and tensor.is_leaf
            and not tensor._is_view()
            and tensor.dtype == torch.float32
            and torch.is_autocast_cache_enabled()
        )
        if keep and id(tensor) in self._casts:
            return self._casts[id(tensor)][1]
        made = tensor.to(dtype)
        if keep:
            self._casts[id(tensor)] = (tensor, made)
        return made


def _overloads(names: str) -> Iterator[tuple[str, Any]]:
    """The ops of a list that this version of torch has."""
    for name in names.split():
        packet, _, overload = name.partition(".")
        op = getattr(getattr(_aten, packet, None), overload or "default", None)
        if op is not None:
            yield name, op


def _kernels() -> Iterator[tuple[str, Kernel]]:
    for policy, names in (
        (Autocast.lower, _LOWER),
        (Autocast.fp32, _FP32),
        (Autocast.with_fp32_result, _FP32_RESULT),
        (Autocast.promote, _PROMOTE),
    ):
        for name, op in _listed(names):
            yield name, _wrapped(op, policy)
    for name, op in _overloads(_RECURRENT):
        yield name, _wrapped(op, Autocast.lower)
    for name, count in (("norm.Scalar", 1), ("norm.ScalarOpt_dim", 2)):
        yield name, _norm(name, count)


def _registered() -> Callable[[], None]:
    """Register the kernels, for all recordings; return their undo."""
    library_kind: Any = torch.library.Library
    library, all_others = library_kind("aten", "IMPL"), library_kind("_", "IMPL")
    all_others.fallback(torch.library.fallthrough_kernel, _KEY)
    for name, kernel in _kernels():
        library.m.impl(name, _KEY, kernel)

    def undo() -> None:
        library._destroy()
        all_others._destroy()

    return undo


_KERNELS = Shared(_registered)


def _here() -> Autocast | None:
    """The regions of the recording that the running thread belongs to."""
    scope = Scope.current()
    return None if scope is None else scope.kept.get(_NAME)


def _listed(names: str) -> Iterator[tuple[str, Any]]:
    """The ops of a list that this version's autocast handles: rms_norm is new in torch 2.12."""
    for name, op in _overloads(names):
        if torch_private.has_kernel(f"aten::{name}", _MODEL):
            yield name, op


def _eligible(tensor: Tensor) -> bool:
    """Whether autocast changes a tensor: it leaves fp64 alone and, here, tensors of the host."""
    on_host = tensor.device.type == "cpu" and not trees.is_wrapper(type(tensor))
    return tensor.is_floating_point() and tensor.dtype != torch.float64 and not on_host


def _eligible_in(tree: Any, tensors: list[Tensor]) -> None:
    if isinstance(tree, Tensor):
        if _eligible(tree):
            tensors.append(tree)
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            _eligible_in(item, tensors)
    elif isinstance(tree, Mapping):
        _eligible_in(list(tree.values()), tensors)


def _recorded() -> bool:
    """False where the recorder itself runs an op: its inputs have been cast."""
    return bool(torch_private.len_torch_dispatch_stack())


def _wrapped(op: Any, policy: Callable[[Autocast, Any, Any], Any]) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch_private.DisableAutocast():
            autocast = _here()
            if autocast is not None and _recorded():
                args, kwargs = policy(autocast, args, kwargs)
            return op(*args, **kwargs)

    return kernel


def _norm(name: str, count: int) -> Kernel:
    """The overload of norm that takes a dtype, behind the first `count` arguments and defaults."""
    plain = getattr(_aten.norm, name.partition(".")[2])
    wide = _aten.norm.ScalarOpt_dtype if count == 1 else _aten.norm.ScalarOpt_dim_dtype

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch_private.DisableAutocast():
            if _here() is None or not (_eligible(args[0]) and _recorded()):
                return plain(*args, **kwargs)
            values = (*args, *kwargs.values())
            rest: tuple[Any, ...] = (2,) if count == 1 else (2, [], False)
            return wide(*values, *rest[len(values) - 1 :], dtype=torch.float32)

    return kernel


# -- regions ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def followed() -> Iterator[None]:
    """Inside, `torch.autocast` of any device acts on meta tensors, also if entered before.

    That holds for the threads of the running scope; where there is none, for this thread.
    """
    autocast = Autocast()
    with contextlib.ExitStack() as undo:
        undo.callback(autocast.remove)
        scope = Scope.current()
        if scope is None:
            scope = Scope()
            undo.enter_context(scope.entered())
        undo.callback(scope.kept.__setitem__, _NAME, scope.kept.get(_NAME))
        scope.kept[_NAME] = autocast
        outer = next((d for d in (_DEVICE, "cuda", "cpu") if _enabled_on(d)), None)
        dtype = _dtype_of(outer) if outer else None
        undo.enter_context(replaced(torch.autocast, _region(autocast)))
        for home, replacements in _questions(autocast):
            undo.enter_context(replaced(home, replacements))
        undo.enter_context(carried_here())
        if outer:
            undo.enter_context(torch.autocast(_DEVICE, dtype=dtype))
        yield


@contextlib.contextmanager
def carried_here() -> Iterator[None]:
    """Inside, meta tensors carry the key of our kernels in this thread."""
    included, dtype = torch_private.is_key_included(_KEY), _dtype_of(_DEVICE)
    torch.set_autocast_dtype(_DEVICE, _dtype_of("cuda"))
    torch_private.set_key_included(_KEY, True)
    try:
        yield
    finally:
        torch_private.set_key_included(_KEY, included)
        torch.set_autocast_dtype(_DEVICE, dtype)


def _region(autocast: Autocast) -> Mapping[str, Kernel]:
    """Methods of torch.autocast that do not check the device."""
    names = ("__init__", "__enter__", "__exit__")
    make, enter, leave = (original_of(torch.autocast, name) for name in names)

    def init(
        self: Any,
        device_type: str,
        dtype: Any = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if dtype is None:
            dtype = _dtype_of("cpu" if device_type == "cpu" else _DEVICE)
        make(self, _DEVICE, dtype=dtype, enabled=False, cache_enabled=cache_enabled)
        self._enabled = enabled and dtype in (torch.float16, torch.bfloat16)

    def entered(self: Any) -> Any:
        self._asked_device, self.device = self.device, _DEVICE  # it may be older than the capture
        if self._enabled:
            autocast.install()
        return enter(self)

    def left(self: Any, *exception: Any) -> Any:
        try:
            return leave(self, *exception)
        finally:
            self.device = self._asked_device

    return {"__init__": init, "__enter__": entered, "__exit__": left}


def _questions(autocast: Autocast) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """Replacements for the functions that query a device's region: all devices share one."""
    replacements: dict[str, Any]
    replacements = {name: _of_the_device(original_of(torch, name)) for name in _BY_DEVICE}
    replacements["is_autocast_cpu_enabled"] = lambda: _enabled_on(_DEVICE)
    # Torch clears the casts of all threads here; the casts of this recording are not among them.
    replacements["clear_autocast_cache"] = autocast.forget
    yield torch, replacements
    yield torch.amp, {"is_autocast_available": lambda device_type: True}
    mode: Any = torch.amp.autocast_mode
    cast = original_of(mode, "_cast")
    yield (
        mode,
        {
            "is_autocast_available": lambda device_type: True,
            "_cast": lambda value, device_type, dtype: cast(value, "meta", dtype),
        },
    )
    yield torch.cuda.amp.common, {"amp_definitely_not_available": lambda: False}  # for GradScaler


def _of_the_device(function: Kernel) -> Kernel:
    def of_the_device(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_type", None)
        named = bool(args) and isinstance(args[0], str)
        return function(_DEVICE, *(args[1:] if named else args), **kwargs)

    return of_the_device
