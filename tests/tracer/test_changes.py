"""A quantity before and after, limits on how much it may grow, and things that are paired."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, strategies as st

import rooftrace as rt
from rooftrace.diffs import Change, Limit
from rooftrace.diffs.changes import TOTALS, Pairing, union
from rooftrace.diffs.costs import Diff
from rooftrace.diffs.runs import RunDiff
from rooftrace.weights import CheckpointDiff


def test_a_change_of_nothing_has_no_relative_one():
    assert (Change(0, 3).relative, Change(0, 3).percent) == (None, "new")
    assert (Change(0, 0).relative, Change(2, 3).percent) == (0, "+50.0 %")


def test_a_sum_in_another_order_is_no_change():
    forth, back = sum([0.1, 0.2, 0.3]), sum([0.3, 0.2, 0.1])
    assert forth != back and Change(forth, back).delta == 0


@pytest.mark.parametrize(
    "limits, slip, meant",
    [
        (Diff.limits, "tme>5%", "time"),
        (RunDiff.limits, "exposd>1 ms", "exposed"),
        (CheckpointDiff.limits, "drft>1%", "drift"),
    ],
)
def test_a_slip_in_a_metric_is_answered_with_the_one_that_was_meant(limits, slip, meant):
    with pytest.raises(rt.types.RequestError, match=f"did you mean '{meant}'"):
        limits([slip])


@pytest.mark.parametrize(
    "text, before, after, passed",
    [
        ("time>5%", 100.0, 105.0, False),
        ("time>5%", 100.0, 105.1, True),
        ("time>0%", 0.0, 1.0, True),  # from nothing: more than any share
        ("time>0", 100.0, 100.1, True),
        ("time>-10%", 100.0, 95.0, True),  # it had to shrink by a tenth
        ("memory>1 GiB", 0, 2**30, False),
        ("memory>1 GiB", 0, 2**30 + 1, True),
    ],
)
def test_what_grows_beyond_its_limit_is_a_sentence(text, before, after, passed):
    limit = Limit.parse(text, TOTALS)
    change = Change(before, after)
    assert limit.exceeded(change) == passed
    sentence = limit.sentence(change, TOTALS, "here: ")
    if passed:
        assert sentence.startswith(f"here: {limit.metric} grew by ") and repr(text) in sentence


def test_a_ceiling_does_not_ask_what_was_before():
    limit = Limit("<= 5", 5, ceiling=True)
    assert limit.exceeded(Change(100, 6)) and not limit.exceeded(Change(0, 5))


@given(
    st.lists(st.sampled_from("abcd")),
    st.lists(st.sampled_from("abcd")),
    st.booleans(),
)
def test_things_of_one_key_are_paired_in_order(before: list[str], after: list[str], alone: bool):
    pairing = Pairing(range(len(before)), range(len(after)))
    pairing.by(before.__getitem__, after.__getitem__, alone=alone)
    counts = Counter(before), Counter(after)
    expected = counts[0] & counts[1]
    if alone:
        expected = Counter({k: 1 for k in expected if counts[0][k] == counts[1][k] == 1})
    assert Counter(before[pair.before] for pair in pairing.pairs) == expected
    assert all(before[pair.before] == after[pair.after] for pair in pairing.pairs)
    for key in expected:
        numbers = [p.after for p in pairing.pairs if before[p.before] == key]
        assert numbers == sorted(numbers)
    for side, left, number in zip((before, after), pairing.left, (0, 1), strict=True):
        assert {*left} | {pair[number] for pair in pairing.pairs} == {*range(len(side))}


def test_runs_are_paired_as_often_as_both_sides_have_them():
    pairing = Pairing({"a": 3}, {"x": 1, "y": 4})
    pairing.by(lambda _: 0, lambda _: 0)
    assert [tuple(pair) for pair in pairing.pairs] == [("a", "x", 1), ("a", "y", 2)]
    assert pairing.left == ({}, {"y": 2}) and not pairing.is_left


def test_what_has_no_key_stays_alone():
    pairing = Pairing("ab", "ab")
    pairing.by(lambda name: None if name == "a" else name, str)
    assert [tuple(pair) for pair in pairing.pairs] == [("b", "b", 1)]


def test_keys_of_two_sides_stand_once_those_before_first():
    first, *_ = union({"a": 1, "b": 2}, {"c": 3, "a": 4}, math.nan)
    assert first == ("a", 1, 4)
    assert [key for key, *_ in union({"a": 1, "b": 2}, {"c": 3, "a": 4}, 0)] == ["a", "b", "c"]
