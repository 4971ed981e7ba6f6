"""The groups that have left a book: their ids, each with the phase in which it left, in the order in which they did.

The newest are in a dict. The others are packed in blocks, which a snapshot takes as they are and gives back as they
are: so it costs no more to open a run that a million groups have left, and an id takes some ten bytes instead of 130.
An index tells in which blocks an id may be, by its checksum; the block itself then says whether it is.

Rule 1: an answer comes from the ids themselves, never from a checksum alone.
Rule 2: adding, forgetting and looking up cost the same however many there are. A question about an id that never left
unpacks a block about once in a thousand times, one about an id that left long ago always.
Rule 3: a block that was packed is never changed, and neither are the parts of the index, so a copy shares them.
"""

import zlib
from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from itertools import islice
from typing import Final, TypeVar, overload

import msgspec

from groupstate.core.phases import Phase

T = TypeVar("T")

NEWEST_IDS = 4_000
"""Ids that stay in the dict: late results are of groups that left not long ago, and are looked up at once."""

BLOCK_IDS = 1_000
"""Ids in a block: packing one takes about a millisecond, unpacking it a fifth of that."""

_BLOCKS_MAX: Final = 1 << 16
"""The index counts blocks up to here, and begins again."""

_BUCKET_SHIFT: Final = 18
"""A bucket of the index has the ids that agree in the upper 14 bits of their checksums."""

_ENTRY_BYTES: Final = 4
"""In a bucket, for each of its ids: the lower half of the checksum, and the number of its block, 16 bits each."""

_PHASES: Final = tuple(Phase)
_NUMBERS: Final = {phase: number for number, phase in enumerate(_PHASES)}


class Left(msgspec.Struct, array_like=True):
    """Ids of groups that have left."""

    ids: list[str]
    phases: bytes
    """One byte for each id: the place of its last phase in `Phase`."""

    def pairs(self) -> Iterator[tuple[str, Phase]]:
        """
        Raises:
            ValueError: there are more of one than of the other, or one is of no phase.
        """
        if self.phases and max(self.phases) >= len(_PHASES):
            raise ValueError(f"a group left in phase {max(self.phases)}, which isn't known")
        return zip(self.ids, map(_PHASES.__getitem__, self.phases), strict=True)


class Block(msgspec.Struct, array_like=True, frozen=True):
    """Some of them in the order in which they left, packed."""

    count: int
    packed: bytes
    """`Left` as msgpack, packed by zlib."""


class Blocks(msgspec.Struct, array_like=True):
    """Blocks, one behind the other."""

    first: int
    """The number of the first; the next one's is higher by one."""
    blocks: list[Block]


_ENCODER = msgspec.msgpack.Encoder()
_LEFT = msgspec.msgpack.Decoder(Left)


class Departed(Mapping[str, Phase]):
    def __init__(self) -> None:
        self._newest: dict[str, Phase] = {}
        self._blocks: list[Block] = []
        """The older ones, oldest first."""
        self._first = 0
        """The number of the first block."""
        self._oldest: dict[str, Phase] | None = None
        """What is left of the first block, from when the first of its ids was forgotten."""
        self._packed_count = 0
        self._index: dict[int, bytes] = {}
        """By bucket an entry for each id in a block, oldest first."""
        self._looked_at: tuple[Block | None, dict[str, Phase]] = (None, {})
        """The block that was unpacked last: who asks for an id once asks again."""

    # Reading -----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._packed_count + len(self._newest)

    def __iter__(self) -> Iterator[str]:
        return (group_id for group_id, _ in self.pairs())

    def __contains__(self, group_id: object) -> bool:
        return group_id in self._newest or (isinstance(group_id, str) and self._found(group_id) is not None)

    def __getitem__(self, group_id: str) -> Phase:
        phase = self.get(group_id)
        if phase is None:
            raise KeyError(group_id)
        return phase

    @overload
    def get(self, group_id: str, /) -> Phase | None: ...

    @overload
    def get(self, group_id: str, /, default: Phase | T) -> Phase | T: ...

    def get(self, group_id: str, /, default: T | None = None) -> Phase | T | None:
        phase = self._newest.get(group_id)
        if phase is not None:
            return phase
        found = self._found(group_id)
        return default if found is None else found[1]

    def items(self) -> ItemsView[str, Phase]:
        return _Pairs(self)

    def values(self) -> ValuesView[Phase]:
        return _Phases(self)

    def pairs(self) -> Iterator[tuple[str, Phase]]:
        """All of them, in order."""
        for place in range(len(self._blocks)):
            yield from self._unpacked(place).items()
        yield from self._newest.items()

    def copy(self) -> "Departed":
        """Another one. Costs some hundred microseconds at a million."""
        made = Departed()
        made._newest = self._newest.copy()
        made._blocks = self._blocks.copy()
        made._first = self._first
        made._oldest = None if self._oldest is None else self._oldest.copy()
        made._packed_count = self._packed_count
        made._index = self._index.copy()
        return made

    # Writing -----------------------------------------------------------------------------------------

    def add(self, group_id: str, phase: Phase) -> None:
        """A group that isn't there has left."""
        self._newest[group_id] = phase
        if len(self._newest) >= NEWEST_IDS + BLOCK_IDS:
            self._pack()

    def update(self, pairs: Iterable[tuple[str, Phase]]) -> None:
        """Several, in order."""
        self._newest.update(pairs)
        self._pack()

    def forget_oldest(self) -> None:
        """Forget the one that left first."""
        if not self._blocks:
            del self._newest[next(iter(self._newest))]
            return
        if self._oldest is None:
            self._oldest = self._unpacked(0)
            self._looked_at = (None, {})
        group_id = next(iter(self._oldest))
        del self._oldest[group_id]
        self._unlist(group_id, self._first)
        if not self._oldest:
            self._oldest = None
            del self._blocks[0]
            self._first = (self._first + 1) % _BLOCKS_MAX

    def remove(self, group_ids: Iterable[str]) -> None:
        """Groups have come back; those that aren't there are passed over. Costs what left since the first of them."""
        packed = [group_id for group_id in group_ids if self._newest.pop(group_id, None) is None]
        places = [found[0] for found in map(self._found, packed) if found is not None]
        if places:
            self._unpack_from(min(places))
            for group_id in packed:
                self._newest.pop(group_id, None)
            self._pack()

    # Into a snapshot, and out of it ------------------------------------------------------------------

    def newest(self) -> Left:
        """Those that are in no block."""
        return _left(self._newest.items())

    def packed(self) -> Blocks:
        """The others."""
        blocks = self._blocks.copy()
        if self._oldest is not None:
            blocks[0] = _block(self._oldest.items())
        return Blocks(self._first, blocks)

    def index(self) -> dict[int, bytes]:
        """The index over these, as it is kept."""
        return self._index

    def take_blocks(self, some: Blocks) -> None:
        """The next ones of those that were packed.

        Raises:
            ValueError: they aren't.
        """
        if not self._blocks:
            self._first = some.first % _BLOCKS_MAX
        if some.first != (self._first + len(self._blocks)) % _BLOCKS_MAX or self._newest:
            raise ValueError("ids of groups that have left aren't in order")
        self._blocks += some.blocks
        self._packed_count += sum([block.count for block in some.blocks])

    def take_index(self, some: dict[int, bytes]) -> None:
        """A part of the index over them."""
        self._index |= some

    def check(self) -> None:
        """After all was taken.

        Raises:
            ValueError: blocks and index aren't of each other.
        """
        if sum(map(len, self._index.values())) != self._packed_count * _ENTRY_BYTES:
            raise ValueError("the index of the groups that have left isn't theirs")

    # Blocks ------------------------------------------------------------------------------------------

    def _found(self, group_id: str) -> tuple[int, Phase] | None:
        """The place of the block that has an id, and the phase."""
        if not self._index:
            return None
        bucket, number = _placed(group_id)
        entries, mark = self._index.get(bucket, b""), number.to_bytes(2, "little")
        at = _entry_at(entries, mark)
        while at >= 0:
            place = (int.from_bytes(entries[at + 2 : at + _ENTRY_BYTES], "little") - self._first) % _BLOCKS_MAX
            phase = self._unpacked(place).get(group_id)
            if phase is not None:
                return place, phase
            at = _entry_at(entries, mark, at + 1)
        return None

    def _unpacked(self, place: int) -> dict[str, Phase]:
        if place == 0 and self._oldest is not None:
            return self._oldest
        block = self._blocks[place]
        if self._looked_at[0] is not block:
            self._looked_at = (block, dict(_LEFT.decode(zlib.decompress(block.packed)).pairs()))
        return self._looked_at[1]

    def _pack(self) -> None:
        """Put what is too much for the dict into blocks."""
        count = (len(self._newest) - NEWEST_IDS) // BLOCK_IDS
        if count <= 0:
            return
        pairs = list(self._newest.items())
        self._newest = dict(pairs[count * BLOCK_IDS :])
        for start in range(0, count * BLOCK_IDS, BLOCK_IDS):
            self._append(pairs[start : start + BLOCK_IDS])

    def _append(self, pairs: Sequence[tuple[str, Phase]]) -> None:
        assert len(self._blocks) < _BLOCKS_MAX, "more ids than a book keeps"
        number = (self._first + len(self._blocks)) % _BLOCKS_MAX
        index = self._index
        for group_id, _ in pairs:
            bucket, mark = _placed(group_id)
            index[bucket] = index.get(bucket, b"") + _entry(mark, number)
        self._blocks.append(_block(pairs))
        self._packed_count += len(pairs)

    def _unpack_from(self, place: int) -> None:
        """Put the blocks from one on back into the dict."""
        found: dict[str, Phase] = {}
        for at in range(place, len(self._blocks)):
            some = self._unpacked(at)
            for group_id in some:
                self._unlist(group_id, (self._first + at) % _BLOCKS_MAX)
            found |= some
        del self._blocks[place:]
        if place == 0:
            self._oldest = None
        self._newest = found | self._newest

    def _unlist(self, group_id: str, number: int) -> None:
        """Take an id of a block out of the index."""
        bucket, mark = _placed(group_id)
        entries = self._index[bucket]
        at = _entry_at(entries, _entry(mark, number))
        assert at >= 0, f"{group_id!r} is in a block, and not in the index"
        rest = entries[:at] + entries[at + _ENTRY_BYTES :]
        if rest:
            self._index[bucket] = rest
        else:
            del self._index[bucket]
        self._packed_count -= 1


class _Pairs(ItemsView[str, Phase]):
    """In one pass over the blocks; one id at a time would look each of them up."""

    _mapping: Departed

    def __iter__(self) -> Iterator[tuple[str, Phase]]:
        return self._mapping.pairs()


class _Phases(ValuesView[Phase]):
    _mapping: Departed

    def __iter__(self) -> Iterator[Phase]:
        return (phase for _, phase in self._mapping.pairs())


def _placed(group_id: str) -> tuple[int, int]:
    """The bucket of an id, and its mark there."""
    # An id of a log has a UTF-8 form; one that somebody asks for may have none, and then isn't there.
    checksum = zlib.crc32(group_id.encode("utf-8", "surrogatepass"))
    return checksum >> _BUCKET_SHIFT, checksum & 0xFFFF


def _entry(mark: int, number: int) -> bytes:
    return (mark | number << 16).to_bytes(_ENTRY_BYTES, "little")


def _entry_at(entries: bytes, begins: bytes, start: int = 0) -> int:
    """Where the first entry from `start` on is that begins so; -1 if none does."""
    at = entries.find(begins, start)
    while at >= 0 and at % _ENTRY_BYTES:
        at = entries.find(begins, at + 1)
    return at


def _left(pairs: Iterable[tuple[str, Phase]]) -> Left:
    ids, phases = [], bytearray()
    for group_id, phase in pairs:
        ids.append(group_id)
        phases.append(_NUMBERS[phase])
    return Left(ids, bytes(phases))


def _block(pairs: Iterable[tuple[str, Phase]]) -> Block:
    left = _left(pairs)
    return Block(len(left.ids), zlib.compress(_ENCODER.encode(left), 1))


def parts_of(blocks: Blocks, size: int) -> Iterator[Blocks]:
    """The same, at most so many at a time."""
    for start in range(0, len(blocks.blocks), size):
        yield Blocks((blocks.first + start) % _BLOCKS_MAX, blocks.blocks[start : start + size])


def index_parts(index: Mapping[int, bytes], size: int) -> Iterator[dict[int, bytes]]:
    """An index, at most so many buckets at a time."""
    buckets = iter(index.items())
    while some := dict(islice(buckets, size)):
        yield some
