"""Hugging Face models over a mesh, by the plans that transformers has for them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from rooftrace.errors import RequestError, TraceError
from rooftrace.graph import pattern_of
from rooftrace.hardware.units import format_traffic
from rooftrace.tracer.names import PLANS, SHARDED
from rooftrace.tracer.sharding.fsdp import axes, named_groups, shown
from rooftrace.tracer.sharding.plans import (
    as_engines,
    check_divides,
    cut_experts,
    cut_vocabulary,
    has_experts,
    is_tied,
)
from rooftrace.tracer.sharding.sequences import cut_sequences, why_sequences_stay
from rooftrace.tracer.sharding.splitting import layers_of
from rooftrace.tracer.sharding.zero import SHARES, SharedStates, local_of

_REPLICATED = ("dp_replicate", "ddp", "replicate")
_VIEWS = ("ep", "etp")
"""Axes of experts: they are views of the processes of the others, and add none."""
_KNOWN = ("pp", *_REPLICATED, *SHARDED, "cp", "tp", *_VIEWS)
DENSE = ("pp", "dp_replicate", "fsdp", "tp")
"""Axes of transformers' mesh, outermost first."""


def sizes_of(mesh: Mapping[str, int]) -> dict[str, int]:
    """The sizes of a mesh by transformers' names of the axes.

    "dp" and "fsdp" are replicas that share their weights in training; "dp_replicate" are full
    copies of these.  "fsdp" has the processes of "cp", too.  "ep" spreads experts over the
    processes of the others, and "etp" splits each of them, among tokens that replicas gather; 0:
    not asked for.  Raises RequestError for another axis, and for sizes that do not divide.
    """
    sizes = {"pp": 1, "dp_replicate": 1, "fsdp": 1, "cp": 1, "tp": 1, "ep": 1, "etp": 1}
    for axis, size in mesh.items():
        if axis not in _KNOWN:
            raise RequestError(
                f"--mesh {axis}={size}: axes of a Hugging Face model are {', '.join(_KNOWN)}; a "
                "function build(mesh) in file.py:build takes any"
            )
        name = "fsdp" if axis in SHARDED else "dp_replicate" if axis in _REPLICATED else axis
        sizes[name] *= size
    sizes["fsdp"] *= sizes["cp"]
    inside = sizes["fsdp"] * sizes["tp"]
    if inside % sizes["ep"]:
        raise RequestError(
            f"--mesh ep={sizes['ep']}: experts are spread over the {inside} processes of dp x cp x "
            "tp; expected a size that divides that"
        )
    if "etp" not in mesh:
        sizes["etp"] = 0
    elif sizes["ep"] * sizes["etp"] != inside:
        raise RequestError(
            f"--mesh etp={sizes['etp']}: experts are over the {inside} processes of dp x cp x tp; "
            f"expected ep x etp = {inside}, found {sizes['ep']} x {sizes['etp']}"
        )
    return sizes


def processes(mesh: Mapping[str, int]) -> dict[str, int]:
    """The mesh without the axes that add no processes."""
    sizes_of(mesh)
    dense = {axis: size for axis, size in mesh.items() if axis not in _VIEWS}
    return dense or {"dp": mesh.get("ep", 1)}


def distribute(
    model: nn.Module,
    mesh: Mapping[str, int],
    *,
    trains: bool,
    checkpoint: str = "none",
    plan: str = "engines",
    zero: int = 3,
    makes_loss: bool = True,
) -> str:
    """Spread a model over the mesh of the running `fake_mesh`, in place.

    trains: replicas share what `zero` says, with gradients reduced in fp32; else each has all.
    checkpoint: see `names.CHECKPOINTS`; plan: `names.PLANS`; zero: `names.ZERO`; makes_loss:
    `cut_sequences`.  Returns a sentence on what tensor parallelism leaves whole, or on what
    replicas share; "" without these.  Raises RequestError where there is no plan for this model.
    """
    if not mesh:
        if trains:
            keep_less(model, checkpoint)
        return ""
    sizes = sizes_of(mesh)
    by_engines = sizes["tp"] > 1 and plan == "engines"
    gathers = sizes["etp"] > 0
    if gathers:
        _check_gathers(model, sizes["etp"], trains, plan)
    # Processes that share their tokens, or gather them, cut experts as engines do.
    together = not trains and (sizes["ep"] == 1 or sizes["fsdp"] == 1)
    cut = gathers or (by_engines and together and any(map(has_experts, model.modules())))
    loose: Any = model
    before = {name: weight.numel() for name, weight in model.named_parameters()}
    tied = is_tied(model)
    try:
        how = {"trains": trains, "cut": cut, "gathers": gathers}
        rules = as_engines(model, sizes["tp"], **how) if by_engines else {}
        config = _configuration(model, {**sizes, "ep": 1} if cut else sizes, rules, trains)
        manager = _meshes(mesh, sizes, trains)
        loose.config.distributed_config = config
        tp, ep, fsdp = (_there(model, p) for p in loose._resolve_parallel_plans(config))
        stays = None
        if by_engines and trains:
            stays = _sequences_stay(model, manager.get_mesh("tp"), tp, ep, makes_loss)
            tp = tp if stays else {}
        _cut(model, manager, sizes, words=by_engines and not trains, experts=cut)
        _split(model, manager, sizes, tp, ep, config.ep_implementation, stays == "")
        if tied:  # as transformers does after it has loaded weights
            loose.get_output_embeddings().weight = loose.get_input_embeddings().weight
        said = _on_whole(model, before, sizes["tp"], plan, stays) if sizes["tp"] > 1 else ""
        if trains:
            keep_less(model, checkpoint)
        if trains and config.dp_size > 1:
            fsdp = fsdp if plan == "transformers" else fsdp | _by_layers(model)
            said = "; ".join(filter(None, (said, _share(model, manager, fsdp, ep, zero))))
    except RequestError:
        raise
    except (ValueError, NotImplementedError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise RequestError(f"{type(model).__name__} over {shown(mesh)}: {reason}") from error
    return said


def _cut(
    model: nn.Module, manager: Any, sizes: Mapping[str, int], *, words: bool, experts: bool
) -> None:
    """Cut the vocabulary, or experts, as inference engines do."""
    if words:
        cut_vocabulary(model, manager.get_mesh("tp"))
    if experts:
        replicas = manager.get_mesh("fsdp") if sizes["etp"] > 0 else None
        cut_experts(model, manager.get_mesh("tp"), replicas, sizes["ep"])


def _sequences_stay(
    model: nn.Module, tp: Any, styles: Mapping[str, str], ep: Mapping[str, str], makes_loss: bool
) -> str:
    """Cut sequences of a model that trains, with all else; else say why they stay whole."""
    routed = [name for name, style in ep.items() if style == "ep_dispatch_experts"]
    stays = why_sequences_stay(model, styles, routed)
    if not stays:
        cut_sequences(model, tp, styles, makes_loss=makes_loss, experts=routed)
    return stays


def _check_gathers(model: nn.Module, size: int, trains: bool, plan: str) -> None:
    """Raise RequestError where experts cannot be split among gathered tokens."""
    why = ""
    if trains or plan != "engines":
        why = "is how inference engines split experts; a training step, and --plan transformers"
        why += ", have ep alone"
    elif not any(map(has_experts, model.modules())):
        why = f"splits experts, and {type(model).__name__} has none that it can split"
    if why:
        raise RequestError(f"--mesh etp={size}: {why}")


_NAMED = 3
"""Parts of a model that a sentence names."""


def _on_whole(
    model: nn.Module, before: Mapping[str, int], size: int, plan: str, stays: str | None
) -> str:
    """A sentence on the plan, and on the largest weights that each process of "tp" has whole.

    stays: why sequences stay whole; None where they are no part of the plan.
    """
    whole: dict[str, int] = {}
    for name, weight in model.named_parameters():
        kept = local_of(weight)
        if kept.numel() == before.get(name):
            whole[pattern_of(name)] = kept.numel() * kept.element_size()
    largest = sorted(whole, key=lambda name: -whole[name])[:_NAMED]
    parts = [f"{name} ({format_traffic(whole[name])} each)" for name in largest]
    who, other = PLANS if plan == PLANS[0] else reversed(PLANS)
    sequences = (
        ""
        if stays is None
        else ", and sequences" + (f", which stay whole ({stays})" if stays else "")
    )
    return (
        f"tensor parallelism as {who} shard{'s' * (who != PLANS[0])}{sequences} (--plan {other} "
        f"for the other plan); largest weights that each of {size} processes has whole: "
        f"{', '.join(parts)}"
    )


_DIVIDED = ("num_attention_heads", "num_key_value_heads", "hidden_size", "vocab_size")
"""Numbers of a config of which each process of "tp" has an equal part."""


@contextlib.contextmanager
def divided(model: Any, mesh: Mapping[str, int]) -> Iterator[None]:
    """Inside, the attention of a model whose sequences are spread over "cp" exchanges keys and
    values, and a model that fails as its heads do not divide over the mesh says so.

    Raises RequestError in place of TraceError.
    """
    try:
        with _ring(model, sizes_of(mesh)):
            yield
    except (RequestError, TraceError) as error:
        if not isinstance(error, TraceError) and not isinstance(error.__cause__, RuntimeError):
            raise
        config, size = model.config.get_text_config(), sizes_of(mesh)["tp"]
        kind = type(model).__name__.removeprefix("FSDP")  # which `fully_shard` puts before it
        if heads := getattr(model, "counted_heads", 0):
            raise RequestError(
                f"--mesh tp={size}: code of {kind} fails with the {heads} attention heads of a "
                f"process: {str(error).splitlines()[0]}; expected a smaller tp"
            ) from error
        numbers = {name: getattr(config, name, None) for name in _DIVIDED}
        for name, number in numbers.items():
            if isinstance(number, int) and number % size:
                raise RequestError(
                    f"--mesh tp={size}: {name} {number} of {kind} does not divide; "
                    "expected a size that divides it"
                ) from error
        raise


def _ring(model: nn.Module, sizes: Mapping[str, int]) -> Any:
    """A context in which torch's context parallelism takes the place of causal attention.

    Each process has a chunk from the front of a sequence, and its mirror image.  Where attention is
    not causal, it has one chunk.
    """
    count = sizes["cp"]
    if count == 1:
        return contextlib.nullcontext()
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    shared = {**sizes, "fsdp": sizes["fsdp"] // count}
    names = ("pp", "dp_replicate", "fsdp", "cp", "tp")
    places = init_device_mesh("cpu", tuple(shared[n] for n in names), mesh_dim_names=names)
    axes.update(named_groups(places["cp"], {}))
    chunks = 1 if any(getattr(m, "is_causal", True) is False for m in model.modules()) else 2
    sequence = torch.empty(count * chunks)  # torch balances what divides into two chunks for each
    return context_parallel(places["cp"], buffers=[sequence], buffer_seq_dims=[0])


def _there(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """The rules of a plan for modules with weights, and for weights: a stage of a pipeline has
    modules of others without theirs."""
    weighed = {name for name, part in model.named_modules() if any(True for _ in part.parameters())}
    weighed |= {name for name, _ in model.named_parameters()}
    return {name: style for name, style in plan.items() if name in weighed}


def _configuration(
    model: nn.Module, sizes: Mapping[str, int], plan: Mapping[str, str], trains: bool
) -> Any:
    try:
        from transformers.distributed.configuration_utils import DistributedConfig
    except ImportError:
        raise RequestError(
            "--mesh on a Hugging Face model needs the plans of transformers 5.20 or newer: upgrade "
            "it, or name a function build(mesh) in file.py:build that shards the module"
        ) from None
    low = getattr(model, "dtype", torch.float32) is torch.bfloat16
    return DistributedConfig(
        tp_size=sizes["tp"],
        tp_plan=dict(plan) or "auto",
        fsdp_size=sizes["fsdp"],
        dp_replicate_size=sizes["dp_replicate"] if trains else 1,
        ep_size=sizes["ep"],
        fsdp_mixed_precision=trains and low,
    )


def _meshes(mesh: Mapping[str, int], sizes: Mapping[str, int], trains: bool) -> Any:
    """The dense mesh and that of experts, of which our names of the axes are remembered.

    Replicas that do not train exchange nothing but rows for experts.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.utils import TransformersDeviceMesh

    ours = {
        name: "+".join(axis for axis in mesh if axis in kinds and mesh[axis] > 1) or name
        for name, kinds in (("fsdp", (*SHARDED, "cp")), ("dp_replicate", _REPLICATED))
    }
    dense = init_device_mesh("cpu", tuple(sizes[n] for n in DENSE), mesh_dim_names=DENSE)
    others = sizes["fsdp"] * sizes["tp"] // sizes["ep"]
    experts = init_device_mesh(
        "cpu",
        (sizes["pp"], sizes["dp_replicate"], others, sizes["ep"]),
        mesh_dim_names=("pp", "dp_replicate", "efsdp", "ep"),
    )
    dense_last = trains or sizes["tp"] > 1 or sizes["etp"] > 0
    for view in (experts, dense) if dense_last else (dense, experts):
        axes.update(named_groups(view, ours))
    return TransformersDeviceMesh(dense, experts)


def _split(
    model: nn.Module,
    manager: Any,
    sizes: Mapping[str, int],
    tp: Any,
    ep: Any,
    exchange: str,
    apart: bool,
) -> None:
    """Tensor, then expert parallelism, by these plans; apart: processes of "tp" have other tokens
    where they come to experts."""
    from transformers.distributed.expert_parallel import apply_expert_parallelism
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    if tp:
        apply_tensor_parallelism(model, manager.get_mesh("tp"), tp)
    if sizes["ep"] > 1 and ep:
        _check_experts(model, sizes["ep"], ep)
        experts, around = manager.get_mesh("ep"), _alone() if apart else manager.get_mesh("tp")
        _ = hash(experts), hash(around)  # kept there: else the first layer changes what all see
        apply_expert_parallelism(model, experts, around, ep, ep_implementation=exchange)


def _alone() -> Any:
    """A mesh in which each process is alone."""
    from torch.distributed.device_mesh import init_device_mesh

    everybody = torch.distributed.get_world_size()
    return init_device_mesh("cpu", (everybody, 1), mesh_dim_names=("each", "alone"))["alone"]


_SHARING = (
    "replicas have weights, and gradients in fp32, whole; each steps a part of every bucket, as in "
    "Megatron-LM's distributed optimizer: gradients are reduced during backward, and weights "
    "gathered during the next forward (in a pipeline, both once a step, beside nothing)"
)


def _share(model: Any, manager: Any, fsdp: Any, ep: Mapping[str, str], zero: int) -> str:
    """Let replicas share what a stage of ZeRO says; of experts, those that have the same.

    Returns a sentence on it; "" for FSDP2.
    """
    if zero > 1:
        from transformers.distributed.fsdp import apply_fully_sharded_data_parallelism

        apply_fully_sharded_data_parallelism(model, manager, _grouped(model, fsdp), ep)
        if zero == 2:
            model.set_reshard_after_forward(False)
        return ""
    groups = {name: manager.get_mesh(name).get_group() for name in ("fsdp", "efsdp")}
    routed = [m for n, m in model.named_modules() if ep.get(n) == "ep_dispatch_experts"]
    experts = {id(weight) for module in routed for weight in module.parameters()}
    sets: dict[str, list[nn.Parameter]] = {"fsdp": [], "efsdp": []}
    for weight in model.parameters():
        if weight.requires_grad:
            sets["efsdp" if id(weight) in experts else "fsdp"].append(weight)
    copies = manager.get_mesh("dp_replicate").get_group()
    shares = [(groups[name], weights) for name, weights in sets.items() if weights]
    replicas = copies.size() * groups["fsdp"].size()
    SHARES[model] = SharedStates(shares, copies if copies.size() > 1 else None, replicas)
    return _SHARING


def _by_layers(model: nn.Module) -> dict[str, str]:
    """A rule of FSDP2 for each layer: transformers' plans name those of some models only, and
    others are wrapped by them, too (TRANSFORMER_BASED_WRAP of Accelerate)."""
    try:
        layers = list(layers_of(model))
    except RequestError:
        return {}
    return {n: "free_full_weight" for n, part in model.named_modules() if part in layers}


def _grouped(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """A plan of FSDP2 without the parts that the root has to gather for all that read them.

    FSDP2 takes a weight in one group (`_validate_no_duplicate_params` of torch's _fsdp_state.py).
    One that several modules have is in the root's, with what stays whole after forward.
    """
    modules = dict(model.named_modules())
    owners = Counter(id(w) for m in modules.values() for w in m.parameters(recurse=False))
    shared = {
        name
        for name, module in modules.items()
        if any(owners[id(weight)] > 1 for weight in module.parameters(recurse=False))
    }
    whole = ("keep_full_weight",) if shared else ()
    return {n: style for n, style in plan.items() if n not in shared and style not in whole}


def _check_experts(model: nn.Module, processes: int, plan: Mapping[str, str]) -> None:
    """Raise RequestError where each process cannot have as many experts as another."""
    for name, parameter in model.named_parameters():
        if plan.get(name) == "grouped_gemm":
            check_divides("ep", processes, len(parameter), "experts")


def keep_less(model: Any, checkpoint: str) -> None:
    """Let a model make activations of its layers again in backward; "none": it keeps them."""
    if checkpoint == "none":
        return
    how: dict[str, Any] = {"use_reentrant": False}
    if checkpoint == "selective":
        how["context_fn"] = _selective
    newer = getattr(model, "activation_checkpointing_enable", None)
    try:
        (newer or model.gradient_checkpointing_enable)(how)
    except (ValueError, AttributeError) as error:
        raise RequestError(f"--checkpoint {checkpoint}: {error}") from error


def _selective() -> Any:
    """Contexts of a checkpoint that keeps every second product, attention and exchanges."""
    from torch.utils import checkpoint

    seen, home = {False: 0, True: 0}, vars(checkpoint)
    return home["create_selective_checkpoint_contexts"](partial(_policy, seen))


_KEPT = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "reduce_scatter_tensor",
    "all_to_all_single",
)


def _policy(seen: dict[bool, int], context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    from torch.utils.checkpoint import CheckpointPolicy

    # A product in fp8 is one to a policy that counts `mm`: of operands of a tensor subclass.
    if op in (torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default):
        seen[context.is_recompute] += 1
        if seen[context.is_recompute] % 2:
            return CheckpointPolicy.MUST_SAVE
    elif getattr(op, "_opname", "") in _KEPT:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
