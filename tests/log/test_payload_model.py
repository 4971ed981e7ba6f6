"""The payload store against a dictionary; and the space that it takes up over a long run."""

import math
import random
import zlib

import attrs
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from groupstate.core.events import PayloadRef
from groupstate.errors import DamagedPayload
from groupstate.log.file import FileLog
from groupstate.log.payloads import SLICES_PER_FILE
from groupstate.simulate.faults import FaultyDisk

from .churn import Churn, check_bound, put, settle
from .scenes import RUN, make, reopen, weights

FILE_BYTES = 500


def ended(log):
    """Close an inline log from outside of an event loop."""
    try:
        log.aclose().send(None)
    except StopIteration:
        pass


class Payloads(RuleBasedStateMachine):
    """Each put and each freeing has an event, so that a crash takes both back or none."""

    @initialize(durability=st.sampled_from(["fsync", "os"]))
    def begin(self, durability):
        self.durability = durability
        self.disk = FaultyDisk()
        self.log = make(self.disk, payload_file_bytes=FILE_BYTES, durability=durability)
        self.model: dict[PayloadRef, bytes] = {}
        self.gone: list[PayloadRef] = []

    @rule(count=st.integers(1, 3), size=st.sampled_from([0, 1, 30, 60, 200, 700]), fill=st.integers(0, 255))
    def puts(self, count, size, fill):
        churn = Churn()
        for number in range(count):
            put(self.log, churn, bytes([(fill + number) % 256]) * size)
        self.model.update((kept.ref, kept.body) for kept in churn.payloads)

    @rule(fill=st.integers(0, 255))
    def puts_without_an_event(self, fill):
        self.gone.append(self.log.payloads.put(bytes([fill]) * 40))

    @precondition(lambda self: self.model)
    @rule(data=st.data(), share=st.sampled_from([0.1, 0.5, 0.9]))
    def frees(self, data, share):
        chance = data.draw(st.randoms(use_true_random=False))
        chosen = [ref for ref in self.model if chance.random() < share]
        self.log.post(weights(self.log.last_seq + 1))
        self.log.payloads.free(chosen)
        for ref in chosen:
            del self.model[ref]
        self.gone += chosen

    @rule(how=st.sampled_from(["closed", "killed", "power"]), data=st.data())
    def reopens(self, how, data):
        if how == "closed":
            ended(self.log)
        elif how == "killed" or self.durability == "os":
            self.disk = self.disk.copy()
        else:
            self.disk = self.disk.crash(chance=data.draw(st.randoms(use_true_random=False)))
        self.log = reopen(self.disk, payload_file_bytes=FILE_BYTES, durability=self.durability)
        assert self.log.payloads.usage().disk_bytes == sum(
            len(self.disk.read(f"{self.log.path}/payloads/{name}"))
            for name in self.disk.listdir(f"{self.log.path}/payloads")
        )
        self.log.payloads.keep_only({ref.key for ref in self.model})
        # Keys that no event names are given again.
        self.gone = [ref for ref in self.gone if ref.key not in {kept.key for kept in self.model}]

    @rule()
    def settles(self):
        settle(self.log)
        check_bound(self.log, self.disk)

    @rule(from_disk=st.booleans())
    def reads(self, from_disk):
        if from_disk:
            self.log.payloads._recent.clear()
        for ref, body in self.model.items():
            assert self.log.payloads.get(ref) == body

    @invariant()
    def what_is_live_is_what_is_kept(self):
        store = self.log.payloads
        written = [ref for ref in self.model if store._space.place(ref.key) is not None]
        assert len(written) == len(self.model)
        assert all(self.log.payloads.in_memory(ref) or zlib.crc32(self.model[ref]) == ref.crc for ref in written)


class Gone(Payloads):
    """Also what was freed is asked for."""

    @rule()
    def asks_for_what_is_gone(self):
        for ref in self.gone[-5:]:
            if ref.key in self.log.payloads._unwritten:
                continue
            try:
                data = self.log.payloads.get(ref)
            except DamagedPayload:
                continue
            assert zlib.crc32(data) == ref.crc


TestPayloads = Gone.TestCase
TestPayloads.settings = settings(stateful_step_count=40)


# Space ----------------------------------------------------------------------------------------------------

LONG_FILE_BYTES = 64_000


@attrs.define
class LongRun:
    """Thousands of groups of mixed sizes; most are trained on soon, some are evicted at once, a few kept for long.

    Each step is a commit with a group's payloads, and one in which what ends with it is freed. A group takes up a tenth
    of a file, so the writer has less time for each byte than in a real run.
    """

    chance: random.Random
    disk: FaultyDisk = attrs.field(factory=FaultyDisk)
    log: FileLog = attrs.field(init=False)
    ends: dict[int, list[tuple[PayloadRef, bytes]]] = attrs.field(factory=dict)
    """What is freed at which step."""
    worst: float = 0.0
    """Most files' worth of bytes above twice what was needed."""
    put_bytes: int = 0

    def __attrs_post_init__(self):
        self.log = make(self.disk, payload_file_bytes=LONG_FILE_BYTES)

    def step(self, now):
        bodies = [self.chance.randbytes(min(20_000, int(self.chance.lognormvariate(6.5, 1)))) for _ in range(5)]
        group = [(self.log.payloads.put(body), body) for body in bodies]
        self.put_bytes += sum(map(len, bodies))
        life = self.chance.choice([1, 5, 20, 20, 50, 300, 2_000])
        self.ends.setdefault(now + self.chance.randrange(1, life + 1), []).extend(group)
        self.log.post(weights(self.log.last_seq + 1))
        self.log.payloads.free([ref for ref, _ in self.ends.pop(now, [])])

    def free_nearly_all(self):
        """As when weights are published and all that waits is stale."""
        stale = [at for at in self.ends if self.chance.random() < 0.95]
        self.log.payloads.free([ref for at in stale for ref, _ in self.ends.pop(at)])

    def commits_until_bound(self):
        for commit in range(1000):
            if self.excess() <= 2:
                return commit
            self.log.post(weights(self.log.last_seq + 1))
        raise AssertionError("the bound is never reached")

    def lose_power(self):
        self.log.payloads.put(b"an orphan" * 50)
        self.disk = self.disk.crash(chance=self.chance)
        self.log = reopen(self.disk, payload_file_bytes=LONG_FILE_BYTES)
        self.log.payloads.keep_only({ref.key for group in self.ends.values() for ref, _ in group})

    def excess(self):
        usage = self.log.payloads.usage()
        return (usage.disk_bytes - 2 * usage.live_bytes) / LONG_FILE_BYTES

    def check(self):
        usage = self.log.payloads.usage()
        sizes = [len(self.disk.read(f"{RUN}/payloads/{name}")) for name in self.disk.listdir(f"{RUN}/payloads")]
        assert (usage.disk_bytes, usage.files) == (sum(sizes), len(sizes))
        assert max(sizes) <= LONG_FILE_BYTES
        for group in self.ends.values():
            for ref, body in group[:1]:
                assert self.log.payloads.get(ref) == body


@pytest.mark.slow
def test_the_files_of_a_long_run_take_twice_what_is_needed_and_two_files():
    run = LongRun(random.Random(1))
    for now in range(4000):
        run.step(now)
        run.worst = max(run.worst, run.excess())
        if now % 500 == 250:
            run.check()
        if now % 1500 == 1000:
            run.lose_power()

    assert run.worst < 2
    assert len(run.disk.listdir(f"{RUN}/payloads")) > 10
    assert run.put_bytes > 300 * LONG_FILE_BYTES
    ended(run.log)


@pytest.mark.parametrize("seed", range(3))
def test_after_a_great_freeing_a_commit_for_each_slice_of_a_file_reaches_the_bound(seed):
    run = LongRun(random.Random(seed))
    for now in range(1500):
        run.step(now)
    run.free_nearly_all()
    space, newest = run.log.payloads._space, run.log._payload_writer.file
    slice_bytes = LONG_FILE_BYTES / SLICES_PER_FILE
    slices = sum(math.ceil(2 * file.needed_bytes / slice_bytes) for at, file in space._files.items() if at != newest)
    assert run.excess() > 3

    assert run.commits_until_bound() <= slices
    run.check()
    ended(run.log)
