"""TRL's own AsyncGRPOTrainer, training a tiny model with this rollout worker."""

import asyncio
import queue
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutGroup, TrainingSequence, _AsyncRolloutLoop

from groupstate import PerBatch, Rules, SessionContext, Trajectory
from groupstate.core import events as ev
from groupstate.core.invariants import violations
from groupstate.engines.scripted import ScriptedEngine
from groupstate.errors import BadSettings
from groupstate.integrations.trl import RolloutWorker, chat_session, checkpoint_mark
from groupstate.log.reading import read_log

GROUP_SIZE = 2

QUESTIONS = Dataset.from_list(
    [{"prompt": [{"role": "user", "content": str(number)}], "answer": str(number)} for number in range(4)]
)


class NoTransfer:
    """TRL's weight transfer, to nowhere."""

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def send_weights(self, iterator: Any) -> None:
        for _ in iterator:
            pass

    def resume(self) -> None: ...

    def destroy(self) -> None: ...


def config(folder: Path, **changes: Any) -> AsyncGRPOConfig:
    settings = {
        "output_dir": str(folder / "out"),
        "num_generations": GROUP_SIZE,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "max_steps": 3,
        "max_completion_length": 4,
        "max_staleness": 3,
        "token_budget": 0,
        "report_to": [],
        "save_strategy": "no",
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        **changes,
    }
    return AsyncGRPOConfig(**settings)


def says(prompt_ids: Any) -> list[int]:
    """The number that was asked for, and then another one each time."""
    says.calls += 1  # type: ignore[attr-defined]
    return [prompt_ids[1], 5 + says.calls % 2, 1]  # type: ignore[attr-defined]


says.calls = 0  # type: ignore[attr-defined]


def is_even(completions: Any, answer: Any, **others: Any) -> list[float]:
    (completion,), (_,) = completions, answer
    return [float(completion[0]["content"].endswith("0"))]


def attention(query: Any, key: Any, value: Any, ends: Any, key_ends: Any, *lengths: int, **options: Any) -> Any:
    """What the kernel does: each run of queries looks at its own keys, the last query at all of them."""
    found = []
    for number in range(len(ends) - 1):
        rows = slice(ends[number], ends[number + 1])
        columns = slice(key_ends[number], key_ends[number + 1])
        q, k, v = query[rows].transpose(0, 1), key[columns].transpose(0, 1), value[columns].transpose(0, 1)
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, scale=options["softmax_scale"], enable_gqa=True
        )
        found.append(out.transpose(0, 1))
    return torch.cat(found)


Trainer = Callable[..., AsyncGRPOTrainer]


@pytest.fixture
def trainer(model_folder: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    # What the trainer has for GPUs alone: the device's name, to know how fast it could be, and a kernel.
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device=None: "none")
    kernel = SimpleNamespace(flash_attn_varlen_func=attention)
    monkeypatch.setattr("trl.experimental.async_grpo.packing._flash_attn", lambda: kernel)

    def made(args: AsyncGRPOConfig, worker: RolloutWorker) -> AsyncGRPOTrainer:
        return AsyncGRPOTrainer(
            model=str(model_folder),
            args=args,
            train_dataset=QUESTIONS,
            processing_class=tokenizer,
            rollout_worker=worker,
            weight_transfer=NoTransfer(),
        )

    return made


def events_of(path: Path) -> list[Any]:
    records = list(read_log(path))
    assert violations(records) == []
    return [record.event for record in records]


def kinds(events: list[Any], kind: type) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def test_the_trainer_trains_on_groups_that_the_rules_let_through(
    trainer: Trainer, tokenizer: Any, tmp_path: Path
) -> None:
    args = config(tmp_path)
    worker = RolloutWorker(
        args,
        QUESTIONS,
        path=tmp_path / "run",
        rules=Rules(lag_max=1),
        session=chat_session(is_even, tokenizer),
        engine=ScriptedEngine(says),
    )
    training = trainer(args, worker)
    training.train()

    events = events_of(tmp_path / "run")
    assert training.state.global_step == 3
    assert len(kinds(events, ev.BatchSampled)) >= 3
    assert [event.weight_version for event in kinds(events, ev.WeightsPublished)] == [2, 3, 4]
    assert kinds(events, ev.BatchCommitted)[0].batch == 1
    assert isinstance(events[-1], ev.RunClosed)


def test_rows_are_those_that_trl_makes_of_a_group(tmp_path: Path, tokenizer: Any) -> None:
    worker = RolloutWorker(
        config(tmp_path), QUESTIONS, rules=Rules(lag_max=1), session=chat_session(is_even, tokenizer),
        engine=ScriptedEngine(says, log_prob=-0.5),
    )  # fmt: skip
    worker.update_model_version(1)
    worker.start()
    rows = [worker.rollout_buffer.get(timeout=30) for _ in range(4)]
    worker.stop()

    first, second = rows[:2]
    assert [row.group_id for row in rows] == [1, 1, 2, 2]
    assert first.prompt == [{"role": "user", "content": "0"}]
    assert first.completion[0]["content"].split()[0] == "0"
    assert first.input_ids.tolist()[:3] == tokenizer("ask 0 say")["input_ids"]
    assert first.completion_mask.tolist() == [0, 0, 0, 1, 1, 1]
    assert first.old_log_probs.tolist() == [0, 0, 0, -0.5, -0.5, -0.5]
    assert first.model_version == 1
    assert sorted([first.advantage, second.advantage]) == pytest.approx([-1, 1], abs=1e-6)
    assert {first.metrics["reward"], second.metrics["reward"]} == {0.0, 1.0}
    assert first.metrics["reward_std"] == 0.5
    assert {"rewards/is_even", "reward", "reward_std"} <= first.metrics.keys()


def test_rows_are_those_of_trls_own_worker(tmp_path: Path) -> None:
    """TRL's loop scores a group with the same rewards and tokens."""
    rewards = [0.0, 0.25, 1.0, 1.0]

    async def session(ctx: SessionContext) -> Trajectory:
        return Trajectory(
            prompt_ids=[3, 5], response_ids=[6, 1], log_probs=[-1.0, -2.0], reward=rewards[ctx.session], text="1"
        )

    args = config(tmp_path, num_generations=4)
    worker = RolloutWorker(args, QUESTIONS, rules=Rules(lag_max=1), session=session)
    worker.update_model_version(1)
    worker.start()
    ours = [worker.rollout_buffer.get(timeout=30) for _ in range(4)]
    worker.stop()
    sequence = TrainingSequence([3, 5, 6, 1], [0, 0, 1, 1], [0.0, 0.0, -1.0, -2.0], "conversation")
    loop = SimpleNamespace(
        reward_funcs=[], _env_reward_types=[], _provides_rollout_reward=True, reward_func_names=["reward"]
    )
    group = RolloutGroup(
        prompts=[QUESTIONS[0]["prompt"]] * 4, reward_kwargs={},
        completions=[[{"role": "assistant", "content": "1"}]] * 4, completions_ids=[[6, 1]] * 4,
        completions_sequences=[[sequence]] * 4, tool_call_counts=[0] * 4, tool_failure_counts=[0] * 4, model_version=1,
        group_id=1, env_rewards=[None] * 4, rollout_rewards=rewards,
    )  # fmt: skip
    theirs = asyncio.run(_AsyncRolloutLoop._score_group(loop, group))

    for name in ("input_ids", "completion_mask", "old_log_probs"):
        assert [getattr(row, name).tolist() for row in ours] == [getattr(row, name).tolist() for row in theirs]
        assert {getattr(row, name).dtype for row in ours} == {getattr(row, name).dtype for row in theirs}
    for name in ("prompt", "completion", "model_version", "group_id"):
        assert [getattr(row, name) for row in ours] == [getattr(row, name) for row in theirs]
    assert [row.advantage for row in ours] == pytest.approx([row.advantage for row in theirs], rel=1e-9)
    assert [row.metrics["reward_std"] for row in ours] == pytest.approx([row.metrics["reward_std"] for row in theirs])


def test_groups_without_a_signal_never_reach_the_trainer(trainer: Trainer, tokenizer: Any, tmp_path: Path) -> None:
    async def session(ctx: SessionContext) -> Trajectory:
        """Alike for every other question."""
        number = int(ctx.prompt.extra["answer"])
        return Trajectory(
            prompt_ids=[3, 5], response_ids=[6, 1], log_probs=[-1.0, -1.0], reward=float(ctx.session * (number % 2))
        )

    args = config(tmp_path, max_steps=2)
    worker = RolloutWorker(
        args, QUESTIONS, path=tmp_path / "run", rules=Rules(lag_max=1, filter_metric="reward"), session=session
    )
    training = trainer(args, worker)
    training.train()

    events = events_of(tmp_path / "run")
    evicted = {event.group_id for event in kinds(events, ev.GroupEvicted) if "zero_variance" in event.reasons}
    sampled = {group_id for event in kinds(events, ev.BatchSampled) for group_id in event.group_ids}
    assert evicted
    assert sampled
    assert not evicted & sampled
    logged = [entry for entry in training.state.log_history if "reward_std" in entry]
    assert logged
    assert all(entry["reward_std"] > 0 for entry in logged)
    assert any(name.startswith("groupstate/training/") for entry in logged for name in entry)


def test_a_failing_session_costs_its_group_and_not_the_training(trainer: Trainer, tmp_path: Path) -> None:
    async def session(ctx: SessionContext) -> Trajectory:
        if ctx.prompt.extra["answer"] == "0":
            raise RuntimeError("no sandbox")
        return Trajectory(prompt_ids=[3, 5], response_ids=[6, 1], log_probs=[-1.0, -1.0], reward=float(ctx.session))

    args = config(tmp_path, max_steps=2)
    worker = RolloutWorker(args, QUESTIONS, path=tmp_path / "run", rules=Rules(lag_max=1), session=session)
    training = trainer(args, worker)
    training.train()

    failed = kinds(events_of(tmp_path / "run"), ev.SessionFailed)
    assert training.state.global_step == 2
    assert {event.message for event in failed if event.failure == "error"} == {"RuntimeError: no sandbox"}


async def scored(ctx: SessionContext) -> Trajectory:
    return Trajectory(prompt_ids=[3], response_ids=[6], log_probs=[-1.0], reward=float(ctx.session))


def test_a_batch_is_committed_two_publications_after_its_last_row(tmp_path: Path) -> None:
    worker = RolloutWorker(config(tmp_path), QUESTIONS, rules=Rules(lag_max=1), session=scored)
    worker.update_model_version(1)
    worker.start()
    for _ in range(4):
        worker.rollout_buffer.get(timeout=30)
    out = [len(worker.run.book.batches)]
    for version in (2, 3):
        worker.update_model_version(version)
        out.append(len(worker.run.book.batches))
    worker.stop()

    assert out == [1, 1, 0]


def test_a_worker_can_be_started_again(tmp_path: Path) -> None:
    worker = RolloutWorker(config(tmp_path), QUESTIONS, rules=Rules(lag_max=1), session=scored)
    for _ in range(2):
        worker.update_model_version(1)
        worker.start()
        assert [worker.rollout_buffer.get(timeout=30).group_id for _ in range(4)]
        worker.stop()
    worker.update_model_version(1)
    worker.start()
    for version in (2, 3, 4):
        worker.update_model_version(version)
    worker.stop()


def test_rows_of_a_run_that_goes_on_have_the_trainers_versions(tmp_path: Path) -> None:
    versions = []
    for count in (4, 12):
        worker = RolloutWorker(
            config(tmp_path), QUESTIONS, path=tmp_path / "run", rules=Rules(lag_max=1), session=scored
        )
        worker.update_model_version(1)
        worker.start()
        worker.update_model_version(2)
        worker.update_model_version(3)
        versions += [worker.rollout_buffer.get(timeout=30).model_version for _ in range(count)]
        worker.stop()

    assert min(versions) >= 1
    assert max(versions) <= 3


def test_the_engine_is_closed_with_the_run(tmp_path: Path) -> None:
    class Closing(ScriptedEngine):
        closed = 0

        async def aclose(self) -> None:
            self.closed += 1
            await super().aclose()

    engine = Closing(says)
    worker = RolloutWorker(config(tmp_path), rules=Rules(lag_max=1), engine=engine)
    worker.update_model_version(3)
    worker.start()
    version = engine.weight_version
    worker.stop()

    assert (version, engine.closed) == (3, 1)


def test_several_steps_between_two_publications_need_less_room(tmp_path: Path) -> None:
    args = config(tmp_path, max_staleness=2, weight_sync_steps=2)

    RolloutWorker(args, QUESTIONS, rules=Rules(lag_max=1, batch_size=4))


def test_what_was_not_committed_comes_back_when_the_run_is_opened_again(tmp_path: Path) -> None:
    def started() -> RolloutWorker:
        worker = RolloutWorker(
            config(tmp_path), QUESTIONS, path=tmp_path / "run", session=scored,
            rules=Rules(lag_max=1, admission=PerBatch(warmup=0)),
        )  # fmt: skip
        worker.update_model_version(1)
        worker.start()
        return worker

    first = started()
    taken = [first.rollout_buffer.get(timeout=30).prompt for _ in range(4)]
    first.stop()
    second = started()
    again = [second.rollout_buffer.get(timeout=30).prompt for _ in range(4)]
    second.stop()

    assert again == taken


def test_a_run_goes_back_to_the_mark_beside_a_checkpoint(trainer: Trainer, tmp_path: Path) -> None:
    async def session(ctx: SessionContext) -> Trajectory:
        return Trajectory(prompt_ids=[3, 5], response_ids=[6, 1], log_probs=[-1.0, -1.0], reward=float(ctx.session))

    def training(steps: int, **options: Any) -> AsyncGRPOTrainer:
        args = config(tmp_path, max_steps=steps, save_strategy="steps", save_steps=2)
        rules = Rules(lag_max=1)
        worker = RolloutWorker(args, QUESTIONS, path=tmp_path / "run", rules=rules, session=session, **options)
        made = trainer(args, worker)
        made.add_callback(worker.callback())
        return made

    training(4).train()
    checkpoint = tmp_path / "out" / "checkpoint-2"
    mark = checkpoint_mark(checkpoint)
    training(4, resume_at=mark).train(resume_from_checkpoint=str(checkpoint))

    events = events_of(tmp_path / "run")
    (rewound,) = kinds(events, ev.RunRewound)
    assert mark.name == "checkpoint-2"
    assert rewound.mark == mark.mark
    assert max(event.weight_version for event in kinds(events, ev.WeightsPublished)) == mark.weight_version + 2


def test_an_error_of_the_run_reaches_the_trainer(trainer: Trainer, tmp_path: Path) -> None:
    async def session(ctx: SessionContext) -> Trajectory:
        raise RuntimeError("no sandbox")

    args = config(tmp_path)
    rules = Rules(lag_max=1, eviction_streak_max=3)
    worker = RolloutWorker(args, QUESTIONS, path=tmp_path / "run", rules=rules, session=session)

    with pytest.raises(Exception, match="no sandbox"):
        trainer(args, worker).train()
    assert isinstance(events_of(tmp_path / "run")[-1], ev.RunClosed)


def test_who_dispatches_by_himself_reports_through_the_run(tmp_path: Path) -> None:
    worker = RolloutWorker(config(tmp_path), rules=Rules(lag_max=1))
    worker.update_model_version(1)
    worker.start()
    for _ in range(2):
        group = worker.run.submit("one")
        for number in range(group.size):
            group.start(number).finish(
                Trajectory(prompt_ids=[3], response_ids=[6], log_probs=[-1.0], reward=float(number))
            )
    rows = [worker.rollout_buffer.get(timeout=30) for _ in range(4)]
    worker.stop()

    assert [row.metrics["reward"] for row in rows] == [0.0, 1.0, 0.0, 1.0]


def test_a_wait_in_vain_is_empty_and_then_says_what_it_waits_for(tmp_path: Path) -> None:
    worker = RolloutWorker(config(tmp_path), rules=Rules(lag_max=1))
    worker.start()

    with pytest.raises(queue.Empty):
        worker.rollout_buffer.get(timeout=0.05)
    with pytest.raises(queue.Empty):
        worker.rollout_buffer.get(timeout=0.05)
    waits = len(worker.run.book.waiting("train"))
    worker.check_health(300)
    with pytest.raises(RuntimeError, match=r"nothing has happened in the rollout .*\n.*0 of 2 groups are sampleable"):
        worker.check_health(0.0)
    worker.stop()

    assert waits == 1


@pytest.mark.parametrize(
    ("changes", "rules", "text"),
    [
        ({"max_staleness": 1}, {"lag_max": 1}, r"max_staleness=1 of the trainer .*\(max_staleness=2\)"),
        (
            {"max_staleness": 2},
            {"lag_max": 1, "batch_size": 4},
            r"max_staleness=2 of the trainer .*\(max_staleness=3\)",
        ),
        ({}, {}, "the rules bound no lag, .* Rules.lag_max=2."),
        ({}, {"lag_max": 1, "on_stale": "wait"}, "on_stale='drop'"),
    ],
    ids=["one_step", "two_steps", "no_bound", "wait"],
)
def test_what_would_break_groups_up_is_refused(
    tmp_path: Path, changes: dict[str, Any], rules: dict[str, Any], text: str
) -> None:
    with pytest.raises(BadSettings, match=text):
        RolloutWorker(config(tmp_path, **changes), QUESTIONS, rules=Rules(**rules))


def test_what_is_no_configuration_is_refused_by_name() -> None:
    with pytest.raises(BadSettings, match=r"args is SimpleNamespace, without num_generations; .*AsyncGRPOConfig"):
        RolloutWorker(SimpleNamespace(), rules=Rules(lag_max=1))
