"""The blocking twin."""

import inspect
import threading

import anyio
import anyio.lowlevel
import pytest

import groupstate.sync
from groupstate import Rules, SamplingParams, Trajectory
from groupstate.errors import (
    BadInput,
    BadSettings,
    NotEnoughGroups,
    RunIsClosed,
    SampleTimeout,
    UnknownBatch,
    UnknownGroup,
)


async def half_right(ctx):
    await anyio.lowlevel.checkpoint()
    return Trajectory(reward=float(ctx.session % 2))


def test_a_trainer_without_async_samples_commits_and_resumes(tmp_path):
    with groupstate.sync.open_run(tmp_path / "run", source=range(6), session=half_right, group_size=2) as run:
        first = run.sample(2, weight_version=1)
        run.commit(first)
        mark = run.checkpoint("one")
        run.publish_weights(2)
        second = run.sample(2)
        run.release(second)
        assert (run.weight_version, run.id, run.rules) == (2, run.book.run_id, Rules())
        assert run.wait_sampleable(2) >= 2

    with groupstate.sync.open_run(
        tmp_path / "run", source=range(6), session=half_right, group_size=2, resume_at=mark
    ) as run:
        rest = run.sample(4)
        with pytest.raises(NotEnoughGroups):
            run.sample(1)

    assert sorted(group.prompt.content for group in first.groups + rest.groups) == list(range(6))


def test_a_trainer_without_async_can_dispatch_sessions_itself():
    with groupstate.sync.open_run(group_size=1) as run:
        group = run.submit("p", group_id="a")
        assert [pending.id for pending in run.pending()] == ["a"]
        assert run.sampleable_count() == 0
        group.start(0).finish(Trajectory(reward=1.0))

        assert run.sampleable_count() == 1
        assert run.explain().sampleable == 1
        run.submit("q", group_id="b").start(0)
        run.requeue("b", "stuck")
        run.cancel("b")
        assert run.sample(1).group_ids == ["a"]
        with pytest.raises(UnknownGroup):
            run.cancel("b")


def test_a_batch_of_another_run_is_refused():
    options = {"source": ["p", "q"], "session": half_right, "group_size": 2}
    with groupstate.sync.open_run(**options) as first, groupstate.sync.open_run(**options) as second:
        mine, theirs = first.sample(1), second.sample(1)
        for call in (second.commit, second.release):
            with pytest.raises(UnknownBatch, match=f"is of run '{mine.run_id}'"):
                call(mine)
        second.release(theirs)


def test_validation_and_time_outs_block_too():
    with groupstate.sync.open_run(session=half_right, group_size=1) as run:
        assert len(run.validate(["a", "b"], n=2, timeout_s=30).rows) == 4
        assert len(run.validate(["a"], greedy=True).rows) == 1
        with pytest.raises(BadSettings, match="give one of the two"):
            run.validate(["a"], greedy=True, params=SamplingParams())
        with pytest.raises(SampleTimeout):
            run.sample(1, partition="val", timeout_s=0.01)


def test_an_error_of_the_block_arrives_as_itself_and_the_run_is_closed():
    with pytest.raises(KeyError, match="mine"), groupstate.sync.open_run() as run:
        raise KeyError("mine")

    with pytest.raises((RunIsClosed, RuntimeError)):
        run.sample(1)


def test_closing_inside_of_the_block_is_allowed():
    with groupstate.sync.open_run() as run:
        run.close("early")

        assert run.book.closed


def test_nothing_stays_behind():
    before = threading.active_count()
    with groupstate.sync.open_run(source=range(6), session=half_right, group_size=2) as run:
        run.sample(1)

    assert threading.active_count() <= before + 1, "the log's writer and the loop are gone"


def test_a_run_whose_block_was_left_says_so():
    with groupstate.sync.open_run() as run:
        pass
    run.close()
    with pytest.raises(RunIsClosed, match="the block of open_run was left"):
        run.sample(1)


def public(kind: type) -> dict[str, object]:
    return {name: value for name, value in vars(kind).items() if not name.startswith("_")}


def test_a_blocking_run_has_the_methods_and_properties_of_a_run():
    attribute = "engine"  # Of each run, so the class doesn't have it.

    assert sorted(public(groupstate.sync.Run)) == sorted([*public(groupstate.Run), attribute])


@pytest.mark.parametrize("name", [name for name, value in public(groupstate.Run).items() if callable(value)])
def test_a_method_of_a_blocking_run_takes_what_the_run_takes(name):
    def taken(kind: type) -> list[tuple[str, object, object]]:
        parameters = inspect.signature(getattr(kind, name)).parameters.values()
        return [(parameter.name, parameter.kind, parameter.default) for parameter in parameters]

    assert taken(groupstate.sync.Run) == taken(groupstate.Run)


def test_waiting_for_a_change_blocks_until_something_happens():
    with groupstate.sync.open_run(group_size=1) as run:
        threading.Timer(0.05, lambda: run.submit("p", group_id="a")).start()

        while run.wait_changed(timeout_s=30) and not run.pending():
            pass

        assert [group.id for group in run.pending()] == ["a"]


def test_waiting_for_a_change_that_does_not_come_ends_with_its_time():
    with groupstate.sync.open_run() as run:
        run.pending()

        assert run.wait_changed(timeout_s=0.01) is False
        with pytest.raises(BadInput, match="timeout_s is -1"):
            run.wait_changed(timeout_s=-1)


def test_what_happens_between_a_look_and_the_wait_is_not_missed():
    with groupstate.sync.open_run(group_size=1) as run:
        assert run.pending() == []
        run.submit("p")

        assert run.wait_changed(timeout_s=30)
        assert not run.wait_changed(timeout_s=0.01), "it has been seen"


def test_each_thread_hears_of_a_change():
    def wait() -> None:
        run.pending()
        looked.wait(30)
        submitted.wait(30)
        heard.append(run.wait_changed(timeout_s=30))

    heard: list[bool] = []
    looked, submitted = threading.Barrier(3), threading.Event()
    with groupstate.sync.open_run() as run:
        threads = [threading.Thread(target=wait) for _ in range(2)]
        for thread in threads:
            thread.start()
        looked.wait(30)
        run.submit("p")
        submitted.set()
        for thread in threads:
            thread.join(30)

    assert heard == [True, True]


def test_who_waits_for_a_change_hears_that_the_run_is_closed():
    def dispatch() -> None:
        try:
            while True:
                run.pending()
                waits.set()
                run.wait_changed(timeout_s=30)
        except RunIsClosed as error:
            heard.append(error)

    heard: list[RunIsClosed] = []
    waits = threading.Event()
    with groupstate.sync.open_run() as run:
        dispatcher = threading.Thread(target=dispatch)
        dispatcher.start()
        waits.wait(30)
    dispatcher.join(30)

    assert len(heard) == 1


def test_a_function_in_the_loop_sees_the_book_between_two_events():
    here = threading.get_ident()
    with groupstate.sync.open_run(group_size=1) as run:
        run.submit("p", group_id="a")

        assert run.in_loop(lambda: (threading.get_ident() != here, list(run.book.groups))) == (True, ["a"])
    with pytest.raises(RunIsClosed):
        run.in_loop(dict)


def test_a_run_in_a_hurry_gives_sessions_no_time():
    async def forever(ctx):
        await anyio.sleep(600)

    with groupstate.sync.open_run(source=["p"], session=forever, group_size=1) as run:
        run.hurry()
        run.close()

        assert run.book.closed
