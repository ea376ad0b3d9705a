"""What a pattern is, and how its products are counted on real tensors, outside of rooftrace."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from types import FunctionType, MappingProxyType, MethodType
from typing import Any

import numpy as np
import torch
import torch._dynamo  # the first import of it puts wrappers around functions of torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode


@dataclass
class Case:
    """One pattern, built afresh: what is traced, and what is run for real.

    run: a module, or a step whose first argument is a module.  args, kwargs: its real tensors.
    options: what `rooftrace.trace` is told besides.  real: what is counted instead of `run`, where
    counting needs another form of the same work.  expected: FLOP of the products by arithmetic.
    """

    run: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    real: Callable[[], Any] | None = None
    expected: int | None = None

    def go(self) -> Any:
        """Run the work on the real tensors, as torch does it."""
        if self.real is not None:
            return self.real()
        if self.options.get("phase") != "training":
            return self.run(*self.args, **self.kwargs)
        assert isinstance(self.run, nn.Module)
        self.run.train()
        output = self.run(*self.args, **self.kwargs)
        loss = self.options.get("loss")
        if loss is not None:
            return loss(output).backward()
        floating = [t for t in _tensors(output) if t.is_floating_point() and t.requires_grad]
        return torch.autograd.backward(floating, [torch.ones_like(t) for t in floating])


@dataclass(frozen=True)
class Pattern:
    """A named builder.

    recompute: `build(recompute=False)` is the same work with nothing computed twice.  named: kinds
    of assumptions, one of which must be in the result where its FLOPs differ.  needs: libraries.
    ordered: the calls always come in one order; threads that run side by side have none.
    """

    name: str
    build: Callable[..., Case]
    recompute: bool = False
    named: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    ordered: bool = True

    def case(self, **variant: Any) -> Case:
        """A fresh copy: the same seed gives the same weights and data."""
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        return self.build(**variant)


PATTERNS: dict[str, Pattern] = {}


def pattern(build: Callable[..., Case] | None = None, **options: Any) -> Any:
    """Decorator: a builder of this name in this file is a pattern."""
    if build is None:
        return partial(pattern, **options)
    name = f"{build.__module__.rsplit('.', 1)[-1]}.{build.__name__}"
    if name in PATTERNS and PATTERNS[name].build.__code__ is not build.__code__:
        raise ValueError(f"two patterns are called {name}")
    if not build.__doc__:
        raise ValueError(f"{name} does not say what is hostile about it")
    PATTERNS[name] = Pattern(name, build, **options)
    return build


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        tree = [getattr(tree, f.name) for f in dataclasses.fields(tree)]
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    if isinstance(tree, Sequence) and not isinstance(tree, str):
        return [t for item in tree for t in _tensors(item)]
    return []


# -- counting -------------------------------------------------------------------------------------


def _mm(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """A complex multiply-add is four real ones."""
    if a.is_complex():
        return 8 * prod(a.shape) * b.shape[-1]
    if a.layout is not torch.strided:
        return 2 * a._nnz() * b.shape[-1]
    if b.layout is not torch.strided:
        return 2 * b._nnz() * a.shape[-2]
    return 2 * prod(a.shape) * b.shape[-1]


def _addmm(_: Tensor, a: Tensor, b: Tensor, *__: Any, **___: Any) -> int:
    return _mm(a, b)


def _mv(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    return 2 * (a.numel() if a.layout is torch.strided else a._nnz())


def _convolution(
    x: Tensor, weight: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any,
    transposed: bool, *rest: Any, out: Tensor, **_: Any,
) -> int:  # fmt: skip
    """All weights of one channel, for every element of the side that they slide over."""
    return 2 * (x if transposed else out).numel() * prod(weight.shape[1:])


def _convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int, mask: Sequence[bool], **_: Any,
) -> int:  # fmt: skip
    """The gradients of input and weight pair the same elements as the forward does."""
    each = 2 * (x if transposed else grad).numel() * prod(weight.shape[1:])
    return each * (mask[0] + mask[1])


def _attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    return 2 * prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1])


def _attention_backward(_: Tensor, q: Tensor, k: Tensor, v: Tensor, *__: Any, **___: Any) -> int:
    """dV, dP, dQ and dK; the scores that the kernel makes once more are no part of the model."""
    return 2 * _attention(q, k, v)


def _encoder_layer(
    x: Tensor, width: int, heads: int, qkv: Tensor, _qkv_bias: Any, projection: Tensor, *rest: Any
) -> int:
    """The fast path of nn.TransformerEncoderLayer: one kernel for all of it."""
    tokens = x.numel() // width
    weights = [qkv, projection, rest[8], rest[10]]
    return 2 * tokens * sum(w.numel() for w in weights) + 4 * tokens * x.shape[1] * width


def _distances(a: Tensor, b: Tensor) -> int:
    """A product of [-2 a, |a|^2, 1] and [b, 1, |b|^2]: two columns more than the points have."""
    return 2 * prod(a.shape[:-1]) * b.shape[-2] * (a.shape[-1] + 2)


def _quantized_linear(x: Tensor, packed: Any, *_: Any, **__: Any) -> int:
    weight, _bias = torch.ops.quantized.linear_unpack(packed)
    return 2 * x.numel() * weight.shape[0]


def _quantized_conv(x: Tensor, packed: Any, *_: Any, out: Tensor, **__: Any) -> int:
    weight, _bias = torch.ops.quantized.conv2d_unpack(packed)
    return 2 * out.numel() * prod(weight.shape[1:])


FORMULAS: dict[str, Callable[..., int]] = {
    "aten::mm": _mm, "aten::bmm": _mm, "aten::_sparse_mm": _mm, "aten::_int_mm": _mm,
    "aten::addmm": _addmm, "aten::addmm_": _addmm, "aten::baddbmm": _addmm,
    "aten::baddbmm_": _addmm, "aten::_addmm_activation": _addmm,
    "aten::_euclidean_dist": _distances,
    "aten::_sparse_addmm": _addmm, "aten::_transformer_encoder_layer_fwd": _encoder_layer,
    "aten::mv": _mv, "aten::addmv": lambda _, a, b, **__: _mv(a, b),
    "aten::addmv_": lambda _, a, b, **__: _mv(a, b),
    "aten::dot": lambda a, b: 2 * a.numel(), "aten::vdot": lambda a, b: 2 * a.numel(),
    "aten::convolution": _convolution, "aten::convolution_backward": _convolution_backward,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "quantized::linear_dynamic": _quantized_linear, "quantized::linear": _quantized_linear,
    "quantized::conv2d": _quantized_conv,
    "quantized::conv2d_relu": _quantized_conv,
}  # fmt: skip
"""FLOP of one call on real CPU tensors, from sizes; a multiply-add is 2."""

VECTOR_PRODUCTS = ("mv", "addmv", "addmv_", "dot", "vdot", "_sparse_mm", "_sparse_addmm")
"""Products that do not run on a matrix engine: rooftrace counts them, but not as matrix FLOPs."""

HEAVY = ("_fft_", "linalg_", "_linalg_", "cholesky", "_cholesky", "_cdist", "triangular_solve")
"""How names of ops begin of which the calls are compared: a count of FLOPs is a convention."""
NOT_HEAVY = ("linalg_vector_norm", "_linalg_check_errors", "linalg_cross")


def is_heavy(op: str) -> bool:
    """Whether calls of `op` ("aten.mm", "aten::mm") are compared one by one."""
    name = op.replace("::", ".").split(".", 1)[1]
    return name.startswith(HEAVY) and not name.startswith(NOT_HEAVY)


@dataclass
class Count:
    """What real tensors were used for: FLOP by op, calls of heavy ops, steps of optimizers."""

    products: list[tuple[str, int]] = field(default_factory=list)
    heavy: list[str] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)

    @property
    def flops(self) -> int:
        """FLOP of all products."""
        return sum(flop for _, flop in self.products)

    @property
    def by_op(self) -> dict[str, int]:
        """FLOP by op."""
        total: Counter[str] = Counter()
        for op, flop in self.products:
            total[op] += flop
        return dict(total)


class _Products(TorchDispatchMode):
    """Adds what this thread computes to a Count.  A subclass is asked first, for what it runs."""

    def __init__(self, count: Count) -> None:
        super().__init__()
        self.count = count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t.__torch_dispatch__ != Tensor.__torch_dispatch__ for t in types):
            return NotImplemented
        kwargs = kwargs or {}
        name = func._schema.name if hasattr(func, "_schema") else str(func)
        formula = FORMULAS.get(name)
        if formula is None and hasattr(func, "decompose"):
            with self:  # in inference mode, and inside of subclasses, linear comes as it is
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        out = func(*args, **kwargs)
        if formula in (_convolution, _quantized_conv):
            self.count.products.append((name, formula(*args, **kwargs, out=out)))
        elif formula is not None:
            plain = {k: v for k, v in kwargs.items() if k not in ("alpha", "beta", "out")}
            self.count.products.append((name, formula(*args, **plain)))
        elif is_heavy(name):
            self.count.heavy.append(name.replace("::", "."))
        return out


@contextlib.contextmanager
def counting() -> Iterator[Count]:
    """Count products of this thread and of those that start inside; recurrent cells as products."""
    count = Count()
    run = threading.Thread.run

    def counted(thread: threading.Thread) -> None:
        with _Products(count):
            run(thread)

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        count.steps.append(type(optimizer).__name__)

    hook = register_optimizer_step_post_hook(stepped)
    threading.Thread.run = counted  # type: ignore[method-assign]
    try:
        with torch.backends.mkldnn.flags(enabled=False), _Products(count):
            yield count
    finally:
        threading.Thread.run = run  # type: ignore[method-assign]
        hook.remove()


def counted(case: Case) -> Count:
    """What the case computes for real."""
    with counting() as count:
        case.go()
    return count


def torch_count(case: Case) -> FlopCounterMode:
    """What torch's own counter says of the same."""
    counter = FlopCounterMode(display=False)
    with torch.backends.mkldnn.flags(enabled=False), counter:
        case.go()
    return counter


# -- what must not change -------------------------------------------------------------------------


def fingerprint(*roots: Any) -> list[tuple[str, Any]]:
    """Everything that can be reached from these objects: values bit for bit, and identities.

    Walks modules, optimizers, containers, closures and objects of plain classes.
    """
    lines: list[tuple[str, Any]] = []
    seen: dict[int, Any] = {}

    def walk(obj: Any, path: str) -> None:
        if obj is None or isinstance(obj, (bool, int, float, complex, str, bytes, torch.dtype)):
            lines.append((path, obj))
            return
        if id(obj) in seen:
            return
        seen[id(obj)] = obj
        lines.append((path, (type(obj).__qualname__, id(obj))))
        if isinstance(obj, Tensor):
            tensor(obj, path)
        elif isinstance(obj, (dict, MappingProxyType)):
            for key, value in list(obj.items()):
                walk(value, f"{path}[{key if isinstance(key, (str, int)) else type(key)}]")
        elif isinstance(obj, (list, tuple, set, frozenset)):
            lines.append((f"{path}.len", len(obj)))
            for index, value in enumerate(obj):
                walk(value, f"{path}[{index}]")
        elif isinstance(obj, np.ndarray):
            lines.append((path, obj.tobytes()))
        elif isinstance(obj, FunctionType):
            for index, cell in enumerate(obj.__closure__ or ()):
                with contextlib.suppress(ValueError):
                    walk(cell.cell_contents, f"{path}.closure{index}")
        elif isinstance(obj, MethodType):
            walk(obj.__self__, f"{path}.self")
        elif isinstance(obj, partial):
            walk(obj.func, f"{path}.func")
            for index, value in enumerate(obj.args):
                walk(value, f"{path}.args[{index}]")
            for key, value in obj.keywords.items():
                walk(value, f"{path}.keywords[{key}]")
        elif isinstance(obj, torch.jit.ScriptModule):  # caches methods that it looked up
            for key, value in (*obj.named_parameters(), *obj.named_buffers()):
                walk(value, f"{path}.{key}")
        elif isinstance(obj, type) or type(obj).__module__ in ("builtins", "_thread", "threading"):
            return
        elif hasattr(obj, "__dict__"):
            for key, value in list(vars(obj).items()):
                walk(value, f"{path}.{key}")

    def tensor(t: Tensor, path: str) -> None:
        if isinstance(t, nn.parameter.UninitializedTensorMixin):
            return
        lines.append((path, (t.dtype, str(t.device), t.requires_grad, tuple(t.shape))))
        if type(t) not in (Tensor, nn.Parameter):
            for key, value in list(vars(t).items()):
                if not key.startswith("_sym_"):  # torch keeps sizes there that were asked for
                    walk(value, f"{path}.{key}")
        elif t.layout is torch.strided and t.device.type == "cpu" and not t.is_quantized:
            lines.append((path, t.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
                          if t.numel() and not t.is_complex() else repr(t)))  # fmt: skip
        if t.is_leaf and t.grad is not None:
            walk(t.grad, f"{path}.grad")
        for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            walk(getattr(t, hooks), f"{path}.{hooks}")

    for index, root in enumerate(roots):
        walk(root, f"{index}")
    lines.append(("objects", list(seen.values())))  # keeps them alive, so that an id stays theirs
    return lines


def unequal(before: list[tuple[str, Any]], after: list[tuple[str, Any]]) -> list[str]:
    """What differs, in words."""
    one, other = dict(before[:-1]), dict(after[:-1])
    paths = {**one, **other}
    missing = object()
    return [p for p in paths if repr(one.get(p, missing)) != repr(other.get(p, missing))]


def process_state() -> dict[str, Any]:
    """What a tracer might leave behind in this thread and in this process."""
    from torch.nn.modules import module as modules
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    from rooftrace.tracer.recording import overrides

    state: dict[str, Any] = {
        "dispatch modes": list(_get_current_dispatch_mode_stack()),
        "function modes": list(_get_current_function_mode_stack()),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
        "dtype": torch.get_default_dtype(),
        "device": str(overrides.default_device()),
        "torch rng": torch.get_rng_state().numpy().tobytes(),
        "numpy rng": [str(part) if isinstance(part, str) else np.asarray(part).tobytes()
                      for part in np.random.get_state()],
        "python rng": random.getstate(),
        "thread hooks": (threading._trace_hook, threading._profile_hook),  # type: ignore[attr-defined]
        "saved tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        **{name: dict(value) for name, value in vars(modules).items()
           if name.startswith("_global_") and isinstance(value, dict)},
    }  # fmt: skip
    places = (torch, nn.functional, nn.Module, Tensor, torch.optim.Optimizer, threading.Thread,
              torch.autograd, torch.autograd.Function, torch.utils.checkpoint)  # fmt: skip
    for place in places:
        for name, value in vars(place).items():
            ours = str(getattr(value, "__module__", "")).startswith("torch._dynamo")
            if callable(value) and not ours:  # the first torch.compile wraps Module.__init__
                state[f"{place.__name__}.{name}"] = id(value)
    return state
