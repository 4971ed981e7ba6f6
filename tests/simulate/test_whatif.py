"""Other rules over what a run recorded: the own ones give the run again, others what the simulator gives under them."""

import asyncio
import itertools
import json
import random
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from click.testing import CliRunner

from groupstate import Book, Drop, OpenRequest, Rules, Run, Select, SessionContext, Trajectory, open_run
from groupstate.cli import main
from groupstate.core import events as ev
from groupstate.core.invariants import violations
from groupstate.core.rules import Slots
from groupstate.errors import BadInput, RunIsClosed
from groupstate.log.file import FileLog
from groupstate.log.memory import MemoryLog
from groupstate.log.reading import read_log
from groupstate.simulate.drawn import drawn_plan
from groupstate.simulate.loop import VirtualLoop, run_virtual
from groupstate.simulate.lots import Law
from groupstate.simulate.plan import CrashPlan, Plan, SessionPlan, SourcePlan, TrainerPlan, UserPlan
from groupstate.simulate.simulator import simulate
from groupstate.simulate.whatif.compare import WhatIf, what_if
from groupstate.simulate.whatif.figures import Figures, figures
from groupstate.simulate.whatif.recorded import recorded as recorded_of
from groupstate.testing.notation import play

LIVELY = Plan(
    seed=5,
    hours=0.3,
    rules={"mode": "async", "lag_max": 3, "on_stale": "drop", "filter_metric": "acc", "batch_size": 4},
    sessions=SessionPlan(delay=Law(law="exponential", mean_s=20.0), error=0.02, flat=0.2),
    trainer=TrainerPlan(batch_size=4, train=Law(law="exponential", mean_s=8.0)),
)


def recorded(plan: Plan = LIVELY) -> tuple[ev.Record, ...]:
    outcome = simulate(plan)
    assert outcome.breach is None
    return outcome.records


def ongoing() -> list[ev.Record]:
    """The log of a run whose source has not ended yet."""
    return list(itertools.takewhile(lambda record: not isinstance(record.event, ev.SourceExhausted), recorded()))


def under(plan: Plan, **rules: Any) -> Plan:
    return plan.changed(rules={**plan.rules, **rules})


def same(own: Rules) -> Rules:
    return own


def plain_plan(seed: int) -> Plan:
    """A drawn plan without what a log doesn't tell: who watched, and when somebody was told to stop."""
    plan = drawn_plan(seed, hours=0.05)
    sessions = msgspec.structs.replace(plan.sessions, stubborn=0.0)
    trainer = msgspec.structs.replace(plan.trainer, cancel_at_claim=0.0, rewind=0.0)
    rules = {name: value for name, value in plan.rules.items() if name != "cancel_doomed"}
    return plan.changed(
        rules=rules,
        sessions=sessions,
        trainer=trainer,
        crash=CrashPlan(),
        user=UserPlan(),
        validation=None,
        engine=None,
    )


# The run's own rules --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(24))
def test_the_runs_own_rules_played_again_decide_everything_as_the_log_says(seed: int) -> None:
    found = what_if(recorded(plain_plan(seed)), same)

    assert found.parted == ""
    assert found.is_exact
    assert found.stopped == ""


def test_the_figures_of_the_own_rules_are_those_of_the_log() -> None:
    found = what_if(recorded(), same)

    assert found.replayed == found.recorded
    assert found.other == found.recorded


def test_a_run_that_took_a_while_before_its_first_prompt_is_given_again() -> None:
    first, *rest = recorded()
    later = [ev.Record(record.seq, record.at_ns + 5_000_000_000, record.event) for record in rest]

    found = what_if([first, *later], same)

    assert found.parted == ""
    assert found.replayed == found.recorded


def test_a_run_that_crashed_and_was_opened_again_is_played_with_its_crashes() -> None:
    plan = LIVELY.changed(crash=CrashPlan(every_s=200.0, closes=0.5))
    outcome = simulate(plan)
    assert outcome.lives > 2

    found = what_if(outcome.records, same)

    assert found.recorded.requeued > 0
    assert found.other.requeued == pytest.approx(found.recorded.requeued, rel=0.2)
    assert found.other.trained_groups == pytest.approx(found.recorded.trained_groups, rel=0.05)


def test_a_prompt_that_was_dispatched_anew_is_so_with_its_stamp() -> None:
    story = play(
        "submit a/1", "start a", "publish 3", "wait 1", "requeue a stamp=3", "start a", "wait 1", "finish a reward=1",
        "sample 1", "commit 1", rules=Rules(lag_max=0),
    )  # fmt: skip

    found = what_if(list(story.log.read()), same)

    assert (found.parted, found.other.trained_groups, found.other.requeued) == ("", 1, 1)


def test_what_is_played_is_a_log_that_holds_to_all_invariants() -> None:
    found = what_if(recorded(), lambda own: own.changed(lag_max=1))

    assert violations(found.records) == []


def test_where_the_play_parts_from_the_log_it_says_so() -> None:
    records = list(recorded())
    number = next(i for i, record in enumerate(records) if isinstance(record.event, ev.GroupEvicted))
    told = records[number]
    assert isinstance(told.event, ev.GroupEvicted)
    records[number] = ev.Record(told.seq, told.at_ns, msgspec.structs.replace(told.event, lag=7))

    found = what_if(records, same)

    assert not found.is_exact
    name = told.event.group_id
    assert found.parted.startswith(f"event {told.seq} is group_evicted ({name}: ")
    assert f", and played again it is group_evicted ({name}: " in found.parted


def test_a_log_that_ends_before_what_its_rules_would_do_next_is_told() -> None:
    before = list(itertools.takewhile(lambda record: not isinstance(record.event, ev.GroupEvicted), recorded()))

    assert what_if(before, same).parted.startswith("the log ends, and played again group_evicted (")


# How a run ends -------------------------------------------------------------------------------------------


CLOSING = {
    "with a filter": Rules(lag_max=2, filter_metric="acc", batch_size=2),
    "with slots": Rules(lag_max=2, filter_metric="acc", batch_size=2, admission=Slots(6, 4)),
    "with retries": Rules(lag_max=2, filter_metric="acc", batch_size=2, attempts_max=3, retry_delay_s=2.0),
    "in sync mode": Rules(mode="sync", filter_metric="acc", batch_size=50),
    "waiting for the stale": Rules(lag_max=1, filter_metric="acc", batch_size=2, on_stale="wait"),
}


def closed(
    rules: Rules, *, seed: int = 0, grace_s: float = 10.0, waits: bool = False, trains_s: float = 1.0
) -> MemoryLog:
    """The log of a run that is closed with groups in flight.

    Args:
        waits: a `sample()` waits meanwhile.
        trains_s: how long the trainer goes on after its last batch.
    """
    log, chance = MemoryLog(), random.Random(seed)

    async def session(ctx: SessionContext) -> Trajectory:
        await anyio.sleep(chance.choice([1.0, 3.0, 8.0]) * chance.uniform(0.5, 1.5))
        if chance.random() < 0.1:
            raise RuntimeError("broken")
        return Trajectory(metrics={"acc": float(chance.randrange(2))})

    async def refused(run: Run) -> None:
        with pytest.raises(RunIsClosed):
            await run.sample(50)

    async def main(loop: VirtualLoop) -> None:
        prompts = [f"p{number}" for number in range(500)]
        async with open_run(
            log=log, rules=rules, source=prompts, session=session, group_size=2, grace_s=grace_s, clock_ns=loop.clock_ns
        ) as run:
            for version in range(1, 4):
                await run.commit(await run.sample(2))
                await run.publish_weights(version)
            async with anyio.create_task_group() as tasks:
                if waits:
                    tasks.start_soon(refused, run)
                await anyio.sleep(trains_s)
                await run.close("enough")

    run_virtual(main)
    return log


@pytest.mark.parametrize("waits", [False, True], ids=["nobody waits", "a sampler waits"])
@pytest.mark.parametrize("rules", CLOSING.values(), ids=CLOSING)
def test_what_ends_in_the_grace_of_closing_is_followed_by_nothing(rules: Rules, waits: bool) -> None:
    for seed in range(3):
        log = closed(rules, seed=seed, grace_s=60.0, waits=waits)

        found = what_if(log.read(), same)

        assert found.parted == ""
        assert found.replayed is not None
        assert (found.replayed.groups, found.replayed.refills) == (found.recorded.groups, found.recorded.refills)


def test_a_run_that_is_closed_before_anything_is_due_is_given_again() -> None:
    found = what_if(closed(CLOSING["with slots"], grace_s=0.0).read(), same)

    assert found.parted == ""
    assert found.replayed is not None
    assert found.recorded.requeued == found.replayed.requeued > 0


def test_a_closing_without_a_sign_is_taken_to_begin_as_late_as_can_be() -> None:
    records = list(closed(CLOSING["with slots"], grace_s=60.0, trains_s=0.0).read())
    acts = recorded_of(records).acts
    number = next(number for number, act in enumerate(acts) if act.kind == "closing")
    last = max(record.seq for record in records if isinstance(record.event, ev.GroupSubmitted | ev.BatchSampled))

    assert [act.kind for act in acts[number:]] == ["closing", "close", "end"]
    assert last <= acts[number].seq < acts[number + 1].seq
    assert isinstance(records[acts[number].seq].event, ev.SessionFinished | ev.SessionFailed)
    assert sum(act.after_ns for act in acts[number + 1 :]) == records[-1].at_ns - records[acts[number].seq].at_ns


def test_a_closing_is_not_looked_for_before_the_last_thing_that_only_an_open_run_does() -> None:
    records = list(closed(CLOSING["with slots"], grace_s=60.0, trains_s=0.0).read())
    last = max(record.seq for record in records if isinstance(record.event, ev.GroupSubmitted | ev.BatchSampled))
    # A sample() begins and is given up between the end of a session and what follows from it.
    ended = next(r.seq for r in records[last:] if isinstance(r.event, ev.GroupFinished | ev.GroupFailed)) - 1
    at_ns = records[ended - 1].at_ns
    given_up = [
        ev.Record(ended + 1, at_ns, ev.BatchRequested(4, ev.TRAIN, 1, 3)),
        ev.Record(ended + 2, at_ns, ev.BatchRequestCancelled(4, "cancelled")),
    ]
    later = [ev.Record(record.seq + 2, record.at_ns, record.event) for record in records[ended:]]

    acts = recorded_of([*records[:ended], *given_up, *later]).acts

    assert [(act.kind, act.seq) for act in acts[-5:-2]] == [
        ("request", ended + 1),
        ("withdraw", ended + 2),
        ("closing", ended + 2),
    ]


# Other rules ----------------------------------------------------------------------------------------------


OTHERS: dict[str, dict[str, Any]] = {
    "fresher": {"lag_max": 1},
    "staler": {"lag_max": 8},
    "no filter": {"filter_metric": None},
    "retries": {"attempts_max": 3, "retry_delay_s": 1.0},
    "wider filter": {"tolerance": 1.0},
    "more in flight": {"admission": {"kind": "slots", "n": 16, "ready_max": 8}},
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_other_rules_come_to_what_the_simulator_comes_to_under_them(other: dict[str, Any]) -> None:
    plan = LIVELY.changed(hours=0.6)
    found = what_if(recorded(plan), lambda own: own.changed(**_settings(other)))
    there = figures(recorded(under(plan, **other)))

    assert found.is_exact
    for name in ("evicted", "refills", "tokens_thrown"):
        assert _per_batch(found.other, name) == pytest.approx(_per_batch(there, name), rel=0.12, abs=0.1), name
    assert found.other.lag_mean == pytest.approx(there.lag_mean, rel=0.12, abs=0.1)
    assert _per_batch(found.other, "waited_s") == pytest.approx(_per_batch(there, "waited_s"), rel=0.15, abs=0.5)


def _settings(table: dict[str, Any]) -> dict[str, Any]:
    """As Python writes them, what a plan has as tables."""
    slots = {name: Slots(value["n"], value["ready_max"]) for name, value in table.items() if name == "admission"}
    return {**table, **slots}


def _per_batch(side: Figures, name: str) -> float:
    return float(getattr(side, name)) / side.batches


def test_a_tighter_bound_throws_more_away() -> None:
    found = what_if(recorded(), lambda own: own.changed(lag_max=0))

    assert found.other.reasons["stale"] > found.recorded.reasons["stale"]
    assert found.other.evicted > found.recorded.evicted
    assert found.other.lag_max == 0


def test_prompts_beyond_those_of_the_log_are_made_up_and_counted() -> None:
    found = what_if(ongoing(), lambda own: own.changed(lag_max=0))

    assert found.made_up["prompts"] > 0
    assert found.stopped == ""


def test_the_seed_picks_what_is_made_up() -> None:
    records = ongoing()

    def tried(seed: int) -> WhatIf:
        return what_if(records, lambda own: own.changed(lag_max=0), seed=seed)

    assert tried(1) == tried(1)
    assert tried(1) != tried(2)


def test_a_source_that_ran_dry_runs_dry() -> None:
    plan = LIVELY.changed(source=SourcePlan(prompts=60))

    found = what_if(recorded(plan), lambda own: own.changed(lag_max=0))

    assert found.other.groups == 60
    assert "NotEnoughGroups" in found.stopped


def test_a_group_that_had_no_deadline_gets_one() -> None:
    found = what_if(recorded(), lambda own: own.changed(session_deadline_s=10.0))

    assert found.other.sessions_failed > 2 * found.recorded.sessions_failed


def test_a_trainer_that_would_wait_for_ever_is_told() -> None:
    plan = LIVELY.changed(source=SourcePlan(prompts=40), sessions=SessionPlan(delay=Law(mean_s=5.0)))

    found = what_if(recorded(plan), lambda own: own.changed(filter_metric="speed", on_missing="error"))

    assert "MissingMetric" in found.stopped


def of_whole_groups(book: Book, rules: Rules, request: OpenRequest) -> list[Select | Drop]:
    states = [{session.state for session in group.sessions} for group in book.groups.values() if group.in_flight]
    assert {"open", "waiting"} not in states, "one has begun, and its sibling hasn't"
    return [Select([group.group_id]) for group in book.ready()][:1]


def test_a_rule_sees_the_sessions_of_a_group_begin_in_one_step_as_in_the_run() -> None:
    log = MemoryLog()

    async def session(ctx: SessionContext) -> Trajectory:
        await anyio.sleep(1.0)
        return Trajectory(reward=float(ctx.session))

    async def main(loop: VirtualLoop) -> None:
        rules = Rules(selection=f"{__name__}:of_whole_groups", admission=Slots(1))
        async with open_run(
            log=log, rules=rules, source=["a", "b"], session=session, group_size=2, clock_ns=loop.clock_ns
        ) as run:
            for _ in range(2):
                await run.commit(await run.sample(1))

    run_virtual(main)

    found = what_if(log.read(), same)

    assert (found.parted, found.replayed and found.replayed.batches) == ("", 2)


# A selection rule of the script that was run ---------------------------------------------------------------


def youngest(book: Book, rules: Rules, request: OpenRequest) -> list[Select | Drop]:
    ids = [group.group_id for group in book.ready()][::-1]
    return [Select(ids[: request.size])] if len(ids) >= request.size else []


def second(book: Book, rules: Rules, request: OpenRequest) -> list[Select | Drop]:
    return [Select([group.group_id for group in book.ready()][1:2])]


@pytest.fixture(scope="module")
def of_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that names its rule `__main__:youngest`."""
    story = play(
        "submit a/1", "start a", "submit b/1", "start b", "submit c/1", "start c",
        "finish a reward=1", "finish b reward=1", "sample 1", "commit 1", "finish c reward=1", "sample 1",
        rules=Rules(selection="__main__:youngest"), selection=youngest,
    )  # fmt: skip
    assert story.batches() == [("b",), ("c",)]
    return written(list(story.log.read()), tmp_path_factory.mktemp("of script") / "run")


def test_the_own_rules_are_played_with_the_function_of_the_same_name_that_is_given(of_script: Path) -> None:
    text = invoked(str(of_script), "--set", f"selection={__name__}:youngest")

    assert f"the run's own rules (with {__name__}:youngest), played again, decide everything as the log says" in text


@pytest.mark.parametrize("other", ["oldest_first", f"{__name__}:second"], ids=["of the library", "another"])
def test_the_check_is_left_out_where_only_the_other_rules_can_be_played(of_script: Path, other: str) -> None:
    found = json.loads(invoked(str(of_script), "--set", f"selection={other}", "--json"))
    text = invoked(str(of_script), "--set", f"selection={other}")

    assert (found["replayed"], found["parted"], found["other"]["batches"]) == (None, "", 2)
    assert found["unchecked"].startswith("selection '__main__:youngest' was a function of the script that was run")
    assert found["unchecked"].endswith("; the check needs other rules with a function 'youngest'")
    assert "\tbatches\t2\t-\t2\n" in text
    assert "as a check: left out, since the run's own rules can't be played: selection '__main__:youngest' was" in text


def test_a_play_that_was_not_checked_does_not_count_as_exact(of_script: Path) -> None:
    found = what_if(read_log(of_script), lambda own: own.changed(selection="oldest_first"))

    assert not found.is_exact
    assert found.replayed is None


def test_rules_of_a_script_that_are_not_named_anew_are_refused_with_a_way_to_name_them(of_script: Path) -> None:
    text = invoked(str(of_script), "--set", "lag_max=1", code=2)

    assert text == (
        "groupstate: selection '__main__:youngest' was a function of the script that was run, and the one that runs "
        "now has no 'youngest'; name the module or the file that has it: --set selection=train:youngest or "
        "path/to/train.py:youngest\n"
    )


# What can't be tried --------------------------------------------------------------------------------------


def test_a_log_without_its_beginning_is_refused() -> None:
    with pytest.raises(BadInput, match="begins with event 2: what arrived before isn't known"):
        what_if(recorded()[1:], same)


def test_an_empty_log_is_refused() -> None:
    with pytest.raises(BadInput, match="no event yet"):
        what_if([], same)


def test_what_follows_a_rewind_is_left_out() -> None:
    plan = LIVELY.changed(
        crash=CrashPlan(every_s=150.0, closes=1.0), trainer=TrainerPlan(batch_size=4, checkpoint_every=2, rewind=1.0)
    )
    records = recorded(plan)
    rewound = next(record.seq for record in records if isinstance(record.event, ev.RunRewound | ev.RunRecovered))

    found = what_if(records, same)

    assert str(rewound) in found.until or "goes back to a mark" in found.until


# The command ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(list(recorded()), tmp_path_factory.mktemp("whatif") / "run")


def written(records: list[ev.Record], path: Path) -> Path:
    log = FileLog.create(path, durability="os", inline=True)
    log.post(records)
    asyncio.run(log.aclose())
    return path


def invoked(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["whatif", *words])
    assert result.exit_code == code, result.output
    return result.output


def test_the_command_sets_three_columns_side_by_side(run: Path) -> None:
    text = invoked(str(run), "--set", "lag_max=0")

    assert "lag_max 3 -> 0\tas it was\town rules, played again\tother rules" in text
    assert "decide everything as the log says" in text
    assert text.index("\nassumed: ") < text.index("\nmade up for the other rules: ")


def test_the_command_takes_a_file_and_writes_json(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "other.toml"
    file.write_text("[rules]\nlag_max = 0\n")

    found = json.loads(invoked(str(run), "--rules", str(file), "--json"))

    assert found["rules"]["lag_max"] == 0
    assert found["recorded"]["lag_max"] == 2
    assert found["other"]["lag_max"] == 0
    assert found["parted"] == ""


def test_the_command_without_other_rules_is_refused(run: Path) -> None:
    assert "use --rules FILE or --set KEY=VALUE" in invoked(str(run), code=2)


def test_a_rule_that_there_isnt_is_refused_before_anything_is_played(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("groupstate.simulate.whatif.compare.play")

    text = invoked(str(run), "--set", "lag_maxx=1", code=2)

    assert text == "groupstate: rules has no setting 'lag_maxx'; did you mean 'lag_max'?\n"


def test_rules_that_contradict_each_other_are_refused(run: Path) -> None:
    assert "lag_max bounds nothing in sync mode" in invoked(str(run), "--set", "mode=sync", code=2)
