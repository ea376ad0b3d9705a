from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from rooftrace.hardware import precisions as module
from rooftrace.hardware.precisions import (
    PRECISIONS,
    PrecisionError,
    bytes_per_element,
    compute_family,
    precision,
    storage_bytes,
    widest,
)

pytestmark = pytest.mark.quick

names = st.sampled_from(sorted(PRECISIONS))


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("fp64", 8),
        ("tf32", 4),
        ("bf16", 2),
        ("fp8_e4m3", 1),
        ("mxfp8", Fraction(33, 32)),
        ("mxfp6", Fraction(25, 32)),
        ("nvfp4", Fraction(9, 16)),
        ("mxfp4", Fraction(17, 32)),
        ("int4", Fraction(1, 2)),
        ("bool", 1),
        ("complex64", 8),
        ("fp4_x2", 1),
    ],
)
def test_bytes_of_one_element(name, size):
    assert bytes_per_element(name) == size


def test_a_block_of_nvfp4_is_eight_bytes_of_numbers_and_one_of_scale():
    assert storage_bytes("nvfp4", 16) == 8 + 1
    assert storage_bytes("mxfp4", 32) == 16 + 1


def test_storage_is_rounded_up_to_whole_bytes():
    assert storage_bytes("int4", 3) == 2
    assert storage_bytes("int4", 0) == 0
    assert storage_bytes("fp32", 10**15 + 1) == 4 * (10**15 + 1)
    with pytest.raises(PrecisionError, match="elements = -1"):
        storage_bytes("int4", -1)


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("torch.bfloat16", "bf16"),
        ("float8_e4m3fn", "fp8_e4m3"),
        ("half", "fp16"),
        ("FP16", "fp16"),
        ("long", "int64"),
        ("float4_e2m1fn_x2", "fp4_x2"),
    ],
)
def test_aliases(alias, name):
    assert precision(alias) is PRECISIONS[name]


def test_every_alias_means_a_precision():
    assert set(module.ALIASES.values()) <= set(PRECISIONS)


def test_an_unknown_name_is_quoted_with_a_guess():
    with pytest.raises(PrecisionError) as error:
        precision("bfloat61")
    assert str(error.value).startswith('precision "bfloat61": expected one of fp64, fp32, tf32')
    assert str(error.value).endswith("; did you mean 'bf16'?")


@pytest.mark.parametrize(
    ("operands", "result"),
    [
        (("int4", "bf16"), "bf16"),
        (("fp8_e4m3", "bf16"), "bf16"),
        (("fp8_e4m3", "fp8_e4m3"), "fp8_e4m3"),
        (("fp8_e4m3", "fp8_e5m2"), "fp8"),
        (("bf16", "fp16"), "fp32"),
        (("int8", "int8"), "int8"),
        (("int4", "int8"), "int8"),
        (("uint8", "int8"), "int8"),
        (("bool", "int64"), "int64"),
        (("nvfp4", "fp8"), "fp8"),
        (("int64", "fp8_e5m2"), "fp8_e5m2"),
        (("complex64", "fp64"), "complex128"),
        (("complex64", "fp16"), "complex64"),
        (("complex32", "bf16"), "complex64"),
        (("fp32", "fp64"), "fp64"),
    ],
)
def test_widest(operands, result):
    assert widest(*operands) == widest(*reversed(operands)) == result


def test_widest_of_nothing_is_an_error():
    with pytest.raises(PrecisionError, match="at least one"):
        widest()


@given(names)
def test_a_precision_computes_as_itself(name):
    assert widest(name) == widest(name, name) == name


@given(st.lists(names, min_size=2, max_size=5), st.randoms())
def test_the_order_of_operands_does_not_matter(operands, random):
    shuffled = list(operands)
    random.shuffle(shuffled)
    assert widest(*operands) == widest(*shuffled)


@given(names, names)
def test_the_result_is_as_wide_as_each_operand_of_its_kind(first, second):
    result = precision(widest(first, second))
    for operand in (precision(first), precision(second)):
        if operand.kind == result.kind == "int":
            assert result.bits >= operand.bits
        if operand.kind == "float":
            assert result.kind in ("float", "complex")


@given(names)
def test_a_family_is_its_own_family_and_a_precision(name):
    family = compute_family(name)
    assert compute_family(family) == family
    assert family in PRECISIONS


@given(st.sampled_from([name for name in PRECISIONS if name.startswith(("fp", "mx", "nv"))]))
def test_block_scales_do_not_change_the_family(name):
    assert compute_family(name) in ("fp64", "fp32", "fp16", "fp8", "fp6", "fp4")
