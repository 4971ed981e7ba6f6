"""Crashes and recoveries in any order, beside a plain dictionary of what each group is.

Every operation may meet a disk that fails in the middle of it, followed by a kill or a loss of power. After that the
run is as it was before the operation, or as after it: nothing between, and nothing else.
"""

import asyncio
import copy
from contextlib import suppress

import attrs
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from groupstate import CheckpointMark, Trajectory, open_run
from groupstate.errors import LogError, LogFailed
from groupstate.log.file import FileLog
from groupstate.simulate.faults import Fault, FaultyDisk
from groupstate.simulate.loop import VirtualLoop

pytestmark = pytest.mark.slow

RUN = "/runs/one"
OPERATIONS = ("submit", "start", "finish", "publish", "sample", "commit", "release", "mark")
NOW_NS = 1_700_000_000_000_000_000
LOG_ID = "0123456789abcdef0123456789abcdef"
"""The same in every example, or files would have another length each time."""
SMALL = {"segment_bytes": 700, "payload_file_bytes": 700, "inline": True, "now_ns": lambda: NOW_NS}


@attrs.define
class Model:
    groups: dict[str, str] = attrs.Factory(dict)
    """pending, running, finished, sampled or committed."""
    batches: dict[int, list[str]] = attrs.Factory(dict)
    """Those that are out."""
    version: int = 0
    marks: list[tuple[CheckpointMark, set[str]]] = attrs.Factory(list)
    """The two that are kept, with what was committed by then."""

    def named(self, *phases: str) -> list[str]:
        return [name for name, phase in self.groups.items() if phase in phases]

    def recovered(self, mark: CheckpointMark | None = None) -> "Model":
        after = copy.deepcopy(self)
        after.batches.clear()
        again = {"sampled": "finished", "running": "pending"}
        after.groups = {name: again.get(phase, phase) for name, phase in self.groups.items()}
        if mark is not None:
            (place,) = [place for place, (kept, _) in enumerate(self.marks) if kept == mark]
            undone = set(after.named("committed")) - self.marks[place][1]
            after.groups.update(dict.fromkeys(undone, "finished"))
            after.version = mark.weight_version
            del after.marks[place + 1 :]
        return after


def seen(run):
    """The same of a run."""
    groups = {name: str(group.phase) for name, group in run.book.groups.items()}
    groups.update({name: str(phase) for name, phase in run.book.departed.items()})
    return groups, run.weight_version, [mark.mark for mark in run.book.marks]


def expected(model):
    return model.groups, model.version, [mark.mark for mark, _ in model.marks]


class Process:
    """A run that is opened in a task of its own and does what it is told, until it is killed or closed."""

    def __init__(self, disk, keep, mark=None):
        self.loop = VirtualLoop()
        self.disk = disk
        self._keep = keep
        self._mark = mark
        self._orders = asyncio.Queue()
        self._ready = self.loop.create_future()
        self._task = self.loop.create_task(self._live())
        self.loop.run_until_complete(asyncio.wait([self._ready, self._task], return_when=asyncio.FIRST_COMPLETED))
        if not self._ready.done():
            self._task.result()

    async def _live(self):
        if self.disk.exists(f"{RUN}/run.json"):
            log = FileLog.open(RUN, disk=self.disk, keep=self._keep, **SMALL)
        else:
            log = FileLog.create(RUN, log_id=LOG_ID, disk=self.disk, keep=self._keep, **SMALL)
        options = {"snapshot_events": 6, "group_size": 1, "clock_ns": self.loop.clock_ns}
        async with open_run(log=log, resume_at=self._mark, **options) as run:
            self._ready.set_result(run)
            while (order := await self._orders.get()) is not None:
                call, answer = order
                try:
                    answer.set_result(await call(run))
                except LogError as error:
                    answer.set_exception(error)

    def do(self, call):
        answer = self.loop.create_future()
        self._orders.put_nowait((call, answer))
        return self.loop.run_until_complete(answer)

    def end(self):
        self._orders.put_nowait(None)
        with suppress(LogError):
            self.loop.run_until_complete(self._task)
        self.loop.close()


class Crashes(RuleBasedStateMachine):
    @initialize(keep=st.sampled_from(["all", "archive", 1]))
    def begin(self, keep):
        self.keep = keep
        self.model = Model()
        self.names = 0
        self.process = Process(FaultyDisk(), keep)

    def teardown(self):
        if hasattr(self, "process"):
            self.process.end()

    # Operations: each gives a call and what it makes of the model ------------------------------------------

    def _submit(self, chance):
        self.names += 1
        name = f"n{self.names}"

        async def call(run):
            run.submit(f"prompt of {name}", group_id=name)

        return call, lambda model, _: model.groups.update({name: "pending"})

    def _start(self, chance):
        name = chance.choice(self.model.named("pending") or [""])

        async def call(run):
            for group in run.pending():
                if group.id == name:
                    assert group.prompt.content == f"prompt of {name}"
                    group.start(0)

        return name and call, lambda model, _: model.groups.update({name: "running"})

    def _finish(self, chance):
        name = chance.choice(self.model.named("running") or [""])

        async def call(run):
            attempt = run.book.groups[name].sessions[0].attempt
            run.ledger.finish(name, 0, attempt, Trajectory(text=f"answer of {name}", reward=1.0))

        return name and call, lambda model, _: model.groups.update({name: "finished"})

    def _publish(self, chance):
        version = self.model.version + chance.choice([0, 1, 3])

        async def call(run):
            await run.publish_weights(version)

        return call, lambda model, _: setattr(model, "version", version)

    def _sample(self, chance):
        ready = self.model.named("finished")
        count = chance.randint(1, max(1, len(ready)))

        async def call(run):
            batch = await run.sample(count)
            assert [row.trajectory.text for row in batch.rows] == [f"answer of {name}" for name in batch.group_ids]
            return batch.number, batch.group_ids

        def then(model, answer):
            # Without an answer the trainer has nothing, and recovery brings the groups back.
            if answer is not None:
                number, names = answer
                assert set(names) <= set(ready)
                model.batches[number] = names
                model.groups.update(dict.fromkeys(names, "sampled"))

        return ready and call, then

    def _commit(self, chance):
        number = chance.choice(sorted(self.model.batches) or [0])

        async def call(run):
            await run.commit(number)

        return number and call, lambda model, _: self._ended(model, number, "committed")

    def _release(self, chance):
        number = chance.choice(sorted(self.model.batches) or [0])

        async def call(run):
            await run.release(number)

        return number and call, lambda model, _: self._ended(model, number, "finished")

    @staticmethod
    def _ended(model, number, phase):
        model.groups.update(dict.fromkeys(model.batches.pop(number), phase))

    def _mark(self, chance):
        async def call(run):
            return await run.checkpoint()

        def then(model, mark):
            if mark is None:
                # It may have become durable though nobody heard of it, so nobody can go back to it.
                mark = CheckpointMark(run_id="?", mark=self._next_mark, seq=0, weight_version=0, lineage=0)
            model.marks = [*model.marks, (mark, set(model.named("committed")))][-2:]

        return call, then

    # Rules ------------------------------------------------------------------------------------------------

    @rule(name=st.sampled_from([*OPERATIONS, "submit", "start", "finish"]), chance=st.randoms(use_true_random=False))
    def does(self, name, chance):
        self._does(name, chance)

    def _does(self, name, chance):
        call, then = getattr(self, f"_{name}")(chance)
        if call:
            then(self.model, self.process.do(call))
            self._agrees()

    @rule(chance=st.randoms(use_true_random=False), marks=st.booleans())
    def trains_on_a_group(self, chance, marks):
        """All that one goes through, since single steps seldom come so far."""
        for name in ("submit", "start", "finish", "sample", "publish", "commit", *(["mark"] if marks else [])):
            self._does(name, chance)

    @rule(how=st.sampled_from(["closed", "killed", "power"]), chance=st.randoms(use_true_random=False))
    def ends_and_recovers(self, how, chance):
        self._recover(how, chance, [self.model.recovered()])

    @precondition(lambda self: self.model.marks and any(mark.seq for mark, _ in self.model.marks))
    @rule(how=st.sampled_from(["closed", "killed", "power"]), chance=st.randoms(use_true_random=False))
    def ends_and_goes_back_to_a_mark(self, how, chance):
        mark = chance.choice([mark for mark, _ in self.model.marks if mark.seq])
        self._recover(how, chance, [self.model.recovered(mark)], mark)

    @rule(
        name=st.sampled_from(OPERATIONS),
        how=st.sampled_from(["killed", "power"]),
        within=st.integers(1, 8),
        torn_bytes=st.sampled_from([0, 5, 60, 10_000]),
        chance=st.randoms(use_true_random=False),
    )
    def dies_in_an_operation(self, name, how, within, torn_bytes, chance):
        call, then = getattr(self, f"_{name}")(chance)
        if not call:
            return
        before, answer = copy.deepcopy(self.model), None
        self._next_mark = self.process.do(_last_mark) + 1
        disk = self.process.disk
        disk.fault = Fault(disk.operation_count + within, once=False, torn_bytes=torn_bytes)
        try:
            answer = self.process.do(call)
        except LogFailed:
            after = copy.deepcopy(before)
            then(after, None)
            possible = [before.recovered(), after.recovered()]
        else:
            then(self.model, answer)
            # What isn't awaited may be lost, though it was said to be written; an inline log fails in the call.
            possible = [self.model.recovered(), before.recovered()]
            if name in ("sample", "commit", "release", "mark"):
                del possible[1:]
        self._recover(how, chance, possible)

    def _recover(self, how, chance, possible, mark=None):
        if how == "closed":
            self.process.end()
            disk = self.process.disk
        else:
            disk = self.process.disk.copy() if how == "killed" else self.process.disk.crash(chance=chance)
            self.process.end()
        self.process = Process(disk, self.keep, mark)
        found = self.process.do(_seen)
        fitting = [model for model in possible if expected(model) == found]
        assert fitting, (found, [expected(model) for model in possible])
        self.model = fitting[0]

    def _agrees(self):
        found = self.process.do(_seen)
        assert found == expected(self.model)


async def _seen(run):
    return seen(run)


async def _last_mark(run):
    return run.book.last_mark


TestCrashes = Crashes.TestCase
TestCrashes.settings = settings(max_examples=25)


class ManyCrashes(Crashes):
    """The same with more examples, and longer ones."""


TestManyCrashes = pytest.mark.long(ManyCrashes.TestCase)
