"""From the log of a run to the smallest scenario in which the same is decided about one group."""

import tomllib
from pathlib import Path
from typing import Any

import anyio
import pytest
from click.testing import CliRunner, Result

from groupstate import Book, Drop, GroupHandle, OpenRequest, Select, Trajectory, open_run
from groupstate.cli import main
from groupstate.core import events as ev
from groupstate.core.folding import replayed
from groupstate.core.rules import PerDataset, Rules
from groupstate.errors import BadInput, NotReproduced, UnknownGroup
from groupstate.log.file import FileLog
from groupstate.log.reading import read_book, read_log
from groupstate.simulate import reproduce
from groupstate.simulate.drawn import drawn_plan
from groupstate.simulate.loop import VirtualLoop, run_virtual
from groupstate.simulate.reproduce import Reproduced, reproduced, reproduced_run
from groupstate.simulate.scenario import StepFailed, main_paths, play
from groupstate.simulate.scenario_file import parse
from groupstate.simulate.simulator import simulate
from groupstate.testing.notation import Story
from groupstate.testing.notation import play as told
from tests.histories import make

SYNC = Rules(mode="sync", batch_size=2, filter_metric="acc", in_flight_batches_max=2)
ASYNC = Rules(lag_max=1, filter_metric="acc", attempts_max=2, retry_delay_s=0)
WAIT = Rules(lag_max=1, on_stale="wait", batch_size=1)


def done(name: str, *values: float) -> list[str]:
    return [f"start {name}", *(f"finish {name}.{number} acc={value}" for number, value in enumerate(values))]


def group(name: str, *values: float, more: str = "") -> list[str]:
    return [f"submit {name}/{len(values)} {more}".strip(), *done(name, *values)]


def noise(*names: str) -> list[str]:
    """Groups that have nothing to do with it, and a batch of them."""
    return [line for name in names for line in group(name, 0, 1)]


def from_story(story: Story, name: str = "g", until: int | None = None) -> Reproduced:
    return reproduced(story.log.read(), name, until)


def steps(found: Reproduced) -> list[dict[str, Any]]:
    return list(tomllib.loads(found.text)["steps"])


def groups(found: Reproduced) -> list[str]:
    return [step["submit"] for step in steps(found) if "submit" in step]


def expected(found: Reproduced) -> dict[str, Any]:
    return dict(steps(found)[-1]["expect"])


OTHERS = ("x", "y")
BEFORE = [*noise(*OTHERS), "sample 2", "commit 1", "publish 1"]

STORIES: dict[str, tuple[Story, list[str], dict[str, Any]]] = {
    "sync, zero variance, refilled": (
        told(
            "submit x/2", "submit g/2", "sample 2", *done("g", 1, 1), *done("r1", 0, 1), *done("x", 0, 1),
            *done("r2", 0, 1), "commit 1", rules=SYNC, source=["r1", "r2", "r3"],
        ),
        ["g"],
        {"phase": {"g": "evicted"}, "reasons": {"g": ["zero_variance"]}, "credit": {"g": 2}},
    ),
    "async, stale, dropped": (
        told(
            *BEFORE, "submit g/2", "start g", "publish 3", *noise("z"), "finish g.0 acc=0", "finish g.1 acc=1",
            rules=ASYNC,
        ),
        ["g"],
        {"phase": {"g": "evicted"}, "reasons": {"g": ["stale"]}, "credit": {"g": 1}},
    ),
    "surplus": (
        told(
            *(f"submit {name}/2" for name in ("x", "y", "g")), "sample 2", *done("x", 0, 1), *done("y", 0, 1),
            *done("g", 0, 1), rules=SYNC, source=["r1"],
        ),
        ["x", "y", "g"],
        {"phase": {"g": "evicted"}, "reasons": {"g": ["surplus"]}, "credit": {"g": 0}},
    ),
    "failed": (
        told(*BEFORE, "submit g/2", "start g", "finish g.0 acc=0", "fail g.1", *noise("z"), rules=ASYNC),
        ["g"],
        {"phase": {"g": "evicted"}, "reasons": {"g": ["failed"]}, "credit": {"g": 1}},
    ),
    "failed after a retry": (
        told(*BEFORE, "submit g/1", "start g", "fail g retryable", "start g", "fail g retryable", rules=ASYNC),
        ["g"],
        {"phase": {"g": "evicted"}, "reasons": {"g": ["empty"]}, "credit": {"g": 1}},
    ),
    "cancelled": (
        told(*BEFORE, "submit g/2", "start g.0", "cancel g", *noise("z"), rules=ASYNC),
        ["g"],
        {"phase": {"g": "evicted"}, "reasons": {"g": ["cancelled"]}, "credit": {"g": 1}},
    ),
    "cancelled because it is doomed": (
        told(*BEFORE, "submit g/2", "start g", "publish 3", rules=Rules(lag_max=1, cancel_doomed=True)),
        ["g"],
        {"phase": {"g": "evicted"}, "reasons": {"g": ["cancelled", "stale"]}, "credit": {"g": 1}},
    ),
    "requeued after a crash": (
        told(*BEFORE, "submit g/2", "start g.0", *noise("z"), "recover", rules=ASYNC),
        ["g"],
        {"phase": {"g": "pending"}, "requeues": {"g": 1}},
    ),
    "requeued after a crash, then sampled": (
        told(*BEFORE, "submit g/2", "start g.0", "recover", *done("g", 0, 1), "sample 1", "commit 2", rules=ASYNC),
        ["g"],
        {"phase": {"g": "committed"}, "requeues": {"g": 1}},
    ),
    "started over by the rules": (
        told(*BEFORE, "submit g/1", "start g", "fail g", "start g", "fail g", rules=Rules(requeues_max=1)),
        ["g"],
        {"phase": {"g": "evicted"}, "reasons": {"g": ["empty"]}, "credit": {"g": 1}, "requeues": {"g": 1}},
    ),
    "started over by hand": (
        told(*noise("x"), "submit g/1", "start g", "requeue g", rules=ASYNC),
        ["g"],
        {"phase": {"g": "pending"}, "requeues": {"g": 1}},
    ),
    "dispatched anew under a later version": (
        told(
            *BEFORE, "submit g/2", "start g", "publish 4", "requeue g stamp=4", *done("g", 0, 1), "sample 1",
            rules=ASYNC,
        ),
        ["g"],
        {"phase": {"g": "sampled"}, "requeues": {"g": 1}},
    ),
    "a sampler waits for it": (
        told(
            *noise("x"), "sample 1", "commit 1", "publish 1", "submit g/1", "start g", *noise("y"), "publish 2",
            "sample 1", rules=WAIT,
        ),
        ["g"],
        {"phase": {"g": "running"}, "held_by": "g"},
    ),
    "with the trainer": (
        told(*noise("x", "y"), *group("g", 0, 1), "sample 2", "commit 1", "sample 1", rules=ASYNC),
        ["g"],
        {"phase": {"g": "sampled"}},
    ),
    "given back": (
        told(*noise("x"), *group("g", 0, 1), "sample 2", "release 1", rules=ASYNC),
        ["g"],
        {"phase": {"g": "finished"}},
    ),
    "in a second batch after the first came back": (
        told(*noise("x"), *group("g", 0, 1), "sample 2", "release 1", "sample 2", "commit 2", rules=ASYNC),
        ["g"],
        {"phase": {"g": "committed"}},
    ),
    "of validation": (
        told(*noise("x"), *group("g", 1, 1, more="partition=val"), "sample 1 partition=val", rules=ASYNC),
        ["g"],
        {"phase": {"g": "sampled"}},
    ),
    "of a dataset with a bound of its own": (
        told(
            *noise("x"), "submit g/1 dataset=math", "start g", "publish 1", "finish g acc=1",
            rules=Rules(lag_max=9, datasets={"math": PerDataset(lag_max=0)}),
        ),
        ["g"],
        {"phase": {"g": "evicted"}, "reasons": {"g": ["stale"]}, "credit": {"g": 1}},
    ),
    "made for a version": (
        told(
            "submit x/1 target=0", "submit g/1 target=1", *done("g", 1), "publish 1", "sample 1", "commit 1",
            rules=Rules(selection="exact_version", basis="target_version", lag_max=0, batch_size=1),
        ),
        ["g"],
        {"phase": {"g": "committed"}},
    ),
    "with sessions to spare": (
        told("submit x/1", "submit g/2", "start g", "finish g.0 acc=1", "finish g.2 acc=0", rules=Rules(oversample=1)),
        ["g"],
        {"phase": {"g": "finished"}},
    ),
    "undone by a way back": (
        told(*noise("x"), *group("g", 0, 1), "mark", "sample 2", "commit 1", "recover at=1", rules=ASYNC),
        ["g"],
        {"phase": {"g": "finished"}},
    ),
    "submitted to a run that had begun at a later version": (
        told("submit g/1", "start g", "publish 9", "finish g acc=1", rules=Rules(lag_max=1), weight_version=7),
        ["g"],
        {"phase": {"g": "evicted"}, "reasons": {"g": ["stale"]}, "credit": {"g": 1}},
    ),
    "the sampler that evicted it gave up": (
        told(
            "submit x/1", "submit g/2", "sample 2", *done("g", 1, 1), "withdraw", "submit y/1", "sample 1", rules=SYNC,
        ),
        ["g"],
        {"phase": {"g": "evicted"}, "reasons": {"g": ["zero_variance"]}, "credit": {"g": 2}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STORIES)
def test_the_decision_is_made_again_without_what_is_unrelated(name: str, tmp_path: Path) -> None:
    story, needed, expect = STORIES[name]
    found = from_story(story)
    file = tmp_path / "found.toml"
    file.write_text(found.text, encoding="utf-8")
    said: list[str] = []

    assert main_paths([file], say=said.append) == 0, said
    assert groups(found) == needed
    assert expected(found) == expect
    assert found.steps <= found.told + 1


@pytest.mark.parametrize("name", [name for name, (_, _, expect) in STORIES.items() if "reasons" in expect])
def test_the_file_fails_where_the_decision_is_another(name: str) -> None:
    data = tomllib.loads(from_story(STORIES[name][0]).text)
    data["steps"][-1]["expect"]["credit"]["g"] += 1

    with pytest.raises(StepFailed, match="credit"):
        play(parse(data))


def test_no_step_about_another_group_or_batch_can_be_left_out() -> None:
    for name, (story, _, _) in STORIES.items():
        data = tomllib.loads(from_story(story).text)
        others = [
            number
            for number, step in enumerate(data["steps"][:-1])
            if not str(next(iter(step.values()))).startswith("g") and "recover" not in step
        ]
        for number in others:
            fewer = {**data, "steps": [step for place, step in enumerate(data["steps"]) if place != number]}
            with pytest.raises(StepFailed):
                play(parse(fewer))
                pytest.fail(f"{name}: step {data['steps'][number]} isn't needed")


# Runs that were recorded -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sync_mode", "rollout", "targets", "waits_for_stale"])
def test_every_group_of_a_recorded_run_that_left_is_told(name: str, tmp_path: Path) -> None:
    make.make(name, tmp_path / name)
    records = list(read_log(tmp_path / name))
    first_opening = next(r.seq for r in records if isinstance(r.event, ev.RunClosed | ev.RunRecovered))
    left = list(replayed(records[: first_opening - 1]).departed)
    for group_id in left[:: max(1, len(left) // 6)]:
        found = reproduced(records[: first_opening - 1], group_id)

        play(parse(tomllib.loads(found.text)))
        assert found.steps < len(records)


def test_other_groups_are_told_in_their_last_life_where_the_openings_do_not_matter() -> None:
    story = told(
        "submit x/2", "submit y/2", "start x", "finish x.0 acc=1", "start y.0", "recover", "requeue y", "submit g/2",
        "sample 2", *done("x", 0, 1), *done("y", 0, 1), *done("g", 0, 1), rules=SYNC,
    )  # fmt: skip
    found = from_story(story)

    assert found.decision.reasons == ("surplus",)
    assert groups(found) == ["x", "y", "g"]
    assert not {"crash", "recover", "requeue"} & {verb for step in steps(found) for verb in step}
    play(parse(tomllib.loads(found.text)))


def test_a_run_directory_is_told_from_the_nearest_snapshot_on(tmp_path: Path) -> None:
    make.make("rollout", tmp_path / "run")
    path, records = tmp_path / "run", list(read_log(tmp_path / "run"))
    until = next(r.seq for r in records if isinstance(r.event, ev.RunClosed | ev.RunRecovered)) - 1
    left = [name for name, phase in replayed(records[:until]).departed.items() if phase != "committed"]
    for group_id in left[-3:]:
        near, whole = reproduced_run(path, group_id), reproduced(records, group_id)
        assert near.decision == whole.decision
        assert near.told <= whole.told
        play(parse(tomllib.loads(near.text)))
    with pytest.raises(UnknownGroup, match="this log never submitted it"):
        reproduced_run(path, "nobody")
    with pytest.raises(BadInput, match="there is no event 9999: the log has events 1 to"):
        reproduced_run(path, left[0], 9999)


def test_what_needs_groups_from_before_the_snapshot_is_told_from_the_beginning(tmp_path: Path) -> None:
    async def main(loop: VirtualLoop) -> None:
        log = FileLog.create(tmp_path / "run", inline=True, durability="os", now_ns=loop.clock_ns)
        async with open_run(log=log, rules=SYNC, group_size=2, snapshot_events=10, clock_ns=loop.clock_ns) as run:
            early = [run.submit("question", group_id=name) for name in ("x", "y")]
            for group in early:
                finish(group)
            await anyio.sleep(1)
            late = run.submit("question", group_id="g")
            finish(late)
            await run.sample(2)

    run_virtual(main)
    (submitted,) = [r.seq for r in read_log(tmp_path / "run") if getattr(r.event, "group_id", "") == "g"][:1]
    found = reproduced_run(tmp_path / "run", "g")

    assert read_book(tmp_path / "run", submitted - 1) is not None
    assert (found.decision.reasons, groups(found)) == (("surplus",), ["x", "y", "g"])


def finish(group: GroupHandle) -> None:
    for session in range(2):
        group.start(session).finish(Trajectory(reward=float(session), metrics={"acc": float(session)}))


def test_groups_of_a_simulated_run_with_crashes_are_told() -> None:
    records = simulate(drawn_plan(12)).records
    lost = next(r.event.group_id for r in records if isinstance(r.event, ev.GroupRequeued) and not r.event.by_rule)
    until = next(r.seq for r in records if isinstance(r.event, ev.GroupRequeued) and r.event.group_id == lost)
    found = reproduced(records, lost, until)

    play(parse(tomllib.loads(found.text)))
    assert {"crash": True} in steps(found) or {"close": True} in steps(found)
    assert groups(found) == [lost]


# Up to an event --------------------------------------------------------------------------------------


def test_until_an_event_the_decision_is_that_of_then() -> None:
    story = told(*noise("x"), *group("g", 0, 1), "sample 2", "commit 1", rules=ASYNC)
    phases = [from_story(story, until=seq).decision.phase for seq in (8, 9, 11, 13, 15, 16)]

    assert phases == ["pending", "running", "running", "finished", "sampled", "committed"]
    with pytest.raises(BadInput, match="group 'g' was submitted at event 8, after event 7"):
        from_story(story, until=7)
    with pytest.raises(BadInput, match="there is no event 99: the log has events 1 to 16"):
        from_story(story, until=99)


def test_late_results_and_the_end_of_the_run_are_no_decision() -> None:
    story = told(*group("g", 0, 1), "sample 1", "commit 1", "finish g.0 acc=1", "close", rules=ASYNC)

    assert from_story(story).decision.seq == 10
    running = told("submit g/1", "start g", rules=ASYNC)
    running.record(ev.GroupRequeued("g", "the run closed while it ran"))
    running.record(ev.RunClosed())
    assert (from_story(running).decision.phase, from_story(running).decision.seq) == ("running", 3)


def test_the_file_says_where_it_comes_from() -> None:
    found = from_story(STORIES["failed"][0])

    assert found.text.splitlines()[0].startswith("# Told from run story, up to event ")
    assert "group_evicted g: failed, lag 0, 1 refill" in found.text.splitlines()[0]
    assert tomllib.loads(found.text)["title"] == "Group g is evicted for failed, credit 1"


def test_odd_ids_and_rows_are_written_so_that_they_are_read() -> None:
    story = told("submit a/1", "start a", "finish a acc=0.5 versions=3,3,4 | acc=1", rules=Rules(basis="newest_token"))
    renamed = [
        ev.Record(r.seq, r.at_ns, type(r.event)(*['"b c"\n/0', *list(r.event.__reduce__()[1])[1:]]))
        if hasattr(r.event, "group_id")
        else r
        for r in story.log.read()
    ]
    found = reproduced(renamed, '"b c"\n/0')

    play(parse(tomllib.loads(found.text)))
    assert steps(found)[2]["trajectories"] == [{"metrics": {"acc": 0.5}}, {"metrics": {"acc": 1.0}}]


def test_versions_of_tokens_are_told_where_the_decision_needs_them_once_for_each_stretch() -> None:
    lines = ["publish 9", "submit g/1", "start g", "finish g acc=1 versions=3,3,3,9"]
    old = from_story(told(*lines, rules=Rules(basis="oldest_token", lag_max=5)))
    new = from_story(told(*lines, rules=Rules(basis="dispatch", lag_max=5)))

    assert steps(old)[-2] == {"finish": "g/0", "trajectories": [{"metrics": {"acc": 1.0}, "versions": [3, 9]}]}
    assert steps(new)[-2] == {"finish": "g/0", "metrics": {"acc": 1.0}}


# What can't be told ----------------------------------------------------------------------------------


def test_a_group_that_there_is_not_names_those_that_are_near() -> None:
    with pytest.raises(UnknownGroup, match="this log never submitted it; did you mean 'g'"):
        from_story(told("submit g/1"), "g7")


def test_behind_a_beginning_that_is_gone_later_groups_are_told() -> None:
    story = told(*noise("x"), "publish 5", *group("g", 1, 1), rules=ASYNC)
    base, rest = replayed(story.log.read(stop=9)), list(story.log.read(9))
    found = reproduced(rest, "g", base=base)

    assert (groups(found), expected(found)["reasons"]) == (["g"], {"g": ["zero_variance"]})
    play(parse(tomllib.loads(found.text)))
    with pytest.raises(UnknownGroup, match="it was finished before event 9, and the events up to there are gone"):
        reproduced(rest, "x", base=replayed(story.log.read(stop=9)))


def test_what_no_steps_lead_to_is_refused_with_what_came_instead() -> None:
    records = list(told("submit g/1", "start g", "finish g acc=1", rules=ASYNC).log.read())
    odd = ev.Record(6, 6, ev.GroupEvicted("g", ("stale",), 0, 1))

    with pytest.raises(NotReproduced, match=r"evicted for stale, credit 1, as it is at event 6; .*expected"):
        reproduced([*records, odd], "g")


def test_errors_of_the_rules_alone_come_again() -> None:
    story = told(
        "submit g/1", *noise("x"), "sample 2", "start g", "finish g other=1", "submit h/1",
        rules=Rules(filter_metric="acc"),
    )  # fmt: skip
    cancelled = [r.event for r in story.log.read() if isinstance(r.event, ev.BatchRequestCancelled)]
    found = from_story(story)

    assert [event.reason for event in cancelled] == ["MissingMetric"]
    assert expected(found) == {"phase": {"g": "finished"}}


def test_what_is_played_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproduce, "STEPS_PLAYED_MAX", 1)
    found = from_story(STORIES["async, stale, dropped"][0])

    play(parse(tomllib.loads(found.text)))


# The command -----------------------------------------------------------------------------------------


def call(*args: Any) -> Result:
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recorded") / "sync_mode"
    make.make("sync_mode", path)
    return path


def test_the_command_prints_the_file_or_writes_it(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "p1.toml"
    printed = call("scenario", "--from", run, "--group", "p1")
    written = call("scenario", "--from", run, "--group", "p1", "--out", file)

    assert (printed.exit_code, printed.stdout) == (0, file.read_text(encoding="utf-8"))
    assert written.stdout == f"{file}: 7 steps of the 12 of the run; run it with: groupstate scenario {file}\n"
    assert call("scenario", file).exit_code == 0


def test_the_command_takes_the_last_event_that_counts(run: Path) -> None:
    assert 'title = "Group p1 is pending"' in call("scenario", "--from", run, "--group", "p1", "--until", 7).stdout


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--from", "RUN"], "it needs --group ID, and no PATH"),
        (["--from", "RUN", "--group", "p1", "x.toml"], "it needs --group ID, and no PATH"),
        (["--group", "p1"], "--group, --until, --selection and --out belong to --from RUN"),
        (["--from", "RUN", "--group", "nobody"], "this log never submitted it"),
        (["--from", "nowhere", "--group", "p1"], "nowhere"),
    ],
)
def test_the_command_refuses_what_makes_no_sense(run: Path, args: list[str], text: str) -> None:
    result = call("scenario", *(run if arg == "RUN" else arg for arg in args))

    assert (result.exit_code, result.stdout) == (2, "")
    assert text in result.stderr


# A selection rule of the script that was run ---------------------------------------------------------------


def youngest(book: Book, rules: Rules, request: OpenRequest) -> list[Select | Drop]:
    ids = [group.group_id for group in book.ready()][::-1]
    return [Select(ids[: request.size])] if len(ids) >= request.size else []


@pytest.fixture
def of_script(tmp_path: Path) -> Path:
    """A run that names its rule `__main__:youngest`."""
    story = told(
        *group("a", 1),
        *group("g", 1),
        "sample 1",
        "commit 1",
        rules=Rules(selection="__main__:youngest"),
        selection=youngest,
    )
    log = FileLog.create(tmp_path / "run", durability="os", inline=True)
    log.post(list(story.log.read()))
    anyio.run(log.aclose)
    return tmp_path / "run"


def test_a_rule_of_the_script_that_was_run_is_named_anew(of_script: Path) -> None:
    result = call("scenario", "--from", of_script, "--group", "g", "--selection", f"{__name__}:youngest")

    assert result.exit_code == 0, result.stderr
    assert f'selection = "{__name__}:youngest"' in result.stdout
    play(parse(tomllib.loads(result.stdout)))


def test_a_rule_of_the_script_that_was_run_is_refused_with_a_way_to_name_it(of_script: Path) -> None:
    result = call("scenario", "--from", of_script, "--group", "g")

    assert result.exit_code == 2
    assert result.stderr == (
        "groupstate: selection '__main__:youngest' was a function of the script that was run, and the one that runs "
        "now has no 'youngest'; name the module or the file that has it: --selection train:youngest or "
        "path/to/train.py:youngest\n"
    )


def test_a_rule_for_a_run_that_has_none_of_its_own_is_refused(run: Path) -> None:
    result = call("scenario", "--from", run, "--group", "p1", "--selection", f"{__name__}:youngest")

    assert result.exit_code == 2
    assert "the run's selection is 'oldest_first', not a function of yours: leave selection out" in result.stderr
