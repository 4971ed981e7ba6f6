"""The rollout function for slime, against what slime publishes of itself."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from groupstate.core import events as ev
from groupstate.core.invariants import violations
from groupstate.errors import BadSettings, LogError, SampleError
from groupstate.integrations import slime
from groupstate.integrations.slime import RolloutFunction
from groupstate.log.reading import read_log
from groupstate.testing.notation import play
from tests.integrations.slime_stand_in import DataSource, Sample, Slime, Status, arguments, by_place, installed
from tests.test_docs import blocks

PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "slime.md"

ASYNC = {"mode": "async", "lag_max": 1}


class Stage:
    """slime with one rollout function, called as its RolloutManager calls it."""

    def __init__(self, stack: Slime, folder: Path) -> None:
        self.stack = stack
        self.folder = folder
        self.function = RolloutFunction("slime")
        self.source = DataSource(2)

    def generate(self, rollout_id: int, *, rules: Any = None, **options: Any) -> Any:
        table: dict[str, Any] = {"path": str(self.folder)} | ({} if rules is None else {"rules": rules})
        return self.function(arguments(groupstate=table, **options), rollout_id, self.source, evaluation=False)

    def events(self, start: int = 1) -> list[Any]:
        self.function.close()
        records = list(read_log(self.folder / f"start-{start}"))
        assert violations(records) == []
        return [record.event for record in records]


Staged = Callable[..., Stage]


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Staged]:
    monkeypatch.setattr(slime, "ABORT_PAUSE_S", 0.0)
    made: list[tuple[Stage, Iterator[Slime]]] = []

    def staged(generation: Any = by_place) -> Stage:
        running = installed(generation, monkeypatch)
        made.append((Stage(next(running), tmp_path / "run"), running))
        return made[-1][0]

    yield staged
    for one, running in made:
        one.function.close()
        next(running, None)


def kinds(events: list[Any], kind: type) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def test_a_call_gives_whole_groups_in_slimes_order(stage: Staged) -> None:
    output = stage().generate(0)

    assert [[sample.index for sample in group] for group in output.samples] == [[0, 1], [2, 3]]
    assert all(sample.status is Status.COMPLETED for group in output.samples for sample in group)
    assert output.metrics["rollout/groupstate/training/reward/mean"] == 0.5


def test_the_log_has_the_sessions_and_a_rollout_id_is_a_weight_version(stage: Staged) -> None:
    staged = stage()
    for rollout_id in range(4):
        staged.generate(rollout_id)
    events = staged.events()

    sampled = kinds(events, ev.BatchSampled)
    assert [event.weight_version for event in sampled] == [0, 1, 2, 3]
    assert [event.group_ids for event in sampled] == [("0", "1"), ("2", "3"), ("4", "5"), ("6", "7")]
    assert len(kinds(events, ev.SessionFinished)) == 16
    assert [event.batch for event in kinds(events, ev.BatchCommitted)] == [1, 2]
    assert isinstance(events[-1], ev.RunClosed)


def test_in_sync_mode_nothing_is_under_way_between_two_batches(stage: Staged) -> None:
    staged = stage()
    staged.generate(0)

    assert staged.source.given == 2


def test_groups_without_a_signal_are_evicted_and_replaced(stage: Staged) -> None:
    async def alike_in_even_groups(args: Any, sample: Sample, params: Any) -> Sample:
        assert sample.group_index is not None
        assert sample.index is not None
        return sample.answers(7, reward=float(sample.group_index % 2 and sample.index % 2))

    staged = stage(alike_in_even_groups)
    output = staged.generate(0, rules={**ASYNC, "filter_metric": "reward"})
    events = staged.events()

    assert [group[0].group_index for group in output.samples] == [1, 3]
    assert {event.group_id for event in kinds(events, ev.GroupEvicted)} >= {"0", "2"}
    assert {event.reasons for event in kinds(events, ev.GroupEvicted)} == {("zero_variance",)}


def test_groups_that_are_too_old_are_evicted(stage: Staged) -> None:
    staged = stage()
    staged.generate(0, rules=ASYNC)
    output = staged.generate(5, rules=ASYNC)
    events = staged.events()

    stale = {event.group_id for event in kinds(events, ev.GroupEvicted) if "stale" in event.reasons}
    assert {"2", "3"} <= stale
    assert not stale & {str(group[0].group_index) for group in output.samples}


def test_a_sample_that_raises_costs_its_group_and_no_group_is_short(stage: Staged) -> None:
    async def breaks_once(args: Any, sample: Sample, params: Any) -> Sample:
        if sample.index == 1:
            raise RuntimeError("no sandbox")
        return await by_place(args, sample, params)

    staged = stage(breaks_once)
    output = staged.generate(0)
    failed = kinds(staged.events(), ev.SessionFailed)

    assert [[sample.index for sample in group] for group in output.samples] == [[2, 3], [4, 5]]
    assert [(event.group_id, event.session, event.message) for event in failed] == [
        ("0", 1, "RuntimeError: no sandbox")
    ]


def test_a_failed_sample_is_tried_again_from_what_was_drawn(stage: Staged) -> None:
    seen: list[list[int]] = []

    async def fails_first(args: Any, sample: Sample, params: Any) -> Sample:
        seen.append(list(sample.tokens))
        status = Status.FAILED if len(seen) == 1 else Status.COMPLETED
        return sample.answers(7, reward=float(sample.index or 0), status=status)

    staged = stage(fails_first)
    rules = {"mode": "sync", "failure": "refill", "attempts_max": 2, "retry_delay_s": 0.0}
    output = staged.generate(0, rules=rules)

    assert seen == [[]] * 5
    assert [[sample.index for sample in group] for group in output.samples] == [[0, 1], [2, 3]]


def test_an_aborted_sample_goes_on_from_its_tokens(stage: Staged) -> None:
    async def in_two_pieces(args: Any, sample: Sample, params: Any) -> Sample:
        if sample.status is Status.PENDING:
            return sample.answers(7, status=Status.ABORTED)
        return sample.answers(8, reward=float(sample.index or 0))

    staged = stage(in_two_pieces)
    output = staged.generate(0)

    assert {tuple(sample.tokens) for group in output.samples for sample in group} == {(1, 2, 7, 8)}
    assert len(kinds(staged.events(), ev.SessionStarted)) == 4


def test_an_engine_that_aborts_everything_is_not_asked_for_ever(stage: Staged, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(args: Any, sample: Sample, params: Any) -> Sample:
        return sample.answers(status=Status.ABORTED)

    monkeypatch.setattr(slime, "ABORTS_MAX", 3)
    staged = stage(never)

    with pytest.raises(SampleError, match="the engine aborted the sample 3 times"):
        staged.generate(0, rules={**ASYNC, "eviction_streak_max": 2})


def test_several_samples_of_one_session_stay_together(stage: Staged) -> None:
    async def fans_out(args: Any, sample: Sample, params: Any) -> list[Sample]:
        return [
            Sample(index=sample.index, group_index=sample.group_index).answers(
                token_id, reward=float(sample.index or 0)
            )
            for token_id in (7, 8)
        ]

    staged = stage(fans_out)
    output = staged.generate(0)
    finished = kinds(staged.events(), ev.SessionFinished)

    assert [[[row.tokens[-1] for row in rows] for rows in group] for group in output.samples] == [[[7, 8]] * 2] * 2
    assert {len(event.trajectories) for event in finished} == {2}


def test_a_sample_is_kept_with_its_mask_its_parts_of_the_reward_and_its_length(stage: Staged) -> None:
    async def with_a_tool(args: Any, sample: Sample, params: Any) -> Sample:
        made = sample.answers(7, 8, 9, reward={"score": float(sample.index or 0), "format": 1, "why": "well"})
        made.loss_mask = [1, 0, 1]
        return made

    staged = stage(with_a_tool)
    staged.generate(0, reward_key="score")
    (row,) = kinds(staged.events(), ev.SessionFinished)[-1].trajectories

    assert row.metrics == {"score": 3.0, "format": 1.0, "reward": 3.0}
    assert (row.prompt_tokens, row.response_tokens) == (2, 3)
    assert slime.trajectory_of(arguments(), Sample(loss_mask=[0, 1, 0]).answers(7, 8, 9, reward=1.0)).environment == [
        (0, 1), (2, 3)
    ]  # fmt: skip


def test_sampling_parameters_are_slimes_and_each_call_has_its_own(stage: Staged) -> None:
    given: list[dict[str, Any]] = []

    async def spends(args: Any, sample: Sample, params: dict[str, Any]) -> Sample:
        given.append(dict(params))
        params["max_new_tokens"] -= 8
        return await by_place(args, sample, params)

    staged = stage(spends)
    staged.generate(0, sglang_enable_deterministic_inference=True)

    assert {params["max_new_tokens"] for params in given} == {8}
    assert sorted(params["sampling_seed"] for params in given) == [100, 100, 101, 101]


def drop_the_first(args: Any, groups: list[list[Sample]]) -> None:
    groups[0][0].remove_sample = True


def test_the_filter_of_samples_is_called(stage: Staged) -> None:
    output = stage().generate(0, rollout_sample_filter_path=f"{__name__}.drop_the_first")

    assert [sample.remove_sample for group in output.samples for sample in group] == [True, False, False, False]


def test_evaluation_is_slimes_own(stage: Staged) -> None:
    staged = stage()
    staged.function(arguments(), 3, staged.source, evaluation=True)

    assert staged.stack.evaluated == [3]
    assert staged.function.run is None


def test_samples_have_slimes_session_ids(stage: Staged) -> None:
    output = stage().generate(0)

    assert [sample.session_id for group in output.samples for sample in group] == ["0_0", "0_1", "1_0", "1_1"]


def test_a_group_that_comes_back_is_another_group(stage: Staged, monkeypatch: pytest.MonkeyPatch) -> None:
    staged = stage()
    given = staged.source.get_samples(1)
    monkeypatch.setattr(DataSource, "get_samples", lambda self, count: given)
    output = staged.generate(0)

    assert [group[0].group_index for group in output.samples] == [0, 0]
    assert [event.group_id for event in kinds(staged.events(), ev.GroupSubmitted)][:1] == ["0"]


def test_several_samples_of_which_one_was_aborted_begin_anew(stage: Staged) -> None:
    asked: list[int] = []

    async def aborts_first(args: Any, sample: Sample, params: Any) -> list[Sample]:
        asked.append(len(sample.tokens))
        status = Status.ABORTED if len(asked) == 1 else Status.COMPLETED
        return [sample.answers(7, reward=float(sample.index or 0), status=status)]

    stage(aborts_first).generate(0)

    assert asked == [0] * 5


def test_a_sample_without_a_reward_is_a_failed_session(stage: Staged) -> None:
    async def unscored(args: Any, sample: Sample, params: Any) -> Sample:
        return sample.answers(7)

    with pytest.raises(SampleError, match="generate_and_rm gave the sample no reward"):
        stage(unscored).generate(0, rules={**ASYNC, "eviction_streak_max": 2})


def test_what_a_log_can_not_hold_is_there_as_text(stage: Staged) -> None:
    class Image:
        def __repr__(self) -> str:
            return "an image"

    work = slime._Work(None, None)
    group = [Sample(group_index=3, prompt=[{"content": Image()}], label="yes", metadata={"data_source": "pictures"})]
    prompt = slime._DataSource(type("Source", (), {"get_samples": lambda self, count: [group]})(), work).draw()

    assert prompt is not None
    assert (prompt.content, prompt.dataset, prompt.group_id, prompt.n) == (
        "[{'content': an image}]",
        "pictures",
        "3",
        1,
    )


def test_log_probabilities_that_are_not_one_for_each_token_are_left_out() -> None:
    sample = Sample().answers(7, 8, reward=1.0)
    sample.rollout_log_probs = [-0.5]

    assert slime.trajectory_of(arguments(), sample).log_probs == ()


def test_a_run_that_can_not_be_opened_is_an_error_of_the_call(stage: Staged, tmp_path: Path) -> None:
    staged = stage()
    (tmp_path / "run").write_text("no folder")

    with pytest.raises(LogError, match=r"can.t be made a run"):
        staged.generate(0)


def test_samples_are_let_go_of_with_their_groups(stage: Staged) -> None:
    staged = stage()
    for rollout_id in range(20):
        staged.generate(rollout_id, rules={**ASYNC, "lag_max": 0})
    work = staged.function._work

    assert work is not None
    assert len(work._drawn) <= 8
    assert len(work._made) <= 8


def test_so_they_are_where_a_group_leaves_before_a_session_of_it_began() -> None:
    work = slime._Work(None, None)
    for _ in range(4):
        work.keep([])
    story = play("submit a/1 position=0", "submit b/1 position=1", "fail a", "evict a empty", "submit c/1 position=2")
    nothing: Any = SimpleNamespace(groups=(), group_ids=())
    run: Any = SimpleNamespace(book=story.book)

    assert work.hand_over(nothing, run) == []
    assert set(work._drawn) == {1, 2, 3}  # The last one isn't submitted yet.


def test_a_draw_has_the_number_of_its_place_in_the_source(stage: Staged) -> None:
    staged = stage()
    for rollout_id in range(3):
        staged.generate(rollout_id, rules=ASYNC)
    run, work = staged.function.run, staged.function._work
    assert run is not None
    assert work is not None
    places = {group.source_position: group.group_id for group in run.book.groups.values()}
    drawn = {number: str(group[0].group_index) for number, group in work._drawn.items() if number in places}

    assert drawn
    assert drawn == {number: places[number] for number in drawn}


def test_each_start_is_a_run_of_its_own(stage: Staged) -> None:
    staged = stage()
    staged.generate(0)
    staged.function.close()
    staged.generate(7, rules=ASYNC)

    assert kinds(staged.events(2), ev.BatchSampled)[0].weight_version == 7
    assert {event.weight_version for event in kinds(staged.events(2), ev.GroupSubmitted)} == {7}
    assert len(kinds(staged.events(1), ev.BatchSampled)) == 1


def test_a_source_that_runs_out_is_an_error_that_says_so(stage: Staged) -> None:
    staged = stage()
    staged.source.count = 1

    with pytest.raises(SampleError, match="the source is exhausted"):
        staged.generate(0)


SYNC = {"mode": "sync", "failure": "refill"}


@pytest.mark.parametrize(
    ("options", "rules", "text"),
    [
        ({"group_rm": True}, None, "--group-rm scores a group at once"),
        ({"dynamic_sampling_filter_path": "a.b"}, None, "--dynamic-sampling-filter-path a.b .* filter_metric: reward"),
        ({"over_sampling_batch_size": 4}, None, "--over-sampling-batch-size 4 .* admission"),
        ({"rollout_all_samples_process_path": "a.b"}, None, "--rollout-all-samples-process-path"),
        ({"colocate": True}, ASYNC, "--colocate .* mode: sync"),
        ({}, {**ASYNC, "batch_size": 3}, "batch_size 3 isn't --rollout-batch-size 2"),
        ({}, {"mode": "sync"}, "failure: keep lets groups through with fewer than --n-samples-per-prompt 2"),
        ({}, {**SYNC, "empty": "keep"}, "empty: keep lets groups through"),
        ({}, {**ASYNC, "empty": "keep_finished"}, "empty: keep_finished lets groups through"),
        ({}, {**ASYNC, "survivors_min": 1}, "survivors_min lets groups through"),
        ({}, {**ASYNC, "empty_session": "allow"}, "empty_session: allow lets groups through"),
        ({}, {**ASYNC, "oversample": 1}, "oversample starts more sessions"),
        ({}, {**ASYNC, "basis": "oldest_token"}, "basis: dispatch"),
        ({}, {"lag_maxx": 1}, "groupstate.rules in --custom-config-path has no setting 'lag_maxx'"),
    ],
    ids=lambda value: None,
)
def test_what_can_not_work_is_refused_with_slimes_names(
    stage: Staged, options: dict[str, Any], rules: Any, text: str
) -> None:
    staged = stage()

    with pytest.raises(BadSettings, match=text):
        staged.generate(0, rules=rules, **options)
    assert not staged.folder.exists()


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({"rule": {}}, "groupstate in --custom-config-path has no setting 'rule'; did you mean 'rules'?"),
        ("runs/a", "groupstate in --custom-config-path is 'runs/a'; it must be a table"),
    ],
    ids=["unknown", "no_table"],
)
def test_a_table_that_can_not_be_is_refused(stage: Staged, table: Any, text: str) -> None:
    staged = stage()

    with pytest.raises(BadSettings, match=text):
        staged.function(arguments(groupstate=table), 0, staged.source)


def test_without_a_table_the_run_is_kept_in_memory(stage: Staged) -> None:
    staged = stage()
    output = staged.function(arguments(), 0, staged.source)

    assert len(output.samples) == 2


def test_the_settings_on_the_page_are_taken() -> None:
    yaml = pytest.importorskip("yaml")
    (text,) = [block.text for block in blocks(PAGE) if block.kind == "yaml"]
    args = arguments(**yaml.safe_load(text))

    settings = slime.settings_of(args)
    rules = slime.checked_rules(args, settings["rules"])
    assert settings["path"] == "runs/slime"
    assert (rules.mode, rules.lag_max, rules.filter_metric, rules.batch_size) == ("async", 1, "reward", 2)


def test_every_setting_of_the_table_is_on_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")

    assert [name for name in slime.OPTIONS if f"`{name}`" not in page] == []


def test_a_package_that_is_missing_or_another_is_told_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadSettings, match=r"needs the package slime, of which slime.rollout.\w+ can't be imported"):
        slime.parts_of("slime")
    for name, module in Slime(by_place).modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "slime.utils.async_utils", ModuleType("slime.utils.async_utils"))
    with pytest.raises(BadSettings, match=r"slime.utils.async_utils has no run, so this version of slime"):
        slime.parts_of("slime")


def test_the_run_is_closed_when_the_process_ends(tmp_path: Path) -> None:
    code = f"""
import sys
from tests.integrations.slime_stand_in import *
made = Slime(by_place)
made.start()
sys.modules.update(made.modules())
from groupstate.integrations.slime import generate_rollout
generate_rollout(arguments(groupstate={{"path": {str(tmp_path)!r}}}), 0, DataSource(2))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=Path(__file__).parents[2])

    assert isinstance(list(read_log(tmp_path / "start-1"))[-1].event, ev.RunClosed)
