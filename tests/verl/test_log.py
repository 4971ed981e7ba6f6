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

import attrs
import pytest
from click.testing import CliRunner
from omegaconf import OmegaConf

from groupstate.cli import main
from groupstate.core import events as ev
from groupstate.core.invariants import violations
from groupstate.errors import LogInUse, RunIsClosed
from groupstate.integrations.verl import ReplayBuffer
from groupstate.log.file import FileLog
from groupstate.log.lock import Holder
from groupstate.log.process import this_process
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


def test_a_run_that_does_all_as_verl_does_has_a_log_that_can_be_true(
    make: Make, training: Queue, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    kwargs = {"log": str(run), "strict": True, "filter_groups_metric": "acc", "rules": {"on_missing": "keep"}}
    buffer = make(**ASYNC, sampler_kwargs=kwargs, refill_fn=Refiller(training))
    training.group("flying", "running")
    training.group("empty", "finished")
    training.group("strange", "finished", float("nan"), 1.0)
    assert set(training.take(buffer, 2, global_steps=1)[0]) == {"strange"}
    training.status("flying", "pending", stamp=1)
    buffer.get_sampleable_count(1, "train")
    buffer.close()

    assert "nothing is wrong" in shell("check", run)
    assert "no number: acc" in shell("log", run)
    (sampled,) = events(run, ev.BatchSampled)
    assert set(sampled.group_ids) == {"empty", "strange"}
    assert [event.weight_version for event in events(run, ev.GroupRequeued)] == [1]


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


def test_its_name_is_another_for_each_partition(make: Make, transfer_queue: Any, tmp_path: Path) -> None:
    buffer = make(sampler_kwargs={"log": str(tmp_path / "run")})
    for partition in ("x_y", "x-y", "x/y", "x y", "X.é", "2", "x-2"):
        assert buffer.get_sampleable_count(1, partition) == 0

    names = {"run-x_y", "run-x-y", "run-x%2Fy", "run-x%20y", "run-X.%C3%A9", "run-%32", "run-x-%32"}
    assert set(os.listdir(tmp_path)) == {"run", *names}


def test_a_log_has_one_writer(make: Make, tmp_path: Path) -> None:
    make(sampler_kwargs={"log": str(tmp_path / "run")})
    with pytest.raises(LogInUse):
        make(sampler_kwargs={"log": str(tmp_path / "run")})


def test_a_buffer_of_which_nobody_asked_anything_lets_go_of_its_log(make: Make, tmp_path: Path) -> None:
    settings = {"sampler_kwargs": {"log": str(tmp_path / "run")}}
    first = make(**settings)
    first.close()
    first.close()

    assert make(**settings).log_path == str(tmp_path / "run")


def test_a_closed_buffer_answers_nothing_and_opens_nothing(
    make: Make, training: Queue, queue: Queue, tmp_path: Path
) -> None:
    buffer = make(sampler_kwargs={"log": str(tmp_path / "run")})
    buffer.close()
    for partition in ("train", queue.partition):
        for call in (buffer.sample, buffer.get_sampleable_count, buffer.wait_for_sampleable):
            with pytest.raises(RunIsClosed, match=rf"this ReplayBuffer was closed \(its log: {tmp_path}/run\)"):
                call(1, partition, *([1] if call != buffer.get_sampleable_count else []))

    assert os.listdir(tmp_path) == ["run"]


def test_a_log_is_taken_from_another_host_on_demand(make: Make, tmp_path: Path) -> None:
    run = tmp_path / "run"
    make(sampler_kwargs={"log": str(run)}).close()
    elsewhere = attrs.evolve(this_process(), host="elsewhere")
    (run / "log" / "lock").write_bytes(Holder("other", elsewhere, 5_000_000_000).encode())
    with pytest.raises(LogInUse, match="on host elsewhere"):
        make(sampler_kwargs={"log": str(run)})

    assert make(sampler_kwargs={"log": str(run), "take_over": True}).log_path == str(run)


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


def kill(buffer: Any) -> None:
    """Leave the log as a process that is killed does, but for its lock."""
    buffer._closer.detach()
    with pytest.raises(StopIteration):
        buffer._runs["train"]._log.aclose().send(None)


@attrs.define
class Trainer:
    """Trains steps, with verl's checkpoints in a folder."""

    make: Make
    training: Queue
    folder: Path
    buffer: Any = None

    @property
    def log(self) -> Path:
        return self.folder / "groupstate"

    def begin(self) -> "Trainer":
        tree = {"trainer": {"default_local_dir": str(self.folder), "v1": {"sampler": {"sampler_kwargs": {}}}}}
        config = OmegaConf.create(tree)
        self.buffer = self.make(**ASYNC, sampler_kwargs=config.trainer.v1.sampler.sampler_kwargs)
        return self

    def train(self, step: int) -> list[str]:
        """On a group of the step's own."""
        self.training.group(f"g{step}", "finished", 0.0, stamp=step)
        return self.sample(step)

    def sample(self, step: int) -> list[str]:
        return self.training.take(self.buffer, 1, global_steps=step)[0]

    def save(self, step: int) -> None:
        (self.folder / f"global_step_{step}").mkdir(parents=True)
        (self.folder / f"global_step_{step}" / "data.pt").touch()

    def end(self) -> None:
        """The trainer and TransferQueue are gone."""
        self.buffer.close()
        self.training.clear()


@pytest.fixture
def trainer(make: Make, training: Queue, tmp_path: Path) -> Trainer:
    return Trainer(make, training, tmp_path / "checkpoints").begin()


def trained(trainer: Trainer, *saved: int) -> Trainer:
    """Four steps, of which these were saved; then a trainer that starts again."""
    for step in (1, 2, 3, 4):
        trainer.train(step)
        if step in saved:
            trainer.save(step)
    trainer.end()
    return trainer.begin()


def test_a_trainer_that_goes_back_to_a_checkpoint_takes_the_log_with_it(trainer: Trainer) -> None:
    trained(trainer, 2)
    # verl puts back what was listed at the checkpoint.
    trainer.training.group("g3", "finished", 0.0, stamp=3)

    assert trainer.sample(3) == ["g3"]
    trainer.end()
    (rewound,) = events(trainer.log, ev.RunRewound)
    assert rewound.weight_version == 2
    assert [event.name for event in events(trainer.log, ev.CheckpointMarked)] == ["global_step_2"]
    assert not (trainer.folder / "groupstate-2").exists()


def test_so_it_does_where_it_validates_first(trainer: Trainer) -> None:
    trained(trainer, 2)
    held_out = Queue("val")
    held_out.group("v", "finished", 0.0)
    trainer.training.group("g3", "finished", 0.0, stamp=3)

    assert held_out.take(trainer.buffer, 1, global_steps=2)[0] == ["v"]
    assert trainer.sample(3) == ["g3"]
    held_out.clear()
    trainer.end()
    assert [event.weight_version for event in events(trainer.log, ev.RunRewound)] == [2]


def test_a_group_that_was_in_flight_at_the_checkpoint_and_is_dispatched_again_is_sampled_when_it_ends(
    trainer: Trainer,
) -> None:
    trained(trainer, 2)
    # verl puts back what was listed at the checkpoint, and dispatches anew what was in flight then.
    trainer.training.status("g3", "pending", stamp=2)
    trainer.training.status("g4", "running", stamp=2)
    assert trainer.buffer.get_sampleable_count(3, "train") == 0
    trainer.training.group("g4", "finished", 0.0, stamp=2)

    assert trainer.sample(3) == ["g4"]
    assert trainer.training.uids() == {"g3"}
    trainer.training.group("g3", "finished", 0.0, 1.0, stamp=2)
    assert trainer.buffer.wait_for_sampleable(4, "train", 1)[0] == {"g3"}
    assert trainer.sample(4) == ["g3"]
    assert trainer.training.uids() == set()
    trainer.end()
    assert [event.group_ids for event in events(trainer.log, ev.BatchSampled)][-2:] == [("g4+2",), ("g3+2",)]


def test_so_it_is_when_the_trainer_dies_again_meanwhile(trainer: Trainer) -> None:
    trained(trainer, 2)
    trainer.training.status("g3", "pending", stamp=2)
    assert trainer.buffer.get_sampleable_count(3, "train") == 0
    kill(trainer.buffer)
    trainer.begin()
    assert trainer.buffer.get_sampleable_count(3, "train") == 0
    trainer.training.group("g3", "finished", 0.0, 1.0, stamp=2)

    assert trainer.sample(3) == ["g3"]
    trainer.end()
    assert [event.group_id for event in events(trainer.log, ev.GroupSubmitted)] == ["g1", "g2", "g3", "g4", "g3+2"]


def test_it_is_dispatched_a_third_time_where_that_one_has_ended_too(trainer: Trainer) -> None:
    trained(trainer, 2)
    for _ in range(2):
        trainer.training.status("g3", "running", stamp=2)
        assert trainer.buffer.get_sampleable_count(3, "train") == 0
        trainer.training.group("g3", "finished", 0.0, 1.0, stamp=2)
        assert trainer.buffer.get_sampleable_count(3, "train") == 1
        kill(trainer.buffer)
        trainer.training.clear()
        trainer.training.status("g3", "pending", stamp=2)
        trainer.begin()
        assert trainer.buffer.get_sampleable_count(3, "train") == 0
        kill(trainer.buffer)
        trainer.begin()

    assert trainer.training.uids() == {"g3"}
    trainer.training.group("g3", "finished", 0.0, 1.0, stamp=2)
    assert trainer.sample(3) == ["g3"]
    trainer.end()
    submitted = [event.group_id for event in events(trainer.log, ev.GroupSubmitted)]
    assert submitted == ["g1", "g2", "g3", "g4", "g3+2", "g3+3", "g3+4"]


@pytest.mark.parametrize(("kwargs", "stamp"), [({}, 3), ({"restart_age": "restart"}, 2)])
def test_it_is_as_old_as_it_was_or_as_the_restart(
    trainer: Trainer, make: Make, kwargs: dict[str, Any], stamp: int
) -> None:
    trained(trainer, 2)
    trainer.buffer.close()
    run = trainer.log
    buffer = make(**ASYNC, sampler_kwargs={"log": str(run), **kwargs})
    trainer.training.status("g4", "pending", stamp=2)
    trainer.training.status("g3", "pending", stamp=2)
    buffer.get_sampleable_count(3, "train")
    buffer.close()

    assert [event.weight_version for event in events(run, ev.GroupSubmitted) if event.group_id == "g3+2"] == [stamp]


def test_without_a_mark_another_log_is_begun(trainer: Trainer, caplog: pytest.LogCaptureFixture) -> None:
    trained(trainer)
    trainer.training.group("g2", "finished", 0.0, stamp=2)

    assert trainer.sample(2) == ["g2"]
    assert trainer.buffer.log_path == f"{trainer.log}-2"
    assert "another log is begun" in caplog.text
    trainer.end()
    assert [event.group_ids for event in events(Path(f"{trainer.log}-2"), ev.BatchSampled)] == [("g2",)]


def test_what_a_checkpoint_holds_was_trained_on(trainer: Trainer) -> None:
    """The trainer was killed behind the checkpoint, and before it asked for more."""
    trainer.train(1)
    trainer.train(2)
    trainer.save(2)
    kill(trainer.buffer)
    trainer.training.clear()
    trainer.begin()

    assert trainer.train(3) == ["g3"]
    trainer.end()
    assert [event.batch for event in events(trainer.log, ev.BatchCommitted)] == [1, 2]
    assert events(trainer.log, ev.GroupEvicted) == []


def test_a_trainer_that_ends_behind_a_checkpoint_has_trained_on_all(trainer: Trainer) -> None:
    trainer.train(1)
    trainer.save(1)
    trainer.end()

    assert [event.batch for event in events(trainer.log, ev.BatchCommitted)] == [1]
    assert [event.name for event in events(trainer.log, ev.CheckpointMarked)] == ["global_step_1"]


def test_a_validation_round_that_was_cut_off_is_in_nobody_s_way(trainer: Trainer) -> None:
    held_out = Queue("val")
    held_out.group("ended", "finished", 0.0)
    held_out.group("flying", "running", 0.0)
    assert trainer.buffer.get_sampleable_count(0, "val") == 1
    kill(trainer.buffer)
    held_out.clear()
    trainer.begin()
    held_out.group("next", "finished", 0.0)

    assert held_out.take(trainer.buffer, 1)[0] == ["next"]
    held_out.clear()


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
