"""How much of each payload file is needed: which files go, and which are rewritten into a newer one.

Rule 1: bytes are freed when nothing can need them any more, that is, when what freed them is durable.
Rule 2: the newest file is neither removed nor rewritten: it is what the others are rewritten into.
Rule 3: a file other than the newest is rewritten once less than half of it is needed. So what is copied is never
more than what was freed, and once nothing is left to be rewritten, all files together are at most twice as long as
what is needed, and the newest one.
"""

from collections.abc import Iterable

import attrs

from groupstate.log.payload_files import FILE_HEADER_BYTES, Place


@attrs.frozen
class PayloadUsage:
    """What the payload files of a run take up on the disk, in bytes."""

    live_bytes: int
    """Payloads that are needed, with their headers."""
    freed_bytes: int
    """The rest: payloads that were freed and whose space isn't reclaimed yet, damage, headers of files."""
    files: int

    @property
    def disk_bytes(self) -> int:
        return self.live_bytes + self.freed_bytes


@attrs.define
class _File:
    size: int
    needed_bytes: int = 0
    keys: set[int] = attrs.field(factory=set)
    """Payloads that are needed and lie here."""
    fixed: bool = False
    """Not to be rewritten: it can't be read."""


class Space:
    """The books of the payload files."""

    def __init__(self) -> None:
        self._files: dict[int, _File] = {}
        self._places: dict[int, Place] = {}

    @property
    def keys(self) -> Iterable[int]:
        return self._places.keys()

    def place(self, key: int) -> Place | None:
        return self._places.get(key)

    def add_file(self, file: int, size: int) -> None:
        self._files[file] = _File(size)

    def add(self, place: Place) -> None:
        """A record that was written; one that lay elsewhere is needed there no more."""
        key = place.key
        if key in self._places:
            self.remove(key)
        file = self._files.get(place.file)
        if file is None:
            file = self._files[place.file] = _File(0)
        size = place.size
        file.size = max(file.size, place.offset + size)
        file.needed_bytes += size
        file.keys.add(key)
        self._places[key] = place

    def remove(self, key: int) -> None:
        place = self._places.pop(key, None)
        if place is not None:
            file = self._files[place.file]
            file.needed_bytes -= place.size
            file.keys.remove(key)

    def remove_file(self, file: int) -> list[int]:
        """Forget a file; returns the keys of what was still needed of it."""
        keys = sorted(self._files[file].keys)
        for key in keys:
            self.remove(key)
        del self._files[file]
        return keys

    def fix(self, file: int) -> None:
        """Rewrite this file no more."""
        self._files[file].fixed = True

    def empty(self, *spared: int) -> list[int]:
        """Files of which nothing is needed."""
        return [number for number, file in self._files.items() if not file.keys and number not in spared]

    def to_rewrite(self, newest: int) -> int | None:
        """The file that is worth it most: of which the least is needed."""
        worth = [
            (file.needed_bytes, number)
            for number, file in self._files.items()
            if number != newest and not file.fixed and file.keys
            # Without the header, which a copy would have again.
            if 2 * file.needed_bytes < file.size - FILE_HEADER_BYTES
        ]
        return min(worth)[1] if worth else None

    def places_in(self, file: int) -> list[Place]:
        """What is needed of a file, from its beginning to its end."""
        return sorted((self._places[key] for key in self._files[file].keys), key=lambda place: place.offset)

    def usage(self, freed: Iterable[int]) -> PayloadUsage:
        """
        Args:
            freed: payloads that count as freed already.
        """
        places = [place for key in freed if (place := self._places.get(key)) is not None]
        needed = sum(file.needed_bytes for file in self._files.values())
        needed -= sum(place.size for place in places)
        total = sum(file.size for file in self._files.values())
        return PayloadUsage(needed, total - needed, len(self._files))
