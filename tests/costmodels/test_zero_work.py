"""No op that computes on floats is priced at no work: over every sample of torch's own op tests."""

import sys
import types
import unittest
import warnings
from collections import defaultdict
from contextlib import suppress
from itertools import chain, islice
from unittest import mock

import pytest
import torch
from msgspec import structs

from rooftrace.costmodels.ops.opview import OpView, Slot, TensorView, all_rules, find_rule
from tests.conftest import mostly_heavy
from tests.costmodels.rules_support import views

WITHOUT_WORK = {
    "views, and what keeps no books of bytes": """
        _conj _unsafe_view alias as_strided detach diagonal empty empty_like empty_permuted
        empty_strided expand lift_fresh new_empty new_empty_strided permute resize_ resize_as_
        select slice split split_with_sizes squeeze squeeze_ t transpose transpose_ unbind unfold
        unsafe_split unsqueeze unsqueeze_ view view_as_complex view_as_real""",
    "copies, as they are or in another order": """
        _chunk_cat _conj_physical _to_copy alias_copy as_strided_copy as_strided_scatter block_diag
        cat channel_shuffle clone complex constant_pad_nd copy_ diag_embed diagonal_copy
        diagonal_scatter expand_copy flip frexp im2col lu_unpack native_channel_shuffle narrow_copy
        permute_copy pixel_shuffle pixel_unshuffle reflection_pad1d reflection_pad2d
        reflection_pad3d repeat replication_pad1d replication_pad2d replication_pad3d roll rot90
        select_backward select_scatter slice_backward slice_scatter split_with_sizes_copy
        squeeze_copy stack t_copy transpose_copy tril tril_ triu triu_ unbind_copy unfold_copy
        unsqueeze_copy diagonal_backward view_copy _upsample_nearest_exact1d
        _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_nearest1d
        upsample_nearest2d upsample_nearest3d""",
    "one value everywhere": """
        eye fill fill_ full full_like new_full new_ones new_zeros ones ones_like scalar_tensor zero_
        zeros zeros_like _efficientzerotensor""",
    "chosen by an index or a mask": """
        _unsafe_masked_index embedding gather index index_copy index_fill index_select masked_fill
        masked_fill_ masked_scatter masked_select max_unpool2d max_unpool3d nonzero nonzero_static
        take masked_scatter_backward value_selecting_reduction_backward where _to_dense
        sparse_mask""",
    "sorted or selected by the bits of keys": """
        kthvalue median mode nanmedian sort topk _unique2 unique_consecutive hash_tensor""",
    "truth values": "all any logical_and logical_not logical_or logical_xor",
    "answers that the host waits for": "_local_scalar_dense allclose equal",
}
ALLOWED = {f"aten.{name}" for names in WITHOUT_WORK.values() for name in names.split()}
PRIMS_WITHOUT_WORK = """
    as_strided broadcast_in_dim collapse_view conj real imag split_dim squeeze transpose view_of
    view_of_dtype view_element_type slice select resize empty empty_strided empty_permuted
    maximum_value minimum_value _make_token _sink_tokens clone device_put cat rev collapse reshape
    copy_strided as_strided_scatter frexp convert_element_type copy_to full full_like fill
    scalar_tensor item where conj_physical bitwise_and bitwise_not bitwise_or bitwise_xor shift_left
    shift_right_arithmetic gcd"""
"""Views, copies, values written, choices and bits."""
NOT_ALWAYS = {"aten.scatter"}
"""They work where they add up, which the samples of one direction may not do."""
SAMPLES, FEW = 24, 6
"""So many samples of an operator are run by `make heavy`, and by `make test`."""
OTHERWISE_WITHOUT_GRADIENTS = (
    "nn.functional.embedding", "nn.functional.embedding_bag", "to_sparse",
)  # fmt: skip
"""Operators that run an op of their own where no gradient is asked for."""


@pytest.fixture(scope="module")
def operators():
    """torch's own database of operators with sample inputs.

    Its module wants a package for expected texts, of which nothing here is used, and forbids the
    rest of the process to change torch's global flags.
    """
    stub = types.ModuleType("expecttest")
    stub.TestCase, stub.assert_expected_inline = unittest.TestCase, None
    had = sys.modules.get("expecttest")
    sys.modules["expecttest"] = had or stub
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    finally:
        if had is None:
            del sys.modules["expecttest"]
        flags = torch.backends.flags_frozen.__globals__  # torch.backends itself stands before them
        flags["__allow_nonbracketed_mutation_flag"] = True
        assert not torch.backends.flags_frozen()
    # Each sample looks for the test that runs it, in the source of every frame, and keeps a seed
    # for every kind of device, with the stack of who gave it: most of the time.
    utils = "torch.testing._internal.common_utils"
    with (
        mock.patch(f"{utils}.inspect.stack", list),
        mock.patch(f"{utils}.set_rng_seed", torch.default_generator.manual_seed),
    ):
        yield [op for op in op_db if torch.float32 in op.dtypes]


def sampled(operator, backward, count):
    """Every aten op that the first samples of an operator run, as a rule sees it."""
    samples = operator.sample_inputs("cpu", torch.float32, requires_grad=backward)
    for sample in islice(samples, count):

        def call(sample=sample):
            result = operator.op(sample.input, *sample.args, **sample.kwargs)
            if backward:
                found = result if isinstance(result, (tuple, list)) else [result]
                losses = [t for t in found if isinstance(t, torch.Tensor) and t.requires_grad]
                torch.autograd.backward(losses, [torch.ones_like(t) for t in losses])

        with suppress(RuntimeError, AssertionError, TypeError, NotImplementedError, ValueError):
            yield from views(call)  # those are for another device, or not differentiable


def ways(operator, count):
    """Whether backward runs: both ways where that is not more of the same."""
    if count == FEW and operator.name not in OTHERWISE_WITHOUT_GRADIENTS:
        return [operator.supports_autograd]
    return [False, True]


@pytest.mark.slow
@pytest.mark.parametrize("count", mostly_heavy([FEW, SAMPLES], [FEW]))
def test_only_listed_ops_are_priced_at_no_work(operators, count):
    works = defaultdict(set)
    for operator in operators:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for view in chain.from_iterable(
                sampled(operator, backward, count) for backward in ways(operator, count)
            ):
                rule = find_rule(view.target)
                sizes = [t.elements for t in (*view.inputs, *view.outputs) if t.floating]
                empty = any(t.elements == 0 for t in (*view.inputs, *view.outputs))
                if rule is not None and not empty and max(sizes, default=0) > 1:
                    name = view.target.rpartition(".")[0]
                    works[name].add(bool(rule.price(view).work))
    assert len(works) > 300
    silent = {name for name, seen in works.items() if seen == {False}}
    assert silent <= ALLOWED | NOT_ALWAYS
    assert not {name for name in ALLOWED if True in works[name]}, "these do work: list them not"


def primitive(name):
    """How a rule sees one of torch's primitive ops on matrices of floats; None of what takes
    none."""
    packet = getattr(torch.ops.prims, name, None)
    if packet is None or "default" not in packet.overloads():
        return None
    x = TensorView((4, 8), "fp32", (8, 1), 0, 32, 32, 128, True)
    y = structs.replace(x, storage=1)
    arguments, taken = [], []
    for argument in packet.default._schema.arguments:
        if "Tensor" in str(argument.type):
            arguments.append((argument.name, Slot(len(taken))))
            taken.append(structs.replace(x, storage=2 + len(taken)))
        elif argument.name in ("dims", "dim"):
            arguments.append((argument.name, (1,)))
    out = structs.replace(y, shape=(4,), stride=(1,), elements=4, unique_elements=4, nbytes=16)
    reduced = "dims" in {a.name for a in packet.default._schema.arguments}
    return OpView(f"prims.{name}.default", tuple(taken), (out if reduced else y,), tuple(arguments))


def test_a_primitive_op_that_computes_has_work():
    names = {rule.name.split(".")[1] for rule in all_rules() if rule.name.startswith("prims.")}
    assert len(names) > 90
    silent = set()
    for name in names:
        view = primitive(name)
        if view is not None and not find_rule(view.target).price(view).work:
            silent.add(name)
    assert silent <= set(PRIMS_WITHOUT_WORK.split())


def test_a_rule_of_any_namespace_that_computes_has_work():
    """Products and kernels of matrix kinds are never free: each such rule names its work."""
    heavy = ("conv", "attention", "rnn", "grouped mm", "mm", "bmm", "batch norm", "layer norm")
    free = {rule.name for rule in all_rules() if rule.kind in heavy and rule.fusion == "free"}
    assert free == set()
