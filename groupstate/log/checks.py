"""What every log checks alike, wherever it keeps its bytes."""

import zlib
from collections.abc import Sequence

from groupstate.core.events import PayloadRef, Record
from groupstate.errors import DamagedPayload


def check_numbers(records: Sequence[Record], last_seq: int) -> None:
    """Our own ledger numbers the records, so a wrong number is a fault of the program."""
    if len(records) == 1 and records[0].seq == last_seq + 1:
        return  # as nearly always
    for expected, record in enumerate(records, last_seq + 1):
        assert record.seq == expected, f"record {record.seq} was posted where {expected} is next"


def check_payload(ref: PayloadRef, data: bytes, where: str) -> bytes:
    """`data`, if those are the bytes that `ref` means.

    Raises:
        DamagedPayload: they are not.
    """
    if len(data) != ref.length or zlib.crc32(data) != ref.crc:
        raise DamagedPayload(
            f"payload {ref.key} in {where} isn't what its event says: {len(data)} bytes with checksum "
            f"{zlib.crc32(data):08x}, where {ref.length} with {ref.crc:08x} were put"
        )
    return data
