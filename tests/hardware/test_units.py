import math

import pytest
from hypothesis import given, strategies as st

from rooftrace.hardware import units

pytestmark = pytest.mark.quick

# Written out by hand: a prefix table that is wrong must not be able to agree with itself.
WORTH = {
    "": 1,
    "k": 1_000,
    "M": 1_000_000,
    "G": 1_000_000_000,
    "T": 1_000_000_000_000,
    "P": 1_000_000_000_000_000,
    "E": 1_000_000_000_000_000_000,
    "Ki": 1024,
    "Mi": 1024 * 1024,
    "Gi": 1024 * 1024 * 1024,
    "Ti": 1024 * 1024 * 1024 * 1024,
    "Pi": 1024 * 1024 * 1024 * 1024 * 1024,
    "Ei": 1024 * 1024 * 1024 * 1024 * 1024 * 1024,
}
SMALL_WORTH = {"m": 1e-3, "u": 1e-6, "\u00b5": 1e-6, "\u03bc": 1e-6, "n": 1e-9, "p": 1e-12}


CASES = [
    (unit, prefix, symbol)
    for unit in units.UNITS
    for prefix in units.PREFIXES[unit]
    for symbol in units.SYMBOLS[unit]
]


@pytest.mark.parametrize(("unit", "prefix", "symbol"), CASES)
def test_every_prefix_of_every_unit(unit, prefix, symbol):
    expected = {**WORTH, **SMALL_WORTH}[prefix]
    per_symbol = {"bit/s": 1 / 8, "%": 1 / 100}.get(symbol, 1)
    assert units.parse(f"3 {prefix}{symbol}", unit) == pytest.approx(3 * expected * per_symbol)


def test_every_prefix_has_a_case():
    assert {prefix for _, prefix, _ in CASES} == set(WORTH) | set(SMALL_WORTH)


@pytest.mark.parametrize(
    ("text", "unit", "expected"),
    [
        ("989.5 TFLOP/s", "FLOP/s", 989.5e12),
        ("1,979 TOP/s", "FLOP/s", 1979e12),
        ("3.35 TB/s", "byte/s", 3.35e12),
        ("400 Gbit/s", "byte/s", 50e9),
        ("141 GB", "byte", 141e9),
        ("80 GiB", "byte", 85899345920.0),
        ("50MiB", "byte", 52428800.0),
        ("4.5 us", "second", 4.5e-6),
        ("700 W", "watt", 700.0),
        ("1.98 GHz", "hertz", 1.98e9),
        ("2.5 dollar/hour", "dollar/hour", 2.5),
        ("132", "count", 132.0),
        (" 1e12 FLOP/s ", "FLOP/s", 1e12),
    ],
)
def test_parse(text, unit, expected):
    assert units.parse(text, unit) == expected
    assert units.parse_any(text) == (expected, unit)


@pytest.mark.parametrize(
    ("text", "unit", "example"),
    [
        ("989 TFLOPS", "FLOP/s", "989 TFLOP/s"),
        ("fast", "FLOP/s", "989 TFLOP/s"),
        ("", "byte", "80 GiB"),
        ("-3 GB", "byte", "80 GiB"),
        ("80", "byte", "80 GiB"),
        ("inf s", "second", "4.5 us"),
        ("400 Gb/s", "byte/s", "400 GB/s"),  # bits or bytes? refused
        ("3 KB", "byte", "80 GiB"),
        ("19,79 TFLOP/s", "FLOP/s", "989 TFLOP/s"),
        ("1 Gs", "second", "4.5 us"),
        ("132 SMs", "count", "132"),
    ],
)
def test_an_error_quotes_the_text_and_shows_how(text, unit, example):
    with pytest.raises(units.UnitError) as error:
        units.parse(text, unit)
    assert str(error.value) == f'"{text}": expected a quantity in {unit}, for example "{example}"'


def test_an_unknown_unit_lists_the_units():
    with pytest.raises(units.UnitError, match=r'unit "parsec": expected one of FLOP/s, byte/s'):
        units.parse("1 parsec", "parsec")
    with pytest.raises(units.UnitError, match="too large"):
        units.parse("1e400 s", "second")
    with pytest.raises(units.UnitError, match="number with a unit"):
        units.parse_any("7 parsec")


@pytest.mark.parametrize("number", ["1e9999999999", "9" * 5000, "1" + "0" * 400, f"1e{'9' * 5000}"])
def test_a_number_that_no_double_holds_is_refused_by_its_text(number):
    for text in (f"{number} GB/s", number):
        with pytest.raises(units.UnitError) as error:
            units.parse(text, "byte/s" if " " in text else "count")
        assert "too large" in str(error.value) and len(str(error.value)) < 300


def test_a_number_below_every_double_is_zero():
    assert units.parse("1e-9999999999 s", "second") == 0.0
    assert units.parse("1e-9 s", "second") == 1e-9


@given(
    st.sampled_from([unit for unit in units.UNITS if unit != "count"]),
    st.floats(1e-13, 1e24),
)
def test_what_write_writes_parse_reads(unit, value):
    again = units.parse(units.write(value, unit), unit)
    assert again == pytest.approx(value, rel=5.1e-4)
    assert units.parse(units.write(again, unit), unit) == again


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_write_refuses_what_parse_could_not_read(bad):
    with pytest.raises(units.UnitError):
        units.write(bad, "second")


@pytest.mark.parametrize(
    ("formatted", "expected"),
    [
        (units.format_flops(152e12), "152.0 TFLOP"),
        (units.format_flops(0), "0 FLOP"),
        (units.format_flop_rate(989e12), "989.0 TFLOP/s"),
        (units.format_traffic(671e9), "671.0 GB"),
        (units.format_traffic(512), "512 B"),
        (units.format_bandwidth(4.8e12), "4800 GB/s"),
        (units.format_bandwidth(17.25e9), "17.2 GB/s"),
        (units.format_capacity(141e9), "131.3 GiB"),
        (units.format_capacity(512), "512 B"),
        (units.format_time(0.1435), "143.5 ms"),
        (units.format_time(0.99996), "1.00 s"),
        (units.format_time(-0.002), "-2.00 ms"),
        (units.format_time(3600), "3600 s"),
        (units.format_count(671e9), "671.0 B"),
        (units.format_count(512), "512"),
        (units.format_count(999_960), "1.00 M"),
        (units.format_intensity(412.3), "412.3 FLOP/byte"),
        (units.format_intensity(math.inf), "\u221e FLOP/byte"),
        (units.format_share(0.123), "12.3 %"),
        (units.format_share(1), "100.0 %"),
        (units.format_share(1e-6), "<0.01 %"),
        (units.format_share(0), "0 %"),
    ],
)
def test_formats(formatted, expected):
    assert formatted == expected


FORMATTERS = [getattr(units, name) for name in dir(units) if name.startswith("format_")]


@pytest.mark.parametrize("formatter", FORMATTERS)
def test_what_is_missing_is_a_dash(formatter):
    assert formatter(None) == formatter(math.nan) == "\u2013"
    assert formatter(0).startswith("0")
    assert formatter(-5.0) == f"-{formatter(5.0)}"


@pytest.mark.parametrize("formatter", FORMATTERS)
@given(value=st.floats(1e-12, 1e20))
def test_a_format_is_never_far_from_the_value(formatter, value):
    number, _, symbol = formatter(value).partition(" ")
    scales = {"ms": 1e-3, "us": 1e-6, "ns": 1e-9, "K": 1e3, "B": 1e9, "%": 0.01, "MAC": 1}
    if formatter is not units.format_count:
        scales["B"] = 1
    if symbol not in scales and symbol[:2] in units.BINARY:
        scales[symbol] = float(units.BINARY[symbol[:2]])
    if symbol not in scales and symbol[:1] in units.DECIMAL and symbol[1:] != "LOP/byte":
        scales[symbol] = float(units.DECIMAL[symbol[:1]])
    if not number.startswith("<"):
        last = 0.01 * 0.1 ** len(number.partition(".")[2])  # what the last digit of a share counts
        assert float(number) * scales.get(symbol, 1) == pytest.approx(
            value, rel=0.006, abs=0.51 * last if symbol == "%" else 0
        )
