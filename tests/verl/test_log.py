"""The log of a run of verl: what it tells, and how a run goes on with it after its process is gone."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from groupstate.cli import main
from groupstate.core import events as ev
from groupstate.core.invariants import violations
from groupstate.errors import LogInUse
from groupstate.integrations.verl import ReplayBuffer
from groupstate.log.file import FileLog
from tests.verl.producing import Queue, Refiller, construct

Make = Callable[..., Any]

ASYNC = {"trainer_mode": "separate_async"}


@pytest.fixture
def training(transfer_queue: Any) -> Any:
    """verl's partition of training groups, whose log is the one that is configured."""
    made = Queue("train")
    yield made
    made.clear()


def records(path: Path) -> list[ev.Record]:
    """What is in a log that nobody writes any more; it must be one that can be true."""
    log = FileLog.open(path, inline=True)
    found = list(log.read())
    with pytest.raises(StopIteration):
        log.aclose().send(None)
    assert [str(violation) for violation in violations(found)] == []
    return found


def events(path: Path, *kinds: type[ev.Event]) -> list[Any]:
    return [record.event for record in records(path) if isinstance(record.event, kinds)]


def shell(*words: str | Path) -> str:
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.output


# What it tells -------------------------------------------------------------------------------------------


def test_the_commands_work_on_the_log_of_a_run(make: Make, training: Queue, tmp_path: Path) -> None:
    run = tmp_path / "run"
    buffer = make(**ASYNC, sampler_kwargs={"log": str(run)}, filter_groups_metric="acc", refill_fn=Refiller(training))
    training.group("flat", "finished", 1.0, 1.0, response_len=5)
    training.group("mixed", "finished", 0.0, 1.0, response_len=5, min_global_steps=1, max_global_steps=1)
    training.group("flying", "running")
    training.take(buffer, 2, global_steps=1)

    # While it is written, from another process's point of view.
    assert "zero_variance" in shell("log", run)
    assert "running" in shell("show", run)
    assert "batch 1" in shell("why", run, "mixed")
    shell("check", run)
    shell("report", run, "--out", tmp_path / "page.html")
    buffer.close()
    shell("check", run)


def test_a_wait_is_one_request_and_a_step_that_is_over_is_committed(
    make: Make, training: Queue, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    buffer = make(sampler_kwargs={"log": str(run)})
    training.group("a", "finished", 0.0)
    training.group("b", "finished", 0.0)
    training.take(buffer, 1, global_steps=1)
    training.take(buffer, 1, global_steps=1)
    assert events_of(buffer, ev.BatchCommitted) == []
    training.group("c", "finished", 0.0)
    training.take(buffer, 1, global_steps=2)
    buffer.close()

    assert [event.batch for event in events(run, ev.BatchCommitted)] == [1, 2]
    assert [event.weight_version for event in events(run, ev.BatchSampled)] == [1, 1, 2]
    assert events(run, ev.BatchRequestCancelled) == []


def events_of(buffer: ReplayBuffer, *kinds: type[ev.Event]) -> list[Any]:
    """So far, in the log of training groups."""
    records = buffer._runs["train"].feed.ledger.log.read()
    return [record.event for record in records if isinstance(record.event, kinds)]


def test_what_a_look_led_to_is_flushed_once(make: Make, training: Queue, tmp_path: Path) -> None:
    buffer = make(sampler_kwargs={"log": str(tmp_path / "run")})
    for number in range(4):
        training.group(f"g{number}", "finished", 0.0, 1.0)
    buffer.get_sampleable_count(0, "train")
    commits: list[int] = []
    commit = buffer._runs["train"]._log._commit
    keep = commit._write
    commit._write = lambda given: (commits.append(given.count), keep(given))[1]
    for number in range(4, 8):
        training.group(f"g{number}", "finished", 0.0, 1.0)
    buffer.get_sampleable_count(0, "train")

    assert commits == [4 * 6]  # submitted, two started, two finished, its end


def test_training_and_validation_are_in_one_log(make: Make, training: Queue, tmp_path: Path) -> None:
    held_out = Queue("val")
    held_out.group("v", "finished", 1.0)
    training.group("t", "finished", 1.0)
    buffer = make(sampler_kwargs={"log": str(tmp_path / "run")})
    assert held_out.take(buffer, 1)[0] == ["v"]
    assert training.take(buffer, 1)[0] == ["t"]
    buffer.close()
    held_out.clear()

    assert [event.partition for event in events(tmp_path / "run", ev.BatchSampled)] == ["val", "train"]
    assert [event.batch for event in events(tmp_path / "run", ev.BatchCommitted)] == [1]


def test_another_partition_has_a_log_of_its_own(make: Make, queue: Queue, tmp_path: Path) -> None:
    queue.group("a", "finished", 1.0)
    buffer = make(sampler_kwargs={"log": str(tmp_path / "run")})
    queue.take(buffer, 1)

    assert sorted(os.listdir(tmp_path)) == ["run", f"run-{queue.partition}"]


def test_a_log_has_one_writer(make: Make, tmp_path: Path) -> None:
    make(sampler_kwargs={"log": str(tmp_path / "run")})
    with pytest.raises(LogInUse):
        make(sampler_kwargs={"log": str(tmp_path / "run")})


def test_a_buffer_that_is_forgotten_closes_its_log(tmp_path: Path, transfer_queue: Any) -> None:
    for _ in range(2):
        construct(ReplayBuffer, sampler_kwargs={"log": str(tmp_path / "run")}).get_sampleable_count(0, "train")

    assert [event.reason for event in events(tmp_path / "run", ev.RunClosed)] == ["closed", "closed"]


# Going on ------------------------------------------------------------------------------------------------


def go_on(make: Make, path: Path, **settings: Any) -> Any:
    return make(**{**ASYNC, **settings, "sampler_kwargs": {"log": str(path), **settings.get("sampler_kwargs", {})}})


def test_a_run_goes_on_where_the_queue_outlived_the_trainer(make: Make, training: Queue, tmp_path: Path) -> None:
    run, refill = tmp_path / "run", Refiller(training)
    first = go_on(make, run, refill_fn=refill)
    for uid in ("a", "b"):
        training.group(uid, "finished", 0.0)
    training.group("flying", "running", 0.0)
    training.take(first, 1, global_steps=1)
    first.close()
    second = go_on(make, run, refill_fn=refill)
    training.status("flying", "finished")

    # The batch of the unfinished step is lost with its prompt: verl's trainer has taken that out.
    assert training.take(second, 2, global_steps=1)[0] == ["b", "flying"]
    assert refill.calls == []
    assert training.listed() == {"b_0_0", "flying_0_0"}
    second.close()
    assert {e.group_id: e.reasons for e in events(run, ev.GroupEvicted)} == {"a": ("damaged",)}


def test_a_run_goes_on_where_the_queue_is_new(make: Make, training: Queue, tmp_path: Path) -> None:
    run, refill = tmp_path / "run", Refiller(training)
    first = go_on(make, run, refill_fn=refill)
    training.group("a", "finished", 0.0)
    training.group("b", "running", 0.0)
    assert first.get_sampleable_count(1, "train") == 1
    first.close()
    training.clear()
    second = go_on(make, run, refill_fn=refill)
    training.group("c", "finished", 0.0)

    assert training.take(second, 1, global_steps=1)[0] == ["c"]
    assert refill.calls == []  # The trainer fills up its batches ahead by itself.
    second.close()
    assert {e.group_id: e.reasons for e in events(run, ev.GroupEvicted)} == {"a": ("damaged",), "b": ("empty",)}


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def trained(make: Make, training: Queue, checkpoints: Path, *, saved: tuple[int, ...]) -> tuple[Any, Path]:
    """A run of three steps, of which the trainer saved these."""
    from omegaconf import OmegaConf

    config = OmegaConf.create(
        {"trainer": {"default_local_dir": str(checkpoints), "v1": {"sampler": {"sampler_kwargs": {}}}}}
    )

    def begin() -> Any:
        return make(**ASYNC, sampler_kwargs=config.trainer.v1.sampler.sampler_kwargs)

    buffer = begin()
    for step in (1, 2, 3):
        training.group(f"g{step}", "finished", 0.0, stamp=step)
        training.take(buffer, 1, global_steps=step)
        if step in saved:
            (checkpoints / f"global_step_{step}").mkdir(parents=True)
            (checkpoints / f"global_step_{step}" / "data.pt").touch()
    training.group("g4", "finished", 0.0, stamp=4)
    training.take(buffer, 1, global_steps=4)
    buffer.close()
    training.clear()
    return begin, checkpoints / "groupstate"


def test_a_trainer_that_goes_back_to_a_checkpoint_takes_the_log_with_it(
    make: Make, training: Queue, checkpoints: Path
) -> None:
    begin, run = trained(make, training, checkpoints, saved=(2,))
    # verl puts back what was listed at the checkpoint.
    training.group("g3", "finished", 0.0, stamp=3)
    again = begin()

    assert training.take(again, 1, global_steps=3)[0] == ["g3"]
    again.close()
    (rewound,) = events(run, ev.RunRewound)
    assert rewound.weight_version == 2
    assert [event.name for event in events(run, ev.CheckpointMarked)] == ["global_step_2"]
    assert not (run.parent / "groupstate-2").exists()


def test_without_a_mark_that_is_old_enough_another_log_is_begun(
    make: Make, training: Queue, checkpoints: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begin, run = trained(make, training, checkpoints, saved=())
    training.group("g2", "finished", 0.0, stamp=2)
    again = begin()

    assert training.take(again, 1, global_steps=2)[0] == ["g2"]
    assert again.log_path == f"{run}-2"
    assert "another log is begun" in caplog.text
    again.close()
    assert [event.group_ids for event in events(Path(f"{run}-2"), ev.BatchSampled)] == [("g2",)]


# Killed --------------------------------------------------------------------------------------------------

TRAINER = """
    import json, sys
    import ray
    ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    import transfer_queue as tq
    tq.init()
    from groupstate.integrations.verl import ReplayBuffer

    buffer = ReplayBuffer(
        trainer_mode="separate_async", trainer_config={}, max_off_policy_threshold=8, max_off_policy_strategy="drop",
        sampler_kwargs={"log": sys.argv[1]}, poll_interval=0.02, refill_fn=lambda count: count,
    )
    for step in range(1, 1000):
        batch, metrics = buffer.sample(global_steps=step, partition_id="train", batch_size=1)
        print(json.dumps(batch.keys), flush=True)
"""


def test_a_trainer_that_is_killed_goes_on_with_its_log(make: Make, training: Queue, tmp_path: Path) -> None:
    import ray

    run = tmp_path / "run"
    for number in range(5):
        training.group(f"g{number}", "finished", 0.0, stamp=1)
    environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    command = [sys.executable, "-c", textwrap.dedent(TRAINER), str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as trainer:
        assert trainer.stdout is not None
        taken = [json.loads(trainer.stdout.readline())[0].split("_")[0] for _ in range(3)]
        trainer.send_signal(signal.SIGKILL)
    second = go_on(make, run)
    left = 5 - len(training.uids())
    rest = [training.take(second, 1, global_steps=7)[0][0] for _ in range(5 - left)]
    second.close()

    # What was handed out before it was killed is not handed out again, and nothing else is lost.
    assert taken == ["g0", "g1", "g2"]
    assert rest == [f"g{number}" for number in range(left, 5)]
    records(run)
