"""What every event log and payload store promises, held against those that are here; and how they word it."""

import pytest
import pytest_asyncio

from groupstate.core.events import EVENT_TYPES, PayloadRef, Record, RunStarted
from groupstate.errors import DamagedPayload, LogError, LogFailed
from groupstate.log.file import FileLog
from groupstate.log.memory import MemoryLog
from groupstate.testing.contracts import LogContract, PayloadStoreContract

from .scenes import close, submitted, weights

KINDS = ["memory", "file", "file inline"]


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest_asyncio.fixture
async def log(kind, tmp_path):
    made = MemoryLog() if kind == "memory" else FileLog.create(tmp_path / "run", inline="inline" in kind)
    yield made
    await close(made)


class TestLogs(LogContract):
    @pytest.fixture(autouse=True)
    def _path(self, kind, tmp_path):
        self.inline = None if kind == "memory" else "inline" in kind
        self.path = tmp_path / "run"

    async def reopened(self, log):
        if self.inline is None:
            return await super().reopened(log)
        await log.aclose()
        return FileLog.open(self.path, inline=self.inline)


class TestPayloadStores(PayloadStoreContract):
    @pytest.fixture
    def store(self, log):
        self.log = log
        return log.payloads

    async def keep(self, store, refs):
        self.log.post([submitted(self.log.last_seq + 1 + at, ref) for at, ref in enumerate(refs)])
        await self.log.durable(self.log.last_seq)


async def test_every_kind_of_event_is_told_apart():
    tags = [kind.__struct_config__.tag for kind in EVENT_TYPES]

    assert len(set(tags)) == len(tags)


# Wording ---------------------------------------------------------------------------------------------


async def test_a_log_says_what_it_is(log):
    log.post(weights(1))
    await log.aclose()

    assert "events=1" in repr(log)
    assert "closed" in repr(log)


async def test_a_refusal_names_the_kinds_of_events(log):
    with pytest.raises(LogError, match="a post of GroupSubmitted, WeightsPublished could not be read back"):
        log.post([*weights(1), submitted(2, "not a reference")])
    with pytest.raises(LogError, match="a post of RunStarted could not be read back"):
        log.post([Record(1, 1, RunStarted("run", {"key": object()}, 1, 0))])


async def test_a_wrong_number_is_named(log):
    with pytest.raises(AssertionError, match="record 2 was posted where 1 is next"):
        log.post(weights(2))


async def test_a_closed_log_says_so(log):
    await log.aclose()
    with pytest.raises(LogFailed, match="closed"):
        log.post(weights(1))
    with pytest.raises(LogFailed, match="closed"):
        await log.durable(2)


@pytest.mark.parametrize("written", [False, True])
async def test_a_payload_that_is_gone_or_another_is_told_apart(log, written):
    ref = log.payloads.put(b"tokens")
    if written:
        log.post([submitted(1, ref)])
        await log.durable(1)
    with pytest.raises(DamagedPayload, match="isn't what its event says"):
        log.payloads.get(PayloadRef(ref.key, ref.length, ref.crc ^ 1))
    with pytest.raises(DamagedPayload, match="is not in"):
        log.payloads.get(PayloadRef(ref.key + 1, ref.length, ref.crc))
    log.payloads.free([ref])

    with pytest.raises(DamagedPayload, match=r"payload 1 is not in .*: it was freed"):
        log.payloads.get(ref)
