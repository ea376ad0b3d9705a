"""What the name of a kernel says: which kernel it is, whatever its tiles, types and release.

Two devices, and two releases of a library, name the same kernel differently.  The name of a kernel
from a template is kept in its arguments ("elementwise_kernel<..., direct_copy_kernel_cuda, ...>").
"""

from __future__ import annotations

import re
from functools import cache

from rooftrace.costmodels.costs import Cost
from rooftrace.costmodels.registry import find_rule
from rooftrace.measured.alignment import keys

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*(?!\w|::)")
"""A word of a name, and not a namespace."""
_SIZES = re.compile(
    r"\d+(x\d+)*|sm\d+|tilesize\w*|warpgroupsize\w*|align\d+|stages?\d*|[0-9a-f]{12,}|\d+x\w*|v\d+"
    r"|(MT|MI|WG|TT|LBSPP\w*|GRVW\w*|SVW|VW\w*|NEPBS|WSGRA|WSGRB)\d+(x\d+)*|(?:h|s|i)?16816"
)
"""Parts of a name, between underscores, that say sizes, a chip, or a hash."""
_WITH_SIZES = re.compile(r"^[a-z]?\d{4,}(?=[a-z])")
""" "s16816gemm" is "gemm" by an instruction of 16 x 8 x 16."""
_GENERIC = re.compile(
    r"(vectorized_|unrolled_|index_|legacy_)?elementwise_kernel\w*|gpu_kernel_impl\w*|reduce_kernel"
    r"|[Kk]ernel2?|void|const|float\d?|double\d?|(unsigned|int|bool|char|long|short)\d*(_t)?|true"
    r"|false|Half|(__nv_)?bfloat16|BFloat16|__half2?|half|std|array|lambda|operator|at|native|c10"
    r"|TensorInfo|\w*OffsetCalculator|(Load|Store)With\w+|ReduceOp|func_wrapper_t|Params|traits\w*"
    r"|\w+_(traits|config|Params)|Array|TensorIterator\w*|ul|nv_bfloat16|\w*(bfloat16|half)_t"
    r"|OpaqueType|Scalar|\w+Args\w*"
)
"""Words that hundreds of kernels have."""
_TENSILE = re.compile(r"(Cijk_[A-Z][a-z]+_[A-Z][a-z]+(_[A-Z]+)?)\w*")
_WORDS = 2
_COMMUNICATION = re.compile(
    r"nccl|rccl|oneccl|msccl|nvshmem|deep_?ep\b|cross_device_reduce|all_?reduce|all_?gather"
    r"|reduce_?scatter|all_?to_?all|gloo|ptop|peer to peer|c10d::",
    re.IGNORECASE,
)
_FAMILIES = tuple(
    (re.compile(pattern, re.IGNORECASE), family)
    for pattern, family in (
        (r"flash|fmha|attention|\battn", "attention"),
        (r"conv|implicit_gemm|fprop|dgrad|wgrad|winograd|nchwToNhwc|nhwcToNchw", "convolution"),
        (r"gemm|gemv|cutlass|xmma|cublas|Cijk_|nvjet|matmul|splitK", "dense"),
        (r"lstm|gru_cell|rnn", "rnn"),
        (r"adam|sgd|multi_tensor_apply|optimizer", "optimizer"),
        (r"norm(?!al)", "norm"),
        (r"embedding", "embedding"),
        (r"nll_loss|cross_entropy", "loss"),
    )
)
"""Families of the tracer, for kernels that no op launched."""


@cache
def kernel_key(name: str) -> str:
    """What stays of a kernel's name without sizes, types, hashes and namespaces."""
    tensile = _TENSILE.match(name)
    if tensile:
        return tensile[1]
    name = re.sub(r"\(anonymous namespace\)::|<unnamed>::", "", name)
    # The arguments of the function, not those of its template.
    name = re.sub(r"\([^()<>]*\)$", "", name)
    words: dict[str, None] = {}
    for word in _IDENTIFIER.findall(name):
        parts = [part for part in word.split("_") if not _SIZES.fullmatch(part)]
        plain = "_".join(_WITH_SIZES.sub("", part) for part in parts).strip("_")
        if plain and not _GENERIC.fullmatch(plain):
            words[plain] = None
        if len(words) == _WORDS:
            break
    return " ".join(words) or keys.base_name(name)


@cache
def is_communication(name: str) -> bool:
    """Whether a kernel, a copy or an op moves data between devices."""
    return _COMMUNICATION.search(name) is not None


@cache
def family_of_op(name: str) -> str:
    """The family of an op by its rule; "" where none knows it."""
    rule = find_rule(f"{name.replace('::', '.', 1)}.default") if "::" in name else find_rule(name)
    return "" if rule is None else rule.family_of(Cost())


@cache
def family_of_kernel(name: str, kind: str) -> str:
    """The family of a kernel by its name alone; "copies" for copies and fills."""
    if is_communication(name):
        return "communication"
    if kind in ("memcpy", "memset"):
        return "copies"
    return next((family for pattern, family in _FAMILIES if pattern.search(name)), "other")
