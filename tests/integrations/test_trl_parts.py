"""What of the rollout worker for TRL needs no TRL. The rest is in tests/stacks."""

import importlib.util
import queue
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from groupstate import Rules, Trajectory, open_run
from groupstate.engines.scripted import ScriptedEngine
from groupstate.errors import BadInput, BadMark, BadSettings, MissingExtra, SampleError
from groupstate.integrations import trl, trl_rows

needs_httpx = pytest.mark.skipif(importlib.util.find_spec("httpx") is None, reason="httpx isn't installed")


class Words:
    """A tokenizer of numbers, with a chat template that begins with 1 and ends with 2."""

    def apply_chat_template(self, messages: Any, *, add_generation_prompt: bool, return_dict: bool, **more: Any) -> Any:
        assert add_generation_prompt
        assert not return_dict
        return [1, *(int(message["content"]) for message in messages), *more.get("tail", ()), 2]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return " ".join(map(str, token_ids))


async def outcome(session: Any, **extra: Any) -> Any:
    """The trajectory of one session, or how it failed."""
    engine = ScriptedEngine(lambda prompt_ids: [prompt_ids[1], 9], log_prob=-0.5)
    rules = Rules(mode="sync", failure="keep", empty="keep")
    prompt = {"prompt": [{"role": "user", "content": "5"}], **extra}
    async with open_run(rules=rules, source=[prompt], session=session, engine=engine, group_size=1) as run:
        (group,) = (await run.sample(1)).groups
        if not group.sessions:
            return run.explain().last_failure or "failed"
        return group.sessions[0][1][0]


def told(**given: Any) -> list[float]:
    """Keeps what a reward function is called with."""
    told.given = given  # type: ignore[attr-defined]
    return [0.25]


async def half(completions: Any, **others: Any) -> list[float]:
    return [0.5]


def nothing(**others: Any) -> list[None]:
    return [None]


async def test_reward_functions_are_called_as_trl_calls_them() -> None:
    row = await outcome(trl.chat_session([told, half, nothing], Words()), answer="5")

    assert told.given == {  # type: ignore[attr-defined]
        "prompts": [[{"role": "user", "content": "5"}]],
        "completions": [[{"role": "assistant", "content": "5 9"}]],
        "completion_ids": [[5, 9]],
        "answer": ["5"],
    }
    assert dict(row.metrics) == {"rewards/told": 0.25, "rewards/half": 0.5, "reward": 0.75}
    assert (list(row.prompt_ids), list(row.response_ids), row.text) == ([1, 5, 2], [5, 9], "5 9")


async def test_options_of_the_chat_template_are_handed_on() -> None:
    row = await outcome(trl.chat_session(half, Words(), chat_template_kwargs={"tail": (7,)}))

    assert list(row.prompt_ids) == [1, 5, 7, 2]


async def test_an_answer_that_nobody_scores_is_a_failed_session() -> None:
    assert await outcome(trl.chat_session(nothing, Words())) == "failed"


@pytest.mark.parametrize("given", [[], None, ["half"]], ids=["none", "no_function", "a_name"])
def test_reward_functions_that_are_none_are_refused(given: Any) -> None:
    with pytest.raises(BadSettings, match=r"reward_funcs is .*; it must be a function"):
        trl.chat_session(given, Words())


@pytest.fixture
async def server() -> AsyncIterator[Any]:
    http_server = pytest.importorskip("tests.engines.http_server", reason="httpx isn't installed")
    server = http_server.HttpServer()
    await server.start()
    yield server
    await server.stop()


@needs_httpx
async def test_the_server_of_the_trainer_is_told_its_versions_and_never_given_weights(server: Any) -> None:
    from groupstate.engines.port import Request
    from tests.engines.http_server import Fault

    async with trl.vllm_server(SimpleNamespace(vllm_server_base_url=server.url)) as engine:
        before = await engine.generate(Request([5]))
        await engine.publish_weights(trl.BY_THE_TRAINER, 1)
        server.faults.append(Fault(cut_before=True))
        after = await engine.generate(Request([5]))

    assert [span.weight_version for span in before.spans] == [0]
    assert [span.weight_version for span in after.spans] == [1]
    assert not [call for call in server.calls if "weight" in call]


def test_sampling_parameters_are_those_of_the_trainer() -> None:
    off = {"temperature": 0.8, "top_p": 0.9, "max_completion_length": 32, "top_k": 0, "min_p": None}
    args = SimpleNamespace(**off, repetition_penalty=1.0)
    plain = trl.sampling_params(args)
    args.top_k, args.min_p, args.repetition_penalty = 20, 0.1, 1.2

    assert (plain.temperature, plain.top_p, plain.max_tokens, plain.extra) == (0.8, 0.9, 32, {})
    assert trl.sampling_params(args).extra == {"top_k": 20, "min_p": 0.1, "repetition_penalty": 1.2}


def test_the_environments_tokens_are_context() -> None:
    row = Trajectory(
        prompt_ids=[1, 2], response_ids=[3, 4, 5], log_probs=[-1.0, 0.0, -2.0], environment=[(1, 2)], reward=1.0
    )
    arrays = pytest.importorskip("numpy") and trl_rows.arrays(row)

    assert arrays["input_ids"].tolist() == [1, 2, 3, 4, 5]
    assert arrays["completion_mask"].tolist() == [0, 0, 1, 0, 1]
    assert arrays["old_log_probs"].tolist() == [0, 0, -1, 0, -2]


async def test_rows_of_a_session_share_its_last_reward_and_partial_groups_their_survivors() -> None:
    pytest.importorskip("numpy")

    async def session(ctx: Any) -> list[Trajectory]:
        if ctx.session == 2:
            raise RuntimeError("no sandbox")
        row = {"prompt_ids": [1], "response_ids": [2], "log_probs": [-1.0]}
        return [Trajectory(**row, reward=9.0), Trajectory(**row, reward=float(ctx.session))]

    async with open_run(rules=Rules(survivors_min=2), source=["one"], session=session, group_size=3) as run:
        (group,) = (await run.sample(1)).groups
    rows = list(trl_rows.group_rows(group, 7, 5))

    assert [row["advantage"] for row in rows] == pytest.approx([-1, -1, 1, 1], abs=1e-6)
    assert [row["metrics"]["reward"] for row in rows] == [0, 0, 1, 1]
    assert {(row["group_id"], row["model_version"]) for row in rows} == {(7, 5)}
    assert rows[0]["prompt"] == [{"role": "user", "content": "one"}]


async def test_a_session_without_a_reward_is_told_by_name() -> None:
    async def session(ctx: Any) -> Trajectory:
        return Trajectory(response_ids=[1], metrics={"score": 1.0})

    async with open_run(source=["one"], session=session, group_size=1) as run:
        (group,) = (await run.sample(1)).groups

    with pytest.raises(BadInput, match=r"session 0 of group 'g1' has no metric 'reward', .*; it has 'score'"):
        list(trl_rows.group_rows(group, 1, 0))


def test_a_row_of_a_data_set_is_a_prompt_with_its_columns_for_the_rewards() -> None:
    prompt = trl.prompt_of_row({"prompt": [{"role": "user", "content": "1"}], "answer": "1", "n": 4})

    assert prompt.extra == {"answer": "1", "n": 4}
    assert prompt.n is None
    with pytest.raises(BadInput, match="a row of train_dataset has no 'prompt'; it has 'question'"):
        trl.prompt_of_row({"question": "1"})


def test_a_checkpoint_without_a_mark_is_told_by_name(tmp_path: Any) -> None:
    with pytest.raises(BadMark, match=r"has no groupstate_mark.json; .*worker.callback\(\)"):
        trl.checkpoint_mark(tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("trl") is not None, reason="trl is installed")
def test_without_trl_the_worker_names_the_extra() -> None:
    with pytest.raises(MissingExtra, match=r"needs trl; install the extra 'trl'"):
        trl.RolloutWorker(SimpleNamespace(), rules=Rules(lag_max=1))


# What the trainer takes rows from ------------------------------------------------------------------------


class Batches:
    """A worker that has batches of rows, and nothing else."""

    def __init__(self, *batches: Any) -> None:
        self.batches = list(batches)
        self.asked: list[Future[Any]] = []
        self.done: list[int] = []

    def ask(self) -> "Future[Any]":
        future: Future[Any] = Future()
        if self.batches:
            answer = self.batches.pop(0)
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(SimpleNamespace(number=len(self.asked), rows=answer))
        self.asked.append(future)
        return future

    def rows_of(self, batch: Any) -> list[Any]:
        return list(batch.rows)

    def sampleable_rows(self) -> int:
        return 0

    def handed(self, batch: int) -> None:
        self.done.append(batch)


def interrupted_at(count: int, call: Callable[[], Any]) -> bool:
    """Call, with a Ctrl-C before so many lines of `_draw` have run; whether it came to that."""
    left = [count]

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code is not trl.RowBuffer._draw.__code__:
            return None
        if event == "line":
            if left[0] == 0:
                raise KeyboardInterrupt
            left[0] -= 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_a_trainer_that_is_interrupted_while_it_draws_loses_no_row() -> None:
    lines = 0
    came = True
    while came:
        worker: Any = Batches(["a", "b"], ["c"])
        buffer = trl.RowBuffer(worker)
        first: list[Any] = []
        came = interrupted_at(lines, lambda buffer=buffer, first=first: first.append(buffer.get()))
        rows = [*first, *(buffer.get() for _ in range(3 - len(first)))]
        assert (rows, worker.done) == (["a", "b", "c"], [0, 1]), f"interrupted before line {lines}"
        lines += 1

    assert lines > 6


def test_an_error_is_told_once_and_the_run_is_asked_anew() -> None:
    worker: Any = Batches(SampleError("no more"), ["a"])
    buffer = trl.RowBuffer(worker)
    with pytest.raises(SampleError, match="no more"):
        buffer.get()

    assert buffer.get() == "a"


def test_a_wait_in_vain_keeps_its_place() -> None:
    worker: Any = Batches()
    buffer = trl.RowBuffer(worker)
    for _ in range(2):
        with pytest.raises(queue.Empty):
            buffer.get(timeout=0.0)

    (asked,) = worker.asked
    buffer.forget()
    assert asked.cancelled()
    with pytest.raises(queue.Empty):
        buffer.get_nowait()
    assert len(worker.asked) == 2


def test_what_was_not_taken_is_forgotten() -> None:
    worker: Any = Batches(["a", "b"], ["c"])
    buffer = trl.RowBuffer(worker)
    assert buffer.get() == "a"
    buffer.forget()

    assert (buffer.qsize(), buffer.get(), worker.done) == (0, "c", [1])


def test_an_error_that_nobody_waits_for_any_more_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    worker: Any = Batches()
    buffer = trl.RowBuffer(worker)
    with pytest.raises(queue.Empty):
        buffer.get(timeout=0.0)
    worker.asked[0].set_exception(SampleError("the rollout died"))
    buffer.forget()

    assert "the trainer stopped before it heard of an error" in caplog.text
    assert "the rollout died" in caplog.text
