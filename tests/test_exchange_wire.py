"""The wire format, against protobuf's own encoder and parser."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published_schemas import CHAKRA, PERFETTO, compile_schema

from ringsim.exchange.slices import place_apart, place_nested, unfold
from ringsim.exchange.wire import as_int64, bytes_field, fields, fixed_field, number, number_field, read_number, text_field

INT64 = st.integers(-(2**63), 2**63 - 1)


@given(value=INT64)
def test_numbers_are_written_as_protobuf_writes_them(value: int) -> None:
    written = number(value)
    assert number_field(4, value) == compile_schema("perfetto", PERFETTO)["DebugAnnotation"](int_value=value).SerializeToString()
    read, place = read_number(written, 0)
    assert (as_int64(read), place) == (value, len(written))


@given(key=st.text(max_size=20), value=INT64, word=st.text(max_size=20))
def test_messages_are_read_by_protobuf(key: str, value: int, word: str) -> None:
    kind = compile_schema("perfetto", PERFETTO)["DebugAnnotation"]
    mine = text_field(10, key) + number_field(4, value) + text_field(6, word)
    theirs = kind.FromString(mine)
    assert (theirs.name, theirs.int_value, theirs.string_value) == (key, value, word)
    read = dict(fields(theirs.SerializeToString()))
    assert (bytes(read[10]).decode(), as_int64(read[4]), bytes(read[6]).decode()) == (key, value, word)  # type: ignore[arg-type]


@given(values=st.lists(st.integers(0, 2**64 - 1), max_size=5))
def test_numbers_of_fixed_size(values: list[int]) -> None:
    kind = compile_schema("perfetto", PERFETTO)["TrackEvent"]
    mine = b"".join(fixed_field(47, value) for value in values)
    assert list(kind.FromString(mine).flow_ids) == values
    assert [value for _, value in fields(mine)] == values


@given(values=st.lists(st.integers(0, 2**64 - 1), max_size=5))
def test_packed_numbers(values: list[int]) -> None:
    kind = compile_schema("chakra", CHAKRA)["Node"]
    assert list(kind.FromString(bytes_field(5, b"".join(map(number, values)))).data_deps) == values


@pytest.mark.parametrize("damaged", ["80", "0a05", "0b", "02", "0900", "08" + "ff" * 11])
def test_what_is_no_message_is_refused(damaged: str) -> None:
    with pytest.raises(ValueError, match=r"field|number"):
        list(fields(bytes.fromhex(damaged)))


SLICES = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=20).map(
    lambda pairs: sorted(((start, start + length) for start, length in pairs), key=lambda one: (one[0], -one[1]))
)


@given(slices=SLICES)
def test_lanes_hold_what_they_promise(slices: list[tuple[int, int]]) -> None:
    starts, ends = [start for start, _ in slices], [end for _, end in slices]
    apart, nested = place_apart(starts, ends), place_nested(starts, ends)
    for first in range(len(slices)):
        for second in range(first):
            overlap = min(ends[first], ends[second]) > max(starts[first], starts[second])
            inside = starts[second] <= starts[first] and ends[first] <= ends[second]
            assert not overlap or apart[first] != apart[second]
            assert not overlap or inside or nested[first] != nested[second]
    most = max((sum(start <= time < end for start, end in slices) for time in starts), default=0)
    assert len({lane for lane, (start, end) in zip(apart, slices, strict=True) if end > start}) <= max(most, 1) + sum(
        s == e for s, e in slices
    )


@given(slices=SLICES)
def test_slices_unfold_in_time_and_in_pairs(slices: list[tuple[int, int]]) -> None:
    lanes = place_nested([start for start, _ in slices], [end for _, end in slices])
    placed = [one for one, lane in zip(slices, lanes, strict=True) if lane == 0]
    stack: list[int] = []
    times = []
    for index, begins in unfold([start for start, _ in placed], [end for _, end in placed]):
        times.append(placed[index][0 if begins else 1])
        if begins:
            stack.append(index)
        else:
            assert stack.pop() == index
    assert stack == []
    assert times == sorted(times)
