"""Numbers that are kept as bytes until they are read, and rows that have such."""

import copy
import json
import pickle
import struct

import attrs
import msgspec
import pytest

from groupstate import Trajectory
from groupstate.core.events import TrajectoryRecord
from groupstate.core.packed import Packed, PackedInfo, unpack_when_read
from groupstate.core.trajectory import checked, held, held_info, payload_of, restored


def stored(row: Trajectory) -> Trajectory:
    """The row as a sampled batch has it."""
    rows = checked(row, session=0, group_id="g")
    records = [TrajectoryRecord(0, dict(row.metrics), len(row.prompt_ids), len(row.response_ids), ())]
    (again,) = restored(records, payload_of(rows, "session 0 of group 'g'"))
    return again


PLAIN = Trajectory(
    prompt_ids=[1, 2],
    response_ids=(3,),
    log_probs=[-0.5],
    metrics={"reward": 1.0},
    text="x",
    info={"messages": [{"role": "user"}]},
)


@pytest.mark.parametrize(("code", "numbers"), [("i", (1, -2)), ("f", (0.5,)), ("d", (0.1, 1e300)), ("i", ())])
def test_numbers_come_as_they_were_packed(code, numbers):
    packed = Packed(code, struct.pack(f"{len(numbers)}{code}", *numbers))

    assert len(packed) == len(numbers)
    assert packed.is_packed
    assert packed.value == numbers
    assert not packed.is_packed


def test_numbers_are_made_once():
    packed = Packed("i", struct.pack("i", 300))

    assert packed.value is packed.value


def test_a_part_of_a_number_is_refused():
    with pytest.raises(ValueError, match="6 bytes are no whole number of 4 bytes each"):
        Packed("i", b"\0" * 6)


class Owner:
    __slots__ = ("left", "numbers")

    def __init__(self, numbers: object, left: object = None) -> None:
        self.numbers = numbers
        self.left = left


@pytest.mark.parametrize(
    ("kept", "read"),
    [
        (Packed("i", struct.pack("i", 3)), (3,)),
        (PackedInfo(msgspec.msgpack.encode({"a": [1]})), {"a": [1]}),
        ([3], [3]),
    ],
)
def test_a_class_reads_what_lies_packed_in_its_slots(kept, read):
    slots = unpack_when_read(Owner, ["numbers"])
    try:
        made = Owner(kept, kept)

        assert list(slots) == ["numbers"]
        assert made.numbers == read
        assert slots["numbers"].__get__(made) is kept
        assert made.left is kept
        made.numbers = "other"
        assert made.numbers == "other"
    finally:
        Owner.numbers = slots["numbers"]


def test_a_packed_dict_is_made_once():
    packed = PackedInfo(msgspec.msgpack.encode({"a": [1]}))

    assert packed.is_packed
    assert packed.value == {"a": [1]}
    assert packed.value is packed.value
    assert not packed.is_packed


def test_a_stored_row_reads_as_tuples():
    row = stored(PLAIN)
    assert isinstance(held(row, "response_ids"), Packed)

    assert (row.prompt_ids, row.response_ids, row.log_probs) == ((1, 2), (3,), (-0.5,))
    assert row.response_ids is row.response_ids


def test_a_stored_row_is_packed_until_it_is_read():
    row = stored(PLAIN)
    packed = held(row, "response_ids")
    assert isinstance(packed, Packed)

    assert packed.is_packed
    assert row.response_ids == (3,)
    assert held(row, "response_ids") is packed


def test_the_info_of_a_stored_row_is_packed_until_it_is_read():
    row = stored(PLAIN)
    packed = held_info(row)
    assert isinstance(packed, PackedInfo)

    assert packed.is_packed
    assert row.info == {"messages": [{"role": "user"}]}
    assert row.info is row.info
    assert not packed.is_packed


def test_a_stored_row_without_info_has_an_empty_dict_of_its_own():
    row, other = stored(Trajectory(response_ids=[1])), stored(Trajectory(response_ids=[1]))

    assert row.info == {}
    assert row.info is not other.info
    assert not isinstance(held_info(row), PackedInfo)


def test_what_a_row_was_made_with_is_what_it_has():
    assert held(PLAIN, "prompt_ids") is PLAIN.prompt_ids == [1, 2]


def test_a_stored_row_without_numbers_has_empty_tuples():
    row = stored(Trajectory(reward=1.0, text="only a text"))

    assert (row.prompt_ids, row.response_ids, row.log_probs) == ((), (), ())
    assert not isinstance(held(row, "response_ids"), Packed)


def test_a_stored_row_cannot_be_changed():
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        stored(PLAIN).response_ids = (4,)  # type: ignore[misc]


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda row: pickle.loads(pickle.dumps(row)), attrs.evolve],
    ids=["copied", "copied in depth", "pickled", "evolved"],
)
def test_a_copy_of_a_stored_row_is_equal_to_it(copied):
    assert copied(stored(PLAIN)) == stored(PLAIN) == attrs.evolve(PLAIN, reward=1.0)


def test_a_stored_row_that_was_evolved_has_what_it_was_given():
    row = attrs.evolve(stored(PLAIN), response_ids=[7, 8])

    assert (row.prompt_ids, row.response_ids) == ((1, 2), [7, 8])


def test_a_stored_row_is_written_out_like_any_other():
    row = stored(PLAIN)

    assert json.loads(json.dumps(attrs.asdict(row)))["response_ids"] == [3]
    assert "prompt_ids=(1, 2), response_ids=(3,)" in repr(row)
