"""What every payload store promises.

class TestMine(PayloadStoreContract):
    @pytest.fixture
    def store(self):
        return MyStore(...)

    async def keep(self, store, refs):
        ...          # whatever makes durable what was put; an event that names it does, in a log
"""

import zlib
from collections.abc import Sequence

import pytest

from groupstate.core.events import PayloadRef
from groupstate.errors import DamagedPayload
from groupstate.log.port import PayloadStore
from groupstate.testing.contracts.base import Contract


class PayloadStoreContract(Contract):
    """The tests of a payload store. A subclass, or its module, has a fixture `store` that gives a new one."""

    async def keep(self, store: PayloadStore, refs: Sequence[PayloadRef]) -> None:
        """Make what was put durable, and wait for it. Nothing to do where a store keeps what it is given."""

    async def test_a_payload_can_be_read_before_and_after_it_is_written(self, store: PayloadStore) -> None:
        ref = store.put(b"tokens")
        assert store.get(ref) == b"tokens"
        await self.keep(store, [ref])

        assert store.get(ref) == b"tokens"
        assert (ref.key, ref.length, ref.crc) == (1, 6, zlib.crc32(b"tokens"))

    async def test_an_empty_payload_is_a_payload(self, store: PayloadStore) -> None:
        ref = store.put(b"")
        await self.keep(store, [ref])

        assert store.get(ref) == b""

    async def test_a_payload_is_copied_when_it_is_put(self, store: PayloadStore) -> None:
        data = bytearray(b"tokens")
        ref = store.put(data)  # type: ignore[arg-type]
        data[:] = b"changed"

        assert store.get(ref) == b"tokens"

    @pytest.mark.parametrize("written", [False, True])
    async def test_a_freed_payload_is_gone(self, store: PayloadStore, written: bool) -> None:
        ref, other = store.put(b"tokens"), store.put(b"others")
        if written:
            await self.keep(store, [ref])
        store.free([ref, PayloadRef(99, 1, 1)])
        store.free([ref])
        with pytest.raises(DamagedPayload, match=f"payload {ref.key} "):
            store.get(ref)

        assert store.get(other) == b"others"

    @pytest.mark.parametrize("written", [False, True])
    async def test_a_reference_that_does_not_fit_is_refused(self, store: PayloadStore, written: bool) -> None:
        ref = store.put(b"tokens")
        if written:
            await self.keep(store, [ref])
        for wrong in (PayloadRef(ref.key, ref.length + 1, ref.crc), PayloadRef(ref.key, ref.length, ref.crc ^ 1)):
            with pytest.raises(DamagedPayload, match=f"payload {ref.key} "):
                store.get(wrong)
        with pytest.raises(DamagedPayload, match=f"payload {ref.key + 1} "):
            store.get(PayloadRef(ref.key + 1, ref.length, ref.crc))

    async def test_keeping_some_payloads_frees_the_rest(self, store: PayloadStore) -> None:
        refs = [store.put(bytes([number])) for number in range(5)]
        await self.keep(store, [refs[0]])
        store.free([refs[0]])

        assert store.keep_only({refs[1].key, refs[3].key}) == 2
        assert store.get(refs[3]) == b"\3"
        with pytest.raises(DamagedPayload):
            store.get(refs[2])

    async def test_keys_are_given_in_order_and_never_twice(self, store: PayloadStore) -> None:
        refs = [store.put(b"tokens") for _ in range(3)]
        store.free(refs[2:])

        assert [ref.key for ref in [*refs, store.put(b"tokens")]] == [1, 2, 3, 4]

    async def test_what_needs_no_disk_can_be_read_at_once(self, store: PayloadStore) -> None:
        ref = store.put(b"tokens")

        assert store.in_memory(ref) or store.blocks
        assert store.get(ref) == b"tokens"
