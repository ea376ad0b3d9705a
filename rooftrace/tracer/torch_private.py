"""Every private name of torch that rooftrace uses: a release of torch that lacks one shows here.

The table below is read twice. A type checker sees assignments. At run time the file reads its own
text and looks up the names in modules that are loaded by then; the others when they are first used,
because Dynamo and Inductor take seconds to import. One warning lists all that are missing; to use
one of those raises RequestError with a list of all. `python -m rooftrace.tracer.torch_private`
checks the whole table.

Operators (`torch.ops.aten._to_copy`) are no private names of Python: the dispatcher has them. The
names that only a build for CUDA has in `torch._C` stand in `fake_cuda`, which answers for them.
"""

from __future__ import annotations

import functools
import re
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from rooftrace import _processes
from rooftrace.errors import RequestError

if TYPE_CHECKING:
    import torch._C._autograd
    import torch._C._dynamo.eval_frame
    import torch._C._functorch
    import torch._dynamo
    import torch._dynamo.config
    import torch._dynamo.convert_frame
    import torch._dynamo.eval_frame
    import torch._dynamo.exc
    import torch._dynamo.guards
    import torch._dynamo.utils
    import torch._export.serde.schema
    import torch._export.serde.serialize
    import torch._guards
    import torch._higher_order_ops
    import torch._higher_order_ops.scan
    import torch._inductor.config
    import torch._inductor.custom_graph_pass
    import torch._inductor.debug
    import torch._ops
    import torch._prims_common
    import torch._subclasses.fake_tensor
    import torch._weights_only_unpickler
    import torch.autograd.forward_ad
    import torch.autograd.graph
    import torch.cuda._utils
    import torch.cuda.nvtx
    import torch.distributed.distributed_c10d
    import torch.distributed.fsdp._fully_shard
    import torch.distributed.fsdp._fully_shard._fsdp_param_group
    import torch.distributed.tensor
    import torch.distributed.tensor._op_schema
    import torch.distributed.tensor._sharding_prop
    import torch.fx._symbolic_trace
    import torch.nested._internal.nested_tensor
    import torch.nested._internal.sdpa
    import torch.nn.attention.flex_attention
    import torch.nn.modules.module
    import torch.overrides
    import torch.serialization
    import torch.testing._internal.distributed.fake_pg
    import torch.utils._device
    import torch.utils._foreach_utils
    import torch.utils._python_dispatch
    import torch.utils._pytree
    import torch.utils.checkpoint
    import torch.utils.data.dataloader

    # -- the dispatcher: keys, modes, what is on in this thread
    AutoDispatchBelowAutograd = torch._C._AutoDispatchBelowAutograd  # an op without its autograd
    DisableAutocast = torch._C._DisableAutocast
    DisableTorchFunction = torch._C.DisableTorchFunction  # no function mode, no subclass
    DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass  # function modes stay
    DispatchKey = torch._C.DispatchKey
    DispatchKeySet = torch._C.DispatchKeySet
    ForceDispatchKeyGuard = torch._C._ForceDispatchKeyGuard  # sets both sets of keys of a thread
    SetExcludeDispatchKeyGuard = torch._C._SetExcludeDispatchKeyGuard  # leaves one key out
    TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode  # sees every op
    TorchDispatchModeKey = torch._C._TorchDispatchModeKey  # finds the mode of fake tensors
    all_op_names = torch._C._dispatch_get_all_op_names  # of registered ops
    bindings: Any = torch._C  # fake_cuda adds the names of a build for CUDA
    disable_current_modes = torch.utils._python_dispatch._disable_current_modes
    dispatch_keys = torch._C._dispatch_keys  # of a tensor
    excluded_keys = torch._C._dispatch_tls_local_exclude_set  # in this thread
    get_current_dispatch_mode = torch.utils._python_dispatch._get_current_dispatch_mode
    get_current_dispatch_mode_stack = torch.utils._python_dispatch._get_current_dispatch_mode_stack
    get_current_function_mode_stack: Any = torch.overrides._get_current_function_mode_stack
    get_dispatch_mode = torch._C._get_dispatch_mode  # the mode that has a key
    get_dispatch_stack_at = torch._C._get_dispatch_stack_at
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    is_in_torch_dispatch_mode = torch.utils._python_dispatch.is_in_torch_dispatch_mode
    included_keys = torch._C._dispatch_tls_local_include_set  # in this thread
    is_key_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
    is_key_included = torch._C._dispatch_tls_is_dispatch_key_included
    len_torch_dispatch_stack = torch._C._len_torch_dispatch_stack
    len_torch_function_stack = torch._C._len_torch_function_stack
    parse_dispatch_key: Any = torch._C._parse_dispatch_key  # from its name
    pop_dispatch_mode: Any = torch.utils._python_dispatch._pop_mode
    pop_function_mode: Any = torch.overrides._pop_mode
    push_dispatch_mode: Any = torch.utils._python_dispatch._push_mode
    push_function_mode: Any = torch.overrides._push_mode
    set_key_included = torch._C._dispatch_tls_set_dispatch_key_included

    # -- tensors, trees of tensors, ops
    FakeTensor = torch._subclasses.fake_tensor.FakeTensor
    FakeTensorMode = torch._subclasses.fake_tensor.FakeTensorMode
    HigherOrderOperator = torch._ops.HigherOrderOperator  # cond, while_loop, flex_attention
    OpOverload = torch._ops.OpOverload  # what a node calls
    make_subclass = torch.Tensor._make_subclass
    make_wrapper_subclass = torch.Tensor._make_wrapper_subclass
    nested_attention: Any = torch.nested._internal.sdpa  # chooses the kernel of jagged attention
    nested_tensor: Any = torch.nested._internal.nested_tensor  # makes a tensor when first used
    pack_padded_sequence = torch._VF._pack_padded_sequence  # called by torch.nn.utils.rnn
    parse_to: Any = torch._C._nn._parse_to  # arguments of Module.to
    suggest_memory_format = torch._prims_common.suggest_memory_format  # of results of convolutions
    swap_tensor_impl: Any = torch._C._swap_tensor_impl  # a module moves in place
    tree_flatten = torch.utils._pytree.tree_flatten
    tree_leaves = torch.utils._pytree.tree_leaves
    tree_map = torch.utils._pytree.tree_map
    tree_map_only = torch.utils._pytree.tree_map_only
    tree_unflatten = torch.utils._pytree.tree_unflatten
    unpickler = torch._weights_only_unpickler  # may read tensors of the device
    utils: Any = torch._utils  # pickles tensors
    DeviceContext = torch.utils._device.DeviceContext  # the mode of `with torch.device(...)`
    device_constructors = torch.utils._device._device_constructors  # which functions it changes

    # -- autograd, transforms, tracers
    current_autograd_node: Any = torch._C._current_autograd_node  # the backward that runs
    current_level = torch.autograd.forward_ad._current_level  # of forward-mode derivatives
    execution_engine: Any = torch.autograd.Variable._execution_engine  # calls back after backward
    forward_hooks = torch.nn.modules.module._global_forward_hooks
    forward_pre_hooks = torch.nn.modules.module._global_forward_pre_hooks
    get_unwrapped: Any = torch._C._functorch.get_unwrapped  # from a transform of torch.func
    get_sequence_nr = torch._C._autograd._get_sequence_nr  # of the next node of the backward
    get_tracing_state: Any = torch._C._get_tracing_state  # of torch.jit.trace
    is_functorch_wrapped_tensor = torch._C._functorch.is_functorch_wrapped_tensor
    is_fx_symbolic_tracing = torch.fx._symbolic_trace.is_fx_symbolic_tracing  # torch 2.8 has none
    is_fx_tracing_flag = torch.fx._symbolic_trace._is_fx_tracing_flag  # torch 2.15 has none
    is_multithreading_enabled = torch._C._is_multithreading_enabled  # of the backward
    is_tracing = torch._C._is_tracing  # by torch.jit.trace
    maybe_current_level: Any = torch._C._functorch.maybe_current_level  # of transforms
    peek_interpreter_stack = torch._C._functorch.peek_interpreter_stack  # of transforms
    run_backward: Any = torch.autograd.graph._engine_run_backward
    saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
    set_grad_enabled: Any = torch._C._set_grad_enabled  # every change of the grad mode
    set_multithreading_enabled = torch._C._set_multithreading_enabled
    set_tracing_state: Any = torch._C._set_tracing_state  # type: ignore[attr-defined]
    unsafe_preserve_version_counter: Any = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]

    # -- higher-order ops
    flex_attention = torch._higher_order_ops.flex_attention
    flex_attention_backward = torch._higher_order_ops.flex_attention_backward
    flex_identity = torch.nn.attention.flex_attention._identity  # no score_mod
    generic_scan: Any = torch._higher_order_ops.scan.generic_scan  # type: ignore[attr-defined]

    # -- kernels without a public function
    foreach_copy_ = torch._foreach_copy_
    foreach_zero_ = torch._foreach_zero_
    grouped_mm = torch._grouped_mm
    int_mm = torch._int_mm
    scaled_mm = torch._scaled_mm

    # -- Dynamo and Inductor: graph breaks, compiled steps
    CompileContext = torch._guards.CompileContext  # says what is compiled
    ConvertFrameAssert = torch._dynamo.convert_frame.ConvertFrameAssert
    CustomGraphPass = torch._inductor.custom_graph_pass.CustomGraphPass
    DeletedGuardManagerWrapper = torch._dynamo.guards.DeletedGuardManagerWrapper
    FrameAction: Any = torch._C._dynamo.eval_frame._FrameAction
    FrameExecStrategy: Any = torch._C._dynamo.eval_frame._FrameExecStrategy
    Unsupported = torch._dynamo.exc.Unsupported  # why a graph ends
    cache_entries: Any = torch._C._dynamo.eval_frame._debug_get_cache_entry_list
    compiled_autograd: Any = torch._C._dynamo.compiled_autograd
    convert_frame: Any = torch._dynamo.convert_frame  # counts frames, tracks code
    counters = torch._dynamo.utils.counters
    dynamo_config: Any = torch._dynamo.config
    dynamo_optimize: Any = torch._dynamo.optimize
    dynamo_reset: Any = torch._dynamo.reset
    dynamo_utils: Any = torch._dynamo.utils  # run_node, and what stays of a compilation
    eval_frame: Any = torch._dynamo.eval_frame
    graph_break_reasons = torch._dynamo.utils.graph_break_reasons
    guard_failures = torch._dynamo.utils.guard_failures
    inductor_settings: Any = torch._inductor.config.get_config_copy
    inductor_debug: Any = torch._inductor.debug  # the nodes of each kernel
    register_bytecode_hook = torch._dynamo.convert_frame.register_bytecode_hook
    reset_code: Any = torch._C._dynamo.eval_frame.reset_code
    stance: Any = torch._dynamo.eval_frame._stance  # of torch.compiler.set_stance
    set_code_exec_strategy: Any = torch._C._dynamo.eval_frame.set_code_exec_strategy

    # -- .pt2 files
    SERIALIZED_DTYPES = torch._export.serde.serialize._SERIALIZE_TO_TORCH_DTYPE
    ExportedProgram: Any = torch._export.serde.schema.ExportedProgram  # as a document
    ExportedProgramDeserializer: Any = torch._export.serde.serialize.ExportedProgramDeserializer
    bytes_to_dataclass: Any = torch._export.serde.serialize._bytes_to_dataclass  # torch 2.9 on

    # -- processes that are not there, loaders without workers
    FakeStore: Any = torch.testing._internal.distributed.fake_pg.FakeStore
    SingleProcessDataLoaderIter: Any = torch.utils.data.dataloader._SingleProcessDataLoaderIter
    LoaderIterator: Any = torch.utils.data.dataloader._BaseDataLoaderIter
    get_default_group: Any = torch.distributed.distributed_c10d._get_default_group
    rank_not_in_group: Any = torch.distributed.distributed_c10d._rank_not_in_group
    resolve_process_group: Any = torch.distributed.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    clear_sharding_cache: Any = torch._C._clear_DTensor_sharding_propagator_cache
    sharding_propagator: Any = torch.distributed.tensor.DTensor._op_dispatcher.sharding_propagator

    # -- CUDA and profiles
    DeviceType = torch._C._autograd.DeviceType  # of an event of a profile
    cuda_sleep: Any = torch.cuda._sleep  # the device spins while the host runs ahead
    get_device_index: Any = torch.cuda._utils._get_device_index
    nvtx_bindings: Any = torch.cuda.nvtx._nvtx  # type: ignore[attr-defined]
    profiler_enabled = torch._C._autograd._profiler_enabled
    zipfile_writer: Any = torch.serialization._open_zipfile_writer_file  # writes below Python

DYNAMO = "torch._dynamo"
FOREACH = "torch.utils._foreach_utils"
FULLY_SHARD = "torch.distributed.fsdp._fully_shard"
OP_SCHEMA = "torch.distributed.tensor._op_schema"
META_EXCHANGES = "torch.distributed._meta_registrations"
SHARDING_PROP = "torch.distributed.tensor._sharding_prop"
_LOADED = (DYNAMO, FOREACH, FULLY_SHARD, META_EXCHANGES, OP_SCHEMA, SHARDING_PROP)
"""Modules that are changed or cleaned up only where they are loaded."""

_VARIABLES = frozenset({"current_level", "is_fx_tracing_flag", "stance"})
"""Values that torch sets while it runs: read anew each time."""
_OPTIONAL = frozenset(
    {
        *("bytes_to_dataclass", "clear_sharding_cache", "cuda_sleep", "grouped_mm"),
        *("is_fx_symbolic_tracing", "is_fx_tracing_flag"),
    }
)
"""Names that a release or a build that the package supports may lack."""
_PATCHED = (
    "torch._C._group_tensors_by_device_and_dtype",
    "torch._dynamo.eval_frame._callback_from_stance",
    "torch._dynamo.utils.run_node",
    "torch._utils._get_obj_state",
    "torch._utils._rebuild_meta_tensor_no_storage",
    "torch._weights_only_unpickler._get_allowed_globals",
    "torch.amp.autocast_mode._cast",
    "torch.autograd._engine_run_backward",
    "torch.cuda._lazy_init",
    "torch.distributed._register_comm_hook",
    f"{FULLY_SHARD}._fsdp_param_group.FSDPParamGroup._validate_no_meta_params",
    f"{SHARDING_PROP}.ShardingPropagator",
    "torch.nn.parallel.distributed.DistributedDataParallel._ddp_init_helper",
    "torch.nn.parallel.distributed._sync_module_states",
    "torch.nn.parallel.distributed._verify_param_shape_across_processes",
    "torch.utils.data.dataloader.DataLoader._get_iterator",
)
"""Names that a recording or a script replaces, and that nobody calls."""


@functools.cache
def table() -> dict[str, tuple[str, str]]:
    """{name here: (module of torch, dotted path)}; a module or a replaced name under its path."""
    text = Path(__file__).read_text(encoding="utf-8")
    modules = ["torch", *re.findall(r"^    import ([\w.]+)$", text, re.MULTILINE)]
    rows = re.findall(r"^    (\w+)(?:: Any)? = (torch\.[\w.]+)", text, re.MULTILINE)
    rows += [(path, path) for path in (*_LOADED, *_PATCHED)]
    return {
        name: (max((m for m in modules if f"{path}.".startswith(f"{m}.")), key=len), path)
        for name, path in rows
    }


def _value(name: str) -> Any:
    """Look a name of the table up.  Raises AttributeError or ImportError where torch lacks it."""
    module, path = table()[name]
    inside = path[len(module) + 1 :]
    value: Any = import_module(module)
    if inside:
        value = functools.reduce(getattr, inside.split("."), value)
    if name not in _VARIABLES:
        globals()[name] = value
    return value


def has(name: str) -> bool:
    """Whether the torch that is installed has a name of the table."""
    try:
        _value(name)
    except (AttributeError, ImportError):
        return False
    return True


def missing(loaded: bool = False) -> list[str]:
    """Paths of the table that torch lacks, the optional ones aside; loaded: imports no module."""
    return [
        path
        for name, (module, path) in table().items()
        if (not loaded or module in sys.modules) and name not in _OPTIONAL and not has(name)
    ]


def _message(paths: list[str]) -> str:
    return (
        f"torch {torch.__version__} lacks names that rooftrace uses: {', '.join(paths)}; what "
        "needs them fails: install a release of torch that docs/versions.md lists"
    )


def __getattr__(name: str) -> Any:
    """The object of the table under a name.  Raises RequestError where torch lacks it."""
    if name not in table():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return _value(name)
    except (AttributeError, ImportError):
        raise RequestError(_message(sorted({table()[name][1], *missing()}))) from None


# -- Dynamo, until something of it is used ---------------------------------------------------------
# Optimizers and decorators of torch import Dynamo to say what it leaves out.  It takes a second.


class _Unused(ModuleType):
    """A module of Dynamo for code that compiles nothing; any other attribute imports Dynamo."""

    trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)  # process groups clear its caches

    def graph_break(self, msg: str = "") -> None:
        """Nothing is compiled."""

    def disable(self, fn: Any = None, recursive: bool = True, **options: Any) -> Any:
        """A function that is the one of Dynamo once that is imported; without `fn` a decorator."""
        if fn is None:
            return functools.partial(self.disable, recursive=recursive, **options)
        if not isinstance(fn, FunctionType) or not DYNAMO_LATER.waits:
            return DYNAMO_LATER.load().disable(fn, recursive, **options)

        @functools.wraps(fn)
        def disabled(*args: Any, **kwargs: Any) -> Any:
            return disabled.__wrapped__(*args, **kwargs)

        def fill(dynamo: Any) -> None:
            real = dynamo.disable(fn, recursive, **options)
            vars(disabled).update(vars(real), __wrapped__=real)
            if hasattr(real, "_torchdynamo_wrapper_id"):
                vars(disabled)["_torchdynamo_wrapper_id"] = id(disabled)

        DYNAMO_LATER.then[DYNAMO].append(fill)
        return disabled

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of a module that Python looks at
            raise AttributeError(name)

        def marked(function: Any) -> Any:
            DYNAMO_LATER.then[DYNAMO].append(lambda dynamo: getattr(dynamo, name)(function))
            return function

        def called(*args: Any) -> Any:
            DYNAMO_LATER.load()
            return getattr(sys.modules[self.__name__], name)(*args)

        stand_in = {**dict.fromkeys(_MARKS, marked), _ASKED: called}.get(name)
        if stand_in is not None and DYNAMO_LATER.waits:
            return stand_in
        DYNAMO_LATER.load()
        return getattr(import_module(self.__name__), name)


class _Later:
    """Finds `_Unused` in place of Dynamo, and then Dynamo for who imports a part of it.

    around: contexts in which Dynamo and sharded tensors are imported.  then: called with such a
    module afterwards.
    """

    def __init__(self) -> None:
        self.around: list[Callable[[], AbstractContextManager[Any]]] = []
        self.then: dict[str, list[Callable[[Any], object]]] = {DYNAMO: [], SHARDED: []}
        self.waits = False  # in `sys.meta_path`
        self.is_loaded = False  # Dynamo, by `load`
        self._is_here = False  # imports sharded tensors

    def wait(self) -> None:
        """From here on Dynamo is not imported before something of it is used."""
        if DYNAMO not in sys.modules and not self.waits:
            self.waits = True
            sys.meta_path.insert(0, self)

    def load(self) -> Any:
        """Dynamo, imported if it was not yet."""
        if self.waits:
            self.waits = False
            sys.meta_path.remove(self)
            for name in _STAND_IN:
                sys.modules.pop(name, None)
            self._import(DYNAMO)
        module = import_module(DYNAMO)
        self.is_loaded = True
        return module

    def _import(self, name: str) -> None:
        with ExitStack() as stack:
            for context in self.around:
                stack.enter_context(context())
            import_module(name)
        for due in filter(self._is_due, self.then):
            while self.then[due]:
                self.then[due].pop(0)(sys.modules.get(due))

    def _is_due(self, name: str) -> bool:
        """Whether nothing is waited for: Dynamo brings sharded tensors, which may come before."""
        return not self.waits or (name == SHARDED and SHARDED in sys.modules)

    def once(self, name: str, until: ExitStack, call: Callable[..., object]) -> None:
        """Call it when a module is there: now, or afterwards unless `until` has ended by then."""
        waiting = self.then[name]
        if self._is_due(name):
            call()
            return
        waiting.append(call)
        until.callback(lambda: waiting.remove(call) if call in waiting else None)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Of Dynamo or one of its modules, and of sharded tensors."""
        if name in _STAND_IN:
            spec = PathFinder.find_spec(name, path)
            if spec is not None:
                spec.loader = self  # type: ignore[assignment]
            return spec
        if name == SHARDED and not self._is_here:
            self._is_here = True
            try:
                self._import(SHARDED)
            finally:
                self._is_here = False
        elif name.startswith(f"{DYNAMO}.") and name not in _ALONE:
            self.load()
        else:
            return None
        if name not in sys.modules:
            return None
        # Python would run the module anew if it found it there.
        return ModuleSpec(name, self, loader_state=sys.modules.pop(name))  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """`import` gets a stand-in, or the module that is there."""
        there: ModuleType | None = spec.loader_state
        if there is None:
            return _Unused(spec.name)
        spec.loader_state = there.__spec__
        return there

    def exec_module(self, module: ModuleType) -> None:
        """The module is there already."""
        if module.__spec__ is not None and module.__spec__.loader_state is not None:
            module.__spec__ = module.__spec__.loader_state


_STAND_IN = (DYNAMO, f"{DYNAMO}.utils")
_MARKS, _ASKED = ("allow_in_graph", "assume_constant_result"), "is_compile_supported"
"""Decorators that return what they mark, and what torchvision imports to call it later."""
_ALONE = frozenset({f"{DYNAMO}._trace_wrapped_higher_order_op", f"{DYNAMO}.config"})
"""Modules of Dynamo that import no other one."""
SHARDED = "torch.distributed.tensor"
"""What is replaced in it is replaced when it is there."""
DYNAMO_LATER = _Later()
if _processes.ONE_TASK and __name__ != "__main__":
    DYNAMO_LATER.wait()

if __name__ == "__main__":
    sys.exit(_message(missing()) if missing() else None)
elif _lacking := missing(loaded=True):
    warnings.warn(_message(_lacking), RuntimeWarning, stacklevel=2)
