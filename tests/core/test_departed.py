"""Groups that have left, beside a plain dict of them."""

import struct
import zlib
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from groupstate.core import departed as module
from groupstate.core.book import Book
from groupstate.core.departed import Blocks, Departed, Left
from groupstate.core.phases import Phase
from groupstate.core.snapshot import BLOCKS, INDEX, LEFT, STATE, capture, capture_live, decoded, encoded, restore

PHASES = [Phase.EVICTED, Phase.COMMITTED]

Placed = Callable[[str], tuple[int, int]]

PLACES: dict[str, Placed] = {
    "as they are": module._placed,
    "all of one checksum": lambda group_id: (3, 0),
    "all of another": lambda group_id: (16_383, 0xFFFF),
    "of two": lambda group_id: (len(group_id) % 2, 2),
}
"""Ids that a checksum doesn't tell apart, and entries of the index that look alike where none begins."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of three ids, and four to seven ids in the dict."""
    monkeypatch.setattr(module, "NEWEST_IDS", 4)
    monkeypatch.setattr(module, "BLOCK_IDS", 3)


def through_bytes(left: Departed) -> Departed:
    book = Book()
    book.departed = left
    return restore(decoded(encoded(capture(book)))).departed


def some(count: int, first: int = 0) -> Iterator[tuple[str, Phase]]:
    return ((f"g{number}", PHASES[number % 2]) for number in range(first, first + count))


def filled(count: int) -> Departed:
    left = Departed()
    for group_id, phase in some(count):
        left.add(group_id, phase)
    return left


def same(left: Departed, model: dict[str, Phase]) -> bool:
    assert list(left) == list(model)
    assert list(left.items()) == list(model.items())
    assert list(left.values()) == list(model.values())
    assert (len(left), left == model) == (len(model), True)
    return all(left[group_id] is phase and group_id in left for group_id, phase in model.items())


def index_of(left: Departed) -> dict[int, list[tuple[int, int]]]:
    """What the index should have, from the blocks."""
    found: dict[int, list[tuple[int, int]]] = {}
    for place in range(len(left._blocks)):
        for group_id in left._unpacked(place):
            bucket, mark = module._placed(group_id)
            found.setdefault(bucket, []).append((mark, (left._first + place) % (1 << 16)))
    return found


def is_indexed(left: Departed) -> bool:
    kept = {
        bucket: [(mark, number) for mark, number in struct.iter_unpack("<HH", entries)]
        for bucket, entries in left._index.items()
    }
    return kept == index_of(left)


class DepartedMachine(RuleBasedStateMachine):
    placed: Placed = staticmethod(module._placed)

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(module, "NEWEST_IDS", 4)
        self.patch.setattr(module, "BLOCK_IDS", 3)
        self.patch.setattr(module, "_placed", type(self).placed)
        self.left, self.model = Departed(), dict[str, Phase]()
        self.left._first = (1 << 16) - 2
        self.copies: list[tuple[Departed, dict[str, Phase]]] = []
        self.gone: list[str] = []
        self.number = 0

    def teardown(self) -> None:
        for copy, model in self.copies:
            assert same(copy, model)
        self.patch.undo()

    def new(self) -> str:
        self.number += 1
        return f"{'é' * (self.number % 3)}{self.number}"

    @rule(phase=st.sampled_from(PHASES), count=st.integers(1, 9))
    def add(self, phase: Phase, count: int) -> None:
        for _ in range(count):
            group_id = self.gone.pop(0) if self.gone and self.number % 2 else self.new()
            self.left.add(group_id, phase)
            self.model[group_id] = phase

    @rule(phases=st.lists(st.sampled_from(PHASES), max_size=30))
    def update(self, phases: list[Phase]) -> None:
        pairs = [(self.new(), phase) for phase in phases]
        self.left.update(pairs)
        self.model.update(pairs)

    @precondition(lambda self: self.model)
    @rule(count=st.integers(1, 8))
    def forget(self, count: int) -> None:
        for group_id in list(islice(self.model, count)):
            self.left.forget_oldest()
            del self.model[group_id]
            self.gone.append(group_id)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from([*self.model, "never"]), unique=True, max_size=5))
        self.left.remove(names)
        for name in names:
            if self.model.pop(name, None) is not None:
                self.gone.append(name)

    @rule()
    def copied(self) -> None:
        self.copies.append((self.left.copy(), dict(self.model)))

    @rule()
    def kept(self) -> None:
        self.left = through_bytes(self.left)

    @invariant()
    def is_the_dict(self) -> None:
        assert same(self.left, self.model)
        assert not any(name in self.left for name in ["", "0", "g", "never", *self.gone])
        assert is_indexed(self.left)
        assert len(self.left._newest) < 7


for name, placed in PLACES.items():
    machine = type("DepartedMachine", (DepartedMachine,), {"placed": staticmethod(placed)})
    machine.TestCase.settings = settings(deadline=None, max_examples=30, stateful_step_count=20)
    globals()[f"TestIds{name.title().replace(' ', '')}"] = machine.TestCase


@pytest.mark.parametrize("count", [0, 4, 6, 7, 9, 10, 30])
def test_it_is_what_a_dict_would_be(count: int) -> None:
    left, model = filled(count), dict(some(count))

    assert same(left, model)
    assert same(through_bytes(left), model)
    assert (len(left._newest), len(left._blocks)) == (
        (count, 0) if count < 7 else (4 + (count - 4) % 3, (count - 4) // 3)
    )


def test_what_is_not_there_is_said_as_a_dict_says_it() -> None:
    left = filled(20)

    assert (left.get("x"), left.get("x", "never"), left.get("g1", "never")) == (None, "never", Phase.COMMITTED)
    assert "x" not in left
    assert 7 not in left
    assert left != dict(some(19))
    with pytest.raises(KeyError, match="'x'"):
        left["x"]


def test_an_id_without_a_form_in_utf8_can_be_asked_for() -> None:
    left = filled(20)

    assert "\ud800" not in left
    assert left.get("\ud800") is None


def test_the_oldest_are_forgotten_in_order_and_blocks_with_them() -> None:
    left = filled(20)
    seen = []
    while left:
        seen.append((next(iter(left)), len(left._blocks)))
        left.forget_oldest()

    assert [group_id for group_id, _ in seen] == [f"g{number}" for number in range(20)]
    assert [blocks for _, blocks in seen] == [5] * 3 + [4] * 3 + [3] * 3 + [2] * 3 + [1] * 3 + [0] * 5
    assert left._index == {}


def test_an_id_that_was_forgotten_is_free_though_its_block_is_there() -> None:
    left = filled(20)
    left.forget_oldest()
    assert "g0" not in left
    assert same(through_bytes(left), dict(some(19, 1)))
    left.add("g0", Phase.EVICTED)

    assert list(left)[-1] == "g0"
    assert same(left, {**dict(some(19, 1)), "g0": Phase.EVICTED})


def test_groups_that_came_back_leave_no_hole() -> None:
    left = filled(20)
    left.remove(["g8", "g4", "g19", "x"])

    assert same(left, {name: phase for name, phase in some(20) if name not in {"g4", "g8", "g19"}})
    assert [block.count for block in left._blocks] == [3, 3, 3, 3]
    assert is_indexed(left)


def test_a_copy_goes_its_own_way() -> None:
    left = filled(20)
    left.forget_oldest()
    copy = left.copy()
    left.forget_oldest()
    left.update(some(9, 30))
    left.remove(["g5"])

    assert same(copy, dict(some(19, 1)))
    copy.forget_oldest()
    copy.add("x", Phase.EVICTED)
    assert same(left, {name: phase for name, phase in [*some(18, 2), *some(9, 30)] if name != "g5"})


def test_a_new_id_is_looked_for_in_no_block_and_one_that_left_in_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    left, unpacked = filled(3_000), list[int]()
    monkeypatch.setattr(left, "_unpacked", _watched(left._unpacked, unpacked.append))

    assert not any(f"new{number}" in left for number in range(3_000))
    assert len(unpacked) < 10
    unpacked.clear()
    assert all(f"g{number}" in left for number in range(3_000))
    assert 2_990 <= len(unpacked) < 3_010


def _watched(real: Callable[[int], Any], look: Callable[[int], None]) -> Callable[[int], Any]:
    def watched(place: int) -> Any:
        look(place)
        return real(place)

    return watched


def test_who_asks_again_about_one_that_left_long_ago_has_it_unpacked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    left, decoded_count = filled(30), 0
    real = zlib.decompress

    def counted(data: bytes) -> bytes:
        nonlocal decoded_count
        decoded_count += 1
        return real(data)

    monkeypatch.setattr(zlib, "decompress", counted)
    assert all([left["g1"] is Phase.COMMITTED, "g1" in left, "g2" in left])
    assert decoded_count == 1
    list(left.values())

    assert decoded_count == len(left._blocks)


# As a snapshot has them ------------------------------------------------------------------------------


def parts_of(left: Departed) -> list[tuple[int, bytes]]:
    book = Book()
    book.departed = left
    return list(encoded(capture(book)))


def test_few_ids_are_kept_as_they_were_in_version_1() -> None:
    parts = parts_of(filled(6))

    assert [kind for kind, _ in parts] == [STATE, LEFT]
    assert msgspec.msgpack.decode(parts[0][1])["version"] == 1
    assert msgspec.msgpack.decode(parts[1][1]) == [[f"g{number}" for number in range(6)], bytes([5, 6] * 3)]


def test_ids_as_version_1_kept_them_are_read_and_packed() -> None:
    ids = [f"g{number}" for number in range(50)]
    phases = bytes(5 + number % 2 for number in range(50))
    lists = [(LEFT, msgspec.msgpack.encode([ids[at : at + 20], phases[at : at + 20]])) for at in (0, 20, 40)]
    left = decoded(iter([parts_of(Departed())[0], *lists])).departed

    assert same(left, dict(some(50)))
    assert (len(left._blocks), is_indexed(left)) == (15, True)


GOLDEN = {
    BLOCKS: (
        "92cdffff939202c41478019b346951bae1a274a3234c6cac00239e046b9203c41878019b347951baf1a2749345e9a64798d958d9003c3905"
        "b59203c41878019b347951bad9a274f345e916479859d958013c8805bd"
    ),
    INDEX: (
        "88cd0eaec404a5efffffcd28ecc4041fbeffffcd352dc404898e0000cd12b4c4042a1b0000cd0f75c404bc2b0000cd2937c404067a0100"
        "cd34f6c404904a0100cd10d9c40401570100"
    ),
    LEFT: "9294a26739a3673130a3673131a3673132c40406050605",
}
"""Ids g1 to g12, those up to g8 packed: the numbers of their blocks pass the highest there is."""


def test_packed_ids_are_read_for_ever_as_they_were_written() -> None:
    parts = [parts_of(Departed())[0], *((kind, bytes.fromhex(data)) for kind, data in GOLDEN.items())]
    left = decoded(iter(parts)).departed

    assert same(left, dict(some(12, 1)))
    assert (left._first, len(left._blocks), is_indexed(left)) == ((1 << 16) - 1, 3, True)


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ([BLOCKS, LEFT], "the index of the groups that have left isn't theirs"),
        ([INDEX, LEFT], "the index of the groups that have left isn't theirs"),
        ([LEFT, BLOCKS, INDEX], "ids of groups that have left aren't in order"),
        ([BLOCKS, BLOCKS, INDEX], "ids of groups that have left aren't in order"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(parts: list[int], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        decoded(iter([parts_of(Departed())[0], *((kind, bytes.fromhex(GOLDEN[kind])) for kind in parts)]))


@pytest.mark.parametrize("phases", [b"\5\6\7", b"\5\5\xff"])
def test_a_phase_that_is_not_known_is_refused(phases: bytes) -> None:
    left = msgspec.msgpack.encode(Left(["a", "b", "c"], phases))

    with pytest.raises(ValueError, match=f"a group left in phase {phases[-1]}, which isn't known"):
        decoded(iter([parts_of(Departed())[0], (LEFT, left)]))


@pytest.mark.parametrize("phases", [b"", b"\5\6", b"\5\6\5\6"])
def test_ids_that_have_not_a_phase_each_are_refused(phases: bytes) -> None:
    left = msgspec.msgpack.encode(Left(["a", "b", "c"], phases))

    with pytest.raises(ValueError, match=r"zip\(\) argument 2 is (shorter|longer) than argument 1"):
        decoded(iter([parts_of(Departed())[0], (LEFT, left)]))


def test_packed_ids_are_kept_in_parts_of_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("groupstate.core.snapshot.BLOCKS_PER_PART", 4)
    monkeypatch.setattr("groupstate.core.snapshot.BUCKETS_PER_PART", 10)
    left = filled(40)
    left._first = 0
    parts = parts_of(left)
    blocks = [msgspec.msgpack.decode(data, type=Blocks) for kind, data in parts if kind == BLOCKS]
    buckets = [len(msgspec.msgpack.decode(data, type=dict[int, bytes])) for kind, data in parts if kind == INDEX]

    assert msgspec.msgpack.decode(parts[0][1])["version"] == 2
    assert [(some.first, len(some.blocks)) for some in blocks] == [(0, 4), (4, 4), (8, 4)]
    assert (sum(buckets), max(buckets)) == (len(left._index), 10)
    assert [kind for kind, _ in parts] == [STATE, *[BLOCKS] * 3, *[INDEX] * len(buckets), LEFT]
    assert same(decoded(iter(parts)).departed, dict(some(40)))


def test_one_that_is_for_looking_has_none_and_can_be_read_by_version_1() -> None:
    book = Book()
    book.departed = filled(40)
    parts = list(encoded(capture_live(book)))

    assert [kind for kind, _ in parts] == [STATE]
    assert msgspec.msgpack.decode(parts[0][1])["version"] == 1
