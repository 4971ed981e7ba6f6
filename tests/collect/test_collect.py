"""Collecting accepted groups into a file, as a library call."""

import json
from collections import Counter
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from groupstate import Prompt, Rules, Slots, Trajectory
from groupstate.collect import Progress, collect, files
from groupstate.errors import BadInput, BadSettings, EvictionStreak, MissingMetric, NotARun, RolloutDied
from groupstate.runtime.session import session_from_reward


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"q{number}", group_id=f"p{number}", extra={"answer": number}) for number in range(count)]


async def half_right(ctx):
    """Sessions of one group differ, so that no filter drops it."""
    await anyio.lowlevel.checkpoint()
    return Trajectory(
        prompt_ids=(1, 2), response_ids=(3, 4), log_probs=(-0.5, -0.25), reward=float(ctx.session % 2), text="answer"
    )


def only_every(number: int, otherwise=1.0):
    """Groups whose prompt isn't a multiple of `number` have no variance."""

    async def session(ctx):
        await anyio.lowlevel.checkpoint()
        varies = ctx.prompt.extra["answer"] % number == 0
        return Trajectory(reward=float(ctx.session % 2) if varies else otherwise)

    return session


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def ids(path: Path) -> list[str]:
    """Group ids of a file in order of appearance."""
    return list(dict.fromkeys(line["group_id"] for line in lines(path)))


# What is written -------------------------------------------------------------------------------------


async def test_accepted_groups_become_rows(tmp_path):
    out = tmp_path / "rows.jsonl"
    done = await collect(prompts=prompts(9), out=out, session=half_right, groups=3, group_size=2)

    assert (done.ending, done.accepted, done.rows) == ("complete", 3, 6)
    first = lines(out)[0]
    assert first == {
        "group_id": first["group_id"],
        "session": 0,
        "index": 0,
        "group_size": 2,
        "dataset": "",
        "prompt": "q" + first["group_id"][1:],
        "extra": {"answer": int(first["group_id"][1:])},
        "response": "answer",
        "reward": 0.0,
        "metrics": {"reward": 0.0},
        "weight_version": 0,
        "prompt_ids": [1, 2],
        "response_ids": [3, 4],
        "log_probs": [-0.5, -0.25],
        "environment": [],
        "spans": [],
        "info": {},
    }
    assert Counter(line["group_id"] for line in lines(out)) == dict.fromkeys(ids(out), 2)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


@pytest.mark.parametrize(
    ("bound", "value", "sizes"), [("ROW_GROUP_TOKENS", 30, [3, 3, 2]), ("ROW_GROUP_ROWS", 5, [5, 3])]
)
async def test_parquet_gathers_a_bounded_number_of_rows_and_of_tokens(tmp_path, monkeypatch, bound, value, sizes):
    pq = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(files, bound, value)

    async def session(ctx):
        return Trajectory(prompt_ids=range(2), response_ids=range(10), reward=float(ctx.session))

    await collect(prompts=["a"], out=tmp_path / "rows.parquet", session=session, group_size=8)

    written = pq.ParquetFile(tmp_path / "rows.parquet").metadata
    assert [written.row_group(number).num_rows for number in range(written.num_row_groups)] == sizes


async def test_parquet_has_the_same_rows(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    source = [Prompt({"chat": ["hi"]}, group_id="a"), Prompt("text", group_id="b")]
    await collect(prompts=source, out=tmp_path / "rows.jsonl", session=half_right, group_size=2)
    await collect(prompts=source, out=tmp_path / "rows.parquet", session=half_right, group_size=2)

    rows = pq.read_table(tmp_path / "rows.parquet").to_pylist()
    expected = lines(tmp_path / "rows.jsonl")
    for row, line in zip(rows, expected, strict=True):
        assert json.loads(row.pop("info")) == line.pop("info")
        assert json.loads(row.pop("extra")) == line.pop("extra")
        assert dict(row.pop("metrics")) == line.pop("metrics")
        prompt = line.pop("prompt")
        assert row.pop("prompt") == (prompt if isinstance(prompt, str) else '{"chat":["hi"]}')
        assert row == line


async def test_without_a_number_every_prompt_is_taken(tmp_path):
    out = tmp_path / "rows.jsonl"
    done = await collect(
        prompts=prompts(40), out=out, session=only_every(4), rules=Rules(filter_metric="reward"), group_size=4
    )

    assert done.ending == "complete"
    assert sorted(ids(out)) == sorted(f"p{number}" for number in range(0, 40, 4))
    assert done.progress.evicted == {"zero_variance": 30}


async def test_prompts_that_run_out_leave_what_there_is(tmp_path):
    out = tmp_path / "rows.jsonl"
    done = await collect(prompts=prompts(3), out=out, session=half_right, groups=5, group_size=2)

    assert (done.ending, done.accepted) == ("exhausted", 3)
    assert len(ids(out)) == 3


async def test_failed_groups_are_replaced(tmp_path):
    async def session(ctx):
        if ctx.prompt.content in ("q0", "q1"):
            raise ValueError("boom")
        return Trajectory(reward=1.0)

    out = tmp_path / "rows.jsonl"
    done = await collect(prompts=prompts(9), out=out, session=session, groups=4, group_size=2)

    assert done.accepted == 4
    assert not {"p0", "p1"} & set(ids(out))
    assert done.progress.sessions_failed["error"] == 4
    assert done.progress.last_failure == "ValueError: boom"


@pytest.mark.parametrize("score", [float("nan"), None, [1.0], {"reward": float("inf")}])
async def test_an_unusable_reward_is_a_recorded_failure(tmp_path, score):
    from groupstate.engines.scripted import ScriptedEngine

    class Tokenizer:
        def encode(self, text):
            return [ord(char) for char in text]

        def decode(self, token_ids):
            return "".join(map(chr, token_ids))

    def reward(prompt, text):
        return score if prompt.content == "q0" else 1.0

    engine = ScriptedEngine(lambda prompt_ids: [65], tokenizer=Tokenizer())
    out = tmp_path / "rows.jsonl"
    done = await collect(
        prompts=prompts(2), out=out, session=session_from_reward(reward), engine=engine, groups=2, group_size=2
    )

    assert (done.ending, ids(out)) == ("exhausted", ["p1"])
    assert done.progress.sessions_failed == {"refused": 2}


async def test_no_more_than_asked_for_are_under_way(tmp_path):
    under_way, most = set(), 0

    async def session(ctx):
        nonlocal most
        under_way.add(ctx.group_id)
        most = max(most, len(under_way))
        await anyio.sleep(0.001)
        under_way.discard(ctx.group_id)
        return Trajectory(reward=1.0)

    await collect(prompts=prompts(40), out=tmp_path / "a.jsonl", session=session, groups=9, in_flight=3, group_size=1)

    assert most == 3


async def test_progress_is_reported(tmp_path):
    seen: list[Progress] = []
    await collect(
        prompts=prompts(9), out=tmp_path / "a.jsonl", session=half_right, groups=3, group_size=2, report=seen.append
    )

    assert [progress.accepted for progress in seen if progress.accepted][-1] == 3
    assert {progress.wanted for progress in seen} == {3}


# Stopping and resuming -------------------------------------------------------------------------------


async def stop_after(accepted: int, **arguments):
    """Collect, and stop once so many groups are accepted."""
    scope = anyio.CancelScope()

    def report(progress: Progress) -> None:
        if progress.accepted >= accepted:
            scope.cancel()

    return await collect(stop=scope, report=report, **arguments)


async def test_stopped_and_resumed_no_group_is_missing_or_double(tmp_path):
    out, run = tmp_path / "rows.jsonl", tmp_path / "run"
    arguments = {"out": out, "run": run, "session": half_right, "group_size": 2, "in_flight": 4}
    stopped = await stop_after(3, prompts=prompts(30), **arguments)

    assert (stopped.ending, stopped.accepted) == ("stopped", 3)
    assert not out.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]

    await stop_after(5, prompts=prompts(30), resume=True, **arguments)
    done = await collect(prompts=prompts(30), resume=True, **arguments)

    assert (done.ending, done.accepted) == ("complete", 30)
    assert Counter(line["group_id"] for line in lines(out)) == {f"p{number}": 2 for number in range(30)}


async def test_stopped_before_it_began(tmp_path):
    scope = anyio.CancelScope()
    scope.cancel()
    done = await collect(prompts=prompts(3), out=tmp_path / "a.jsonl", session=half_right, stop=scope)

    assert (done.ending, done.accepted) == ("stopped", 0)


async def test_a_complete_run_can_be_resumed_for_more(tmp_path):
    arguments = {"run": tmp_path / "run", "session": half_right, "group_size": 2, "in_flight": 4}
    await collect(prompts=prompts(30), out=tmp_path / "few.jsonl", groups=5, **arguments)
    await collect(prompts=prompts(30), out=tmp_path / "more.jsonl", groups=12, resume=True, **arguments)

    assert len(ids(tmp_path / "more.jsonl")) == 12
    assert set(ids(tmp_path / "few.jsonl")) <= set(ids(tmp_path / "more.jsonl"))


async def test_the_file_can_be_made_again_from_the_run(tmp_path):
    async def never(ctx):
        raise AssertionError("no session is needed")

    arguments = {"run": tmp_path / "run", "group_size": 2}
    await collect(prompts=prompts(5), out=tmp_path / "a.jsonl", session=half_right, **arguments)
    await collect(prompts=prompts(5), out=tmp_path / "b.jsonl", session=never, resume=True, **arguments)

    assert sorted(map(str, lines(tmp_path / "a.jsonl"))) == sorted(map(str, lines(tmp_path / "b.jsonl")))


async def test_resuming_what_never_began_begins(tmp_path):
    done = await collect(
        prompts=prompts(2), out=tmp_path / "a.jsonl", run=tmp_path / "run", session=half_right, resume=True
    )

    assert done.accepted == 2


# What can't be ---------------------------------------------------------------------------------------


async def test_a_run_that_is_there_is_not_begun_again(tmp_path):
    arguments = {"prompts": prompts(2), "run": tmp_path / "run", "session": half_right}
    await collect(out=tmp_path / "a.jsonl", **arguments)

    with pytest.raises(BadInput, match="holds a run already; pass --resume"):
        await collect(out=tmp_path / "b.jsonl", **arguments)


async def test_another_directory_is_not_made_a_run(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").touch()
    with pytest.raises(NotARun, match="holds something else than a run"):
        await collect(prompts=prompts(2), out=tmp_path / "a.jsonl", run=tmp_path / "photos", session=half_right)


async def test_a_file_is_not_made_a_run(tmp_path):
    (tmp_path / "x").touch()
    with pytest.raises(NotARun, match="is a file"):
        await collect(prompts=prompts(2), out=tmp_path / "a.jsonl", run=tmp_path / "x", session=half_right)


async def test_an_existing_file_is_never_overwritten_unasked(tmp_path):
    out = tmp_path / "rows.jsonl"
    out.write_text("precious\n")
    with pytest.raises(BadInput, match="is there already"):
        await collect(prompts=prompts(2), out=out, session=half_right)

    assert out.read_text() == "precious\n"
    await collect(prompts=prompts(2), out=out, session=half_right, overwrite=True)
    assert len(ids(out)) == 2


async def test_a_file_that_comes_meanwhile_is_not_overwritten(tmp_path):
    out = tmp_path / "rows.jsonl"

    async def session(ctx):
        out.write_text("precious\n")
        return Trajectory(reward=1.0)

    with pytest.raises(BadInput, match="is there already"):
        await collect(prompts=prompts(2), out=out, session=session)

    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("rows.jsonl", "precious\n")]


async def test_the_prompts_are_not_the_place_for_the_rows(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "q"}\n')
    with pytest.raises(BadInput, match="holds the prompts"):
        await collect(prompts=path, out=path, session=half_right, overwrite=True)


@pytest.mark.parametrize(
    ("name", "what"),
    [("rows.csv", "rows.csv' is none by its name"), ("no/rows.jsonl", "can't be written"), (".", "is a folder")],
)
async def test_places_that_cannot_be(tmp_path, name, what):
    with pytest.raises(BadInput, match=what):
        await collect(prompts=prompts(2), out=tmp_path / name, session=half_right)


@pytest.mark.parametrize("arguments", [{"groups": 0}, {"in_flight": 0}, {"rules": Rules(mode="sync")}])
async def test_settings_that_cannot_be(tmp_path, arguments):
    with pytest.raises(BadSettings):
        await collect(prompts=prompts(2), out=tmp_path / "a.jsonl", session=half_right, **arguments)


async def test_resume_needs_a_run(tmp_path):
    with pytest.raises(BadInput, match="resume needs a run directory"):
        await collect(prompts=prompts(2), out=tmp_path / "a.jsonl", session=half_right, resume=True)


async def test_a_missing_metric_is_an_error_and_leaves_no_file(tmp_path):
    with pytest.raises(MissingMetric, match="has no metric 'acc'"):
        await collect(
            prompts=prompts(2), out=tmp_path / "a.jsonl", session=half_right, rules=Rules(filter_metric="acc")
        )

    assert list(tmp_path.iterdir()) == []


async def test_evictions_without_end_are_an_error(tmp_path):
    rules = Rules(filter_metric="reward", eviction_streak_max=10, admission=Slots(n=2))
    with pytest.raises(EvictionStreak):
        await collect(
            prompts=prompts(99), out=tmp_path / "a.jsonl", session=only_every(1000, 0.0), rules=rules, group_size=2
        )


async def test_a_dead_engine_is_an_error(tmp_path):
    from groupstate.engines.scripted import ScriptedEngine

    engine = ScriptedEngine(lambda prompt_ids: [65])
    await engine.aclose()

    async def session(ctx):
        return ctx.trajectory([1], await ctx.generate([1]), reward=1.0)

    with pytest.raises(RolloutDied):
        await collect(prompts=prompts(9), out=tmp_path / "a.jsonl", session=session, engine=engine, group_size=2)
