"""A rollout worker for TRL's asynchronous GRPO trainer: TRL trains and moves the weights, groupstate runs the sessions.

The hook is the trainer's argument `rollout_worker`, whose interface TRL publishes as `RolloutWorkerProtocol`. The run
lives on an event loop in a thread of its own; the trainer's thread takes rows out of `rollout_buffer`.

Rule 1: groups are claimed when the trainer wants a row and has none, never ahead: the lag is that of the moment.
Rule 2: a group's rows go to the trainer one after the other, and none is dropped on the way. The trainer's own
`max_staleness`, which drops single rows, is checked to be wide enough never to act.
Rule 3: a batch is committed two publications after its last row was taken. By then it was trained on: the trainer
takes one micro-batch ahead, and its batcher keeps one row of another.
"""

import collections
import contextlib
import functools
import inspect
import math
import os
import queue
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio.from_thread
import anyio.to_thread
import attrs

from groupstate.batch import Batch
from groupstate.core.prompt import Prompt
from groupstate.core.rules import Rules
from groupstate.core.trajectory import Trajectory
from groupstate.engines.port import Engine, SamplingParams
from groupstate.errors import BadInput, BadMark, BadSettings, MissingExtra, RunIsClosed
from groupstate.integrations.trl_rows import group_rows, messages
from groupstate.log.rundir import RunDir
from groupstate.logs import Logger
from groupstate.runtime.opening import open_run
from groupstate.runtime.recovery import CheckpointMark
from groupstate.runtime.run import Run
from groupstate.runtime.session import SessionContext, SessionFunction, describe
from groupstate.runtime.sources import IteratorSource, ListSource

if TYPE_CHECKING:
    from groupstate.engines.openai import OpenAIEngine

log = Logger("groupstate.trl")

TESTED = "1.16.0"
"""The version of trl that the tests run."""

BY_THE_TRAINER = "the trainer's own"
"""What an engine is given as weights: a name, which can be given again to a server whose connection was lost."""

MARK_FILE = "groupstate_mark.json"

NOT_STARTED = "the rollout worker isn't started: the trainer does it when it begins to train, and stops it at the end"

PUBLICATIONS_TO_COMMIT = 2
"""See rule 3."""

OFFERED = (
    "prompt",
    "completion",
    "input_ids",
    "completion_mask",
    "old_log_probs",
    "advantage",
    "model_version",
    "group_id",
    "metrics",
)
"""What a row of TRL's can be given here."""

CONFIG = (
    "num_generations",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "world_size",
    "max_staleness",
    "weight_sync_steps",
    "max_completion_length",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
)
"""Options of TRL's that are read."""


class RolloutWorker:
    """What `AsyncGRPOTrainer(rollout_worker=...)` takes. Made in every process, it does something in the first alone.

    Made once and started by the trainer; `run` is the open run, for looking and for dispatching by yourself.
    """

    def __init__(
        self,
        args: Any,
        prompts: Any = None,
        *,
        rules: Rules,
        path: Any = None,
        session: SessionFunction | None = None,
        engine: Engine | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            args: the trainer's `AsyncGRPOConfig`; sizes and sampling parameters are taken from it.
            prompts: the trainer's `train_dataset`, gone through again and again as TRL does; or what `open_run` takes
                as `source`.
            rules: need a `lag_max`. Without a `batch_size` it is what one optimizer step takes.
            path: the run's directory; None keeps everything in memory.
            session: such as `chat_session(...)`; None if you dispatch by yourself, through `run`.
            engine: what `ctx.generate` uses, such as `vllm_server(args)`. It is closed with the run.
            options: others of `open_run`.

        Raises:
            BadSettings: an option of TRL's, or of the rules, that can't work; the text names it.
            MissingExtra: trl isn't installed.
        """
        self._row = _row_class()
        _need_config(args)
        self._rules = _checked_rules(args, rules)
        self._prompts = _source(prompts)
        self._options = {
            "session": session,
            "params": sampling_params(args) if session is not None else None,
            "group_size": args.num_generations,
            **options,
        }
        self._path = path
        self._engine = engine
        self._version = 0
        """The trainer's count of publications, which begins anew with each training."""
        self._ahead = 0
        """How much further the run's weight versions are, where it was opened again."""
        self._publications = 0
        self._handed: list[tuple[int, int]] = []
        """Batches that the trainer has whole, with the publications that there were then."""
        self._group_numbers = 0
        self._portal: anyio.from_thread.BlockingPortal | None = None
        self._run: Run | None = None
        self._open = contextlib.ExitStack()
        self._progress = (0, 0.0)
        """The log's last event when health was asked for, and when it was first seen."""
        self.rollout_buffer = RowBuffer(self)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()

    @property
    def run(self) -> Run:
        """The open run. Its plain methods may be called from any thread, its async ones by `call`.

        Raises:
            RunIsClosed: the trainer hasn't started it, or has stopped it.
        """
        if self._run is None:
            raise RunIsClosed(NOT_STARTED)
        return self._run

    def call(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call an async function on the run's event loop and wait: `worker.call(worker.run.checkpoint, "step 5")`.

        Raises:
            RunIsClosed: as `run`.
        """
        if self._portal is None:
            raise RunIsClosed(NOT_STARTED)
        return self._portal.call(functools.partial(function, *args, **options))

    # What the trainer calls --------------------------------------------------------------------------

    def start(self) -> None:
        """Open the run. The trainer calls it once it has brought its weights to the server.

        Raises:
            What `open_run` raises.
        """
        if self._run is not None:
            return
        with contextlib.ExitStack() as opening:
            self._portal = opening.enter_context(anyio.from_thread.start_blocking_portal("asyncio"))
            self._run = opening.enter_context(self._portal.wrap_async_context_manager(self._opened()))
            self._open = opening.pop_all()
        self._progress = (self._run.book.last_seq, time.monotonic())

    @contextlib.asynccontextmanager
    async def _opened(self) -> AsyncIterator[Run]:
        engine, resume_at = self._engine, self._options.get("resume_at")
        version = resume_at.weight_version if resume_at is not None else self._version
        async with contextlib.AsyncExitStack() as stack:
            if engine is not None and hasattr(engine, "aclose"):
                stack.push_async_callback(engine.aclose)
            await _tell(engine, version)
            options = {"weight_version": None if _was_begun(self._path) else version, **self._options}
            run = await stack.enter_async_context(
                open_run(self._path, rules=self._rules, source=self._prompts(), engine=engine, **options)
            )
            self._ahead = run.weight_version - self._version
            await _tell(engine, run.weight_version)
            yield run

    def stop(self) -> None:
        """Close the run. Batches that aren't committed come back when it is opened again."""
        self.rollout_buffer.forget()
        self._handed.clear()
        self._run = None
        self._open.close()
        self._portal = None

    def update_model_version(self, model_version: int) -> None:
        """The trainer's weights are at the server, under this version.

        Raises:
            WeightVersionError: it is below the current one.
        """
        self._version = model_version
        if self._run is None:
            return
        weights = None if self._engine is None else BY_THE_TRAINER
        self.call(self._run.publish_weights, model_version + self._ahead, weights)
        self._publications += 1
        while self._handed and self._handed[0][1] + PUBLICATIONS_TO_COMMIT <= self._publications:
            self.call(self._run.commit, self._handed.pop(0)[0])

    def check_health(self, stale_after_s: float) -> None:
        """Asked by the trainer each time that it has waited for a row in vain.

        Raises:
            RuntimeError: nothing has happened in the run for so many seconds; the text says what it waits for.
        """
        seen, since = self._progress
        seq, now = self.run.book.last_seq, time.monotonic()
        if seq != seen:
            self._progress = (seq, now)
        elif now - since > stale_after_s:
            raise RuntimeError(
                f"nothing has happened in the rollout for {now - since:.0f} s (heartbeat_stale_after_s is "
                f"{stale_after_s:g})\n{self.run.in_loop(self.run.explain)}"
            )

    def callback(self) -> Any:
        """A callback for the trainer that puts a mark of the run beside each checkpoint (`checkpoint_mark`)."""
        from transformers import TrainerCallback

        worker = self

        class Marks(TrainerCallback):  # type: ignore[misc]
            def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if worker._run is not None:
                    worker.mark(Path(args.output_dir) / f"checkpoint-{state.global_step}")

        return Marks()

    def mark(self, checkpoint: Path) -> None:
        """Put a mark of the run into the folder of a checkpoint."""
        mark: CheckpointMark = self.call(self.run.checkpoint, checkpoint.name)
        (checkpoint / MARK_FILE).write_text(mark.to_json(), encoding="utf-8")

    # What the buffer asks ----------------------------------------------------------------------------

    def ask(self) -> "Future[Batch]":
        """Ask for a batch; the answer comes from the run's thread."""
        run, portal = self.run, self._portal
        assert portal is not None
        count = self._rules.batch_size
        assert count is not None
        return portal.start_task_soon(run.sample, count)

    def rows_of(self, batch: Batch) -> list[Any]:
        """A batch as TRL's rows."""
        self.metrics_queue.put_nowait({f"groupstate/{name}": value for name, value in batch.metrics.items()})
        now = time.time()
        rows: list[Any] = []
        for group in batch.groups:
            self._group_numbers += 1
            rows += [self._as_row(values, now) for values in group_rows(group, self._group_numbers, self._version)]
        return rows

    def _as_row(self, values: dict[str, Any], now: float) -> Any:
        kept = {name: value for name, value in values.items() if name in self._row.__dataclass_fields__}
        if "enqueued_at" in self._row.__dataclass_fields__:
            kept["enqueued_at"] = now
        return self._row(**kept)

    def handed(self, batch: int) -> None:
        """The trainer has taken the last row of a batch."""
        self._handed.append((batch, self._publications))

    def sampleable_rows(self) -> int:
        """Some number of rows that could be had now: groups times sessions."""
        count: int = self.run.in_loop(self.run.sampleable_count)
        return count * int(self._options["group_size"])


@attrs.frozen(eq=False)
class _Held:
    """Rows of one batch that the trainer hasn't taken yet."""

    answer: "Future[Batch] | None"
    """What the batch came with."""
    batch: int = 0
    rows: collections.deque[Any] = attrs.field(factory=collections.deque)


class RowBuffer:
    """What the trainer takes rows from, in place of a queue: it asks the run when it is empty."""

    def __init__(self, worker: RolloutWorker) -> None:
        self._worker = worker
        self._held = _Held(None)
        self._more = 0
        """Rows that were sampleable when the run was last asked."""
        self._asked: Future[Batch] | None = None

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """The next row.

        Raises:
            queue.Empty: not within `timeout` seconds. The run goes on looking for a batch.
            SampleError, RolloutDied, LogFailed: as `sample` raises them.
        """
        if not self._held.rows:
            self._draw(timeout if block else 0.0)
        held = self._held
        row = held.rows.popleft()
        if not held.rows:
            self._worker.handed(held.batch)
        return row

    def _draw(self, timeout: float | None) -> None:
        if self._asked is self._held.answer:
            self._asked = self._worker.ask()
        asked = self._asked
        assert asked is not None
        if not wait({asked}, timeout).done:
            raise queue.Empty
        if asked.cancelled() or asked.exception() is not None:
            self._held = _Held(asked)  # It is told once; the next call asks anew.
        batch = asked.result()
        # All at once: whoever is interrupted before it gets the same answer again, and after it has its rows.
        self._held = _Held(asked, batch.number, collections.deque(self._worker.rows_of(batch)))
        self._more = self._worker.sampleable_rows()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def qsize(self) -> int:
        """Rows that are here, and about as many as were sampleable when the run was last asked."""
        return len(self._held.rows) + self._more

    def put_nowait(self, row: Any) -> None:
        raise BadInput("rows come from the run: submit prompts, or dispatch them by worker.run.pending()")

    def forget(self) -> None:
        """What the trainer hasn't taken stays in the run. An error that it no longer waits for is told as a warning."""
        asked, answer = self._asked, self._held.answer
        self._held, self._asked = _Held(None), None
        if asked is None or asked is answer or asked.cancel():
            return
        if (error := asked.exception()) is not None:
            log.warning("the trainer stopped before it heard of an error", error=describe(error))


def _was_begun(path: Any) -> bool:
    return path is not None and os.path.lexists(RunDir.at(path).marker)


async def _tell(engine: Engine | None, weight_version: int) -> None:
    """Tell an engine which version its weights have, which came to it another way."""
    if engine is not None and engine.weight_version < weight_version:
        await engine.publish_weights(BY_THE_TRAINER, weight_version)


def checkpoint_mark(checkpoint: str | Path) -> CheckpointMark:
    """The mark beside a checkpoint, for `RolloutWorker(resume_at=...)`.

    Raises:
        BadMark: there is none.
    """
    file = Path(checkpoint) / MARK_FILE
    if not file.exists():
        raise BadMark(
            f"{checkpoint} has no {MARK_FILE}; it is written where the trainer was given callbacks=[worker.callback()]"
        )
    return CheckpointMark.from_json(file.read_text(encoding="utf-8"))


# From TRL's settings -----------------------------------------------------------------------------------


def _row_class() -> Any:
    """TRL's class of a row.

    Raises:
        MissingExtra: trl isn't installed.
        BadSettings: another version, whose rows need what can't be given here.
    """
    try:
        import trl
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
    except ImportError as error:
        raise MissingExtra("groupstate.integrations.trl", "trl", "trl") from error
    fields = _needed_fields(RolloutSample)
    if unknown := sorted(fields.difference(OFFERED)):
        raise BadSettings(
            f"trl {trl.__version__} wants {', '.join(unknown)} of each rollout sample, which this groupstate doesn't "
            f"know; it is tested with trl {TESTED}"
        )
    return RolloutSample


def _needed_fields(kind: Any) -> set[str]:
    """Fields of a dataclass that must be given."""
    parameters = inspect.signature(kind).parameters.values()
    return {parameter.name for parameter in parameters if parameter.default is inspect.Parameter.empty}


def _need_config(args: Any) -> None:
    """
    Raises:
        BadSettings: it isn't the trainer's configuration.
    """
    lacking = [name for name in CONFIG if not hasattr(args, name)]
    if lacking:
        raise BadSettings(
            f"args is {type(args).__name__}, without {lacking[0]}; it must be the trainer's AsyncGRPOConfig"
        )


def rows_per_step(args: Any) -> int:
    """Rows that one optimizer step of the trainer takes."""
    return int(args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size)


def _checked_rules(args: Any, rules: Rules) -> Rules:
    """The rules with their batch size.

    Raises:
        BadSettings: they, or TRL's options, can't work together.
    """
    if not isinstance(rules, Rules):
        raise BadSettings(f"rules is {rules!r}; it must be Rules(...)")
    step = rows_per_step(args)
    if rules.batch_size is None:
        rules = rules.changed(batch_size=math.ceil(step / args.num_generations))
    assert rules.batch_size is not None
    bounds = [rules.lag_max, *(own.lag_max for own in rules.datasets.values() if own.lag_max is not None)]
    if not rules.drops_stale or rules.lag_max is None:
        raise BadSettings(
            "the rules bound no lag, so TRL's own max_staleness would drop single rows out of groups; set lag_max, and "
            f"on_stale='drop' in async mode: Rules(lag_max={max(0, args.max_staleness - 1)})"
        )
    lag_max = max(bound for bound in bounds if bound is not None)
    straddled = math.ceil(rules.batch_size * args.num_generations / step / args.weight_sync_steps)
    if args.max_staleness < lag_max + straddled:
        raise BadSettings(
            f"max_staleness={args.max_staleness} of the trainer would drop single rows out of groups: the rules allow "
            f"a lag of {lag_max}, and a batch of {rules.batch_size} groups with {args.num_generations} rows may be "
            f"taken across {straddled} publications. Set AsyncGRPOConfig(max_staleness={lag_max + straddled}) or more, "
            "or a lower lag_max"
        )
    return rules


def sampling_params(args: Any) -> SamplingParams:
    """TRL's options of generation. What is off isn't said, since not every engine knows it."""
    off = {"top_k": 0, "min_p": None, "repetition_penalty": 1.0}
    return SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        max_tokens=args.max_completion_length,
        extra={name: getattr(args, name) for name, value in off.items() if getattr(args, name) != value},
    )


def vllm_server(args: Any, **options: Any) -> "OpenAIEngine":
    """The vLLM server of the trainer's `vllm_server_base_url`, to which the trainer itself brings the weights.

    Args:
        options: others of `OpenAIEngine`.

    Raises:
        MissingExtra: httpx isn't installed.
    """
    from groupstate.engines.openai import OpenAIEngine

    async def by_the_trainer(url: str, weights: Any, weight_version: int) -> None:
        """The server has them already when the version is told."""

    return OpenAIEngine(args.vllm_server_base_url, publish=by_the_trainer, **options)


@attrs.frozen
class _Rows(Sequence[Prompt]):
    """A `datasets.Dataset` as prompts: the column `prompt` is the content, the others are for the reward functions."""

    _dataset: Any

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return prompt_of_row(self._dataset[index])


def prompt_of_row(row: Any) -> Prompt:
    """
    Raises:
        BadInput: a row without a prompt.
    """
    if row.get("prompt") is None:
        raise BadInput(f"a row of train_dataset has no 'prompt'; it has {', '.join(map(repr, row))}")
    return Prompt(row["prompt"], extra={name: value for name, value in row.items() if name != "prompt"})


def _source(prompts: Any) -> Callable[[], Any]:
    """What makes the source, anew for each start."""
    if not hasattr(prompts, "column_names"):
        return lambda: prompts
    if hasattr(prompts, "__len__"):
        return lambda: ListSource(_Rows(prompts), epochs=None, name="train_dataset")
    return lambda: IteratorSource(map(prompt_of_row, prompts), name="train_dataset")


# Sessions ----------------------------------------------------------------------------------------------


def chat_session(
    reward_funcs: Any, processing_class: Any, *, chat_template_kwargs: dict[str, Any] | None = None
) -> SessionFunction:
    """A session of one turn: the prompt by the chat template, an answer, its rewards by TRL's reward functions.

    Each function is called for one answer, with lists of one item: `func(prompts=, completions=, completion_ids=,
    **columns)`. A plain one runs in a thread. Their sum is the reward; None says nothing.

    Args:
        reward_funcs: one, or a list.
        processing_class: the tokenizer, with a chat template.
        chat_template_kwargs: as the trainer's option.

    Raises:
        BadSettings: no function.
    """
    functions = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
    if not functions or not all(map(callable, functions)):
        raise BadSettings(f"reward_funcs is {reward_funcs!r}; it must be a function, or a list of some")

    async def session(ctx: SessionContext) -> Trajectory:
        prompt = messages(ctx.prompt.content)
        prompt_ids = processing_class.apply_chat_template(
            prompt, add_generation_prompt=True, return_dict=False, **(chat_template_kwargs or {})
        )
        generation = await ctx.generate(prompt_ids)
        text = processing_class.decode(generation.token_ids, skip_special_tokens=True)
        told = {
            "prompts": [prompt],
            "completions": [[{"role": "assistant", "content": text}]],
            "completion_ids": [list(generation.token_ids)],
            **{name: [value] for name, value in ctx.prompt.extra.items()},
        }
        scores = {f"rewards/{_name(function)}": await _score(function, told) for function in functions}
        said = {name: score for name, score in scores.items() if score is not None}
        if not said:
            raise ValueError(f"no reward: {', '.join(map(_name, functions))} returned None for this answer")
        metrics = {**said, "reward": math.fsum(said.values())}
        return attrs.evolve(ctx.trajectory(prompt_ids, generation, metrics=metrics), text=text)

    return session


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


async def _score(function: Callable[..., Any], told: dict[str, Any]) -> float | None:
    if inspect.iscoroutinefunction(function):
        scores = await function(**told)
    else:
        scores = await anyio.to_thread.run_sync(functools.partial(function, **told))
    (score,) = scores
    return None if score is None else float(score)
