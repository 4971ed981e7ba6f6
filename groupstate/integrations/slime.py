"""A rollout function for slime and its fork miles: they generate and train, groupstate decides and keeps the log.

The hook is `--rollout-function-path`, a function `(args, rollout_id, data_source, evaluation=False)`. Each prompt group
comes from slime's data source; each of its samples is a session that calls slime's own `generate_and_rm`, on slime's
own event loop, so that `--custom-generate-function-path` and `--custom-rm-path` hold as ever.

Rule 1: a weight version is a rollout id: slime's count of batches, the same for the trainer and for stamps.
Rule 2: a batch is whole. slime normalizes rewards over `n_samples_per_prompt`, so rules that let short groups through
are refused.
Rule 3: samples live in this process. Each start of slime is a run of its own; what was ready or under way is gone
with the process, as without groupstate, and slime's data source says which prompts come then.
"""

import asyncio
import atexit
import copy
import importlib
import itertools
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import msgspec

from groupstate.batch import Batch
from groupstate.core.prompt import Prompt
from groupstate.core.rules import Rules, rules_from_dict
from groupstate.core.trajectory import Trajectory
from groupstate.core.typed_settings import unknown_key
from groupstate.errors import BadSettings, UnusableResult
from groupstate.logs import Logger
from groupstate.runtime.opening import open_run
from groupstate.runtime.run import Run
from groupstate.runtime.session import RetryableError, SessionContext

log = Logger("groupstate.slime")

OPTIONS = ("path", "rules", "grace_s", "durability", "keep_log", "disk_bytes_max", "disk_free_min_bytes")
"""What the table `groupstate` of `--custom-config-path` may hold."""

ABORTS_MAX = 64
"""Times that a sample is taken up again after the engine aborted it. Each is one update of weights; a server that
aborts everything must not be asked for ever."""

ABORT_PAUSE_S = 0.5
"""Seconds before it is, since the engine is being updated."""

CLOSE_S = 15.0
"""Seconds that closing the run may take when the process ends."""

PARTS = {
    "generate_and_rm": "rollout.sglang_rollout",
    "generate_rollout": "rollout.sglang_rollout",
    "GenerateState": "rollout.sglang_rollout",
    "RolloutFnTrainOutput": "rollout.base_types",
    "run": "utils.async_utils",
    "load_function": "utils.misc",
}
"""What is used of slime, and where it stands there."""


class RolloutFunction:
    """What `--rollout-function-path` names. The run is opened by the first call and closed when the process ends."""

    def __init__(self, package: str) -> None:
        """
        Args:
            package: `slime` or `miles`.
        """
        self._package = package
        self._run: Run | None = None
        self._owner: asyncio.Task[None] | None = None
        self._ends = asyncio.Event()
        self._work: _Work | None = None
        self._handed: list[int] = []
        """Batches that the trainer has."""

    def __call__(self, args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
        """A batch for the trainer, or slime's own evaluation.

        Raises:
            BadSettings: an option of slime's, or of the rules, that can't work; the text names it.
            SampleError, RolloutDied, LogFailed: as `sample` raises them.
        """
        stack = parts_of(self._package)
        if evaluation:
            return stack.generate_rollout(args, rollout_id, data_source, evaluation=True)
        return stack.run(self._batch(stack, args, rollout_id, data_source))

    @property
    def run(self) -> Run | None:
        """The open run, for looking; None before the first call."""
        return self._run

    async def _batch(self, stack: Any, args: Any, rollout_id: int, data_source: Any) -> Any:
        if self._run is None:
            await self._begin(stack, args, rollout_id, data_source)
        run, work = self._run, self._work
        assert run is not None
        assert work is not None
        batch = await run.sample(args.rollout_batch_size, weight_version=rollout_id)
        await self._commit(run, batch.number)
        samples = work.hand_over(batch, run)
        if args.rollout_sample_filter_path is not None:
            stack.load_function(args.rollout_sample_filter_path)(args, samples)
        metrics = {f"rollout/groupstate/{name}": value for name, value in batch.metrics.items()}
        return stack.RolloutFnTrainOutput(samples=samples, metrics=metrics)

    async def _commit(self, run: Run, batch: int) -> None:
        """Commit what was trained on for certain. slime's asynchronous loop asks for a batch while it trains on the one
        before, so that is the batch before that one."""
        self._handed.append(batch)
        while len(self._handed) > 2:
            await run.commit(self._handed.pop(0))

    async def _begin(self, stack: Any, args: Any, rollout_id: int, data_source: Any) -> None:
        settings = settings_of(args)
        rules = checked_rules(args, settings.pop("rules", None))
        path = settings.pop("path", None)
        work = _Work(stack, args)
        opened: asyncio.Future[Run] = asyncio.get_running_loop().create_future()
        self._ends = asyncio.Event()

        async def own() -> None:
            """Hold the run open: it must be left in the task that entered it."""
            try:
                async with open_run(
                    None if path is None else free_folder(path),
                    rules=rules,
                    source=_DataSource(data_source, work),
                    session=work.session,
                    group_size=args.n_samples_per_prompt,
                    weight_version=rollout_id,
                    **settings,
                ) as run:
                    opened.set_result(run)
                    await self._ends.wait()
            except BaseException as error:
                if opened.done():
                    log.error("the run ended", error=str(error))
                    raise
                opened.set_exception(error)

        self._owner = asyncio.get_running_loop().create_task(own())
        self._run, self._work = await opened, work
        atexit.register(self.close)

    def close(self) -> None:
        """Close the run. The next call opens another one."""
        atexit.unregister(self.close)
        if self._owner is not None:
            parts_of(self._package).run(self._close())

    async def _close(self) -> None:
        owner, self._owner = self._owner, None
        self._run, self._work = None, None
        self._handed.clear()
        self._ends.set()
        if owner is not None:
            await asyncio.wait({owner}, timeout=CLOSE_S)


class _Work:
    """Samples of this process: as drawn, and as generated."""

    def __init__(self, stack: Any, args: Any) -> None:
        self._stack = stack
        self._args = args
        self._drawn: dict[int, list[Any]] = {}
        """By the number of the draw, which is the prompt's position in the source."""
        self._numbers = itertools.count()
        self._made: dict[str, dict[int, Any]] = {}
        """By group and session, what `generate_and_rm` returned: a sample, or a list of some."""
        self._number_of: dict[str, int] = {}

    def keep(self, group: list[Any]) -> int:
        """Samples that were drawn, to be found by this number."""
        number = next(self._numbers)
        self._drawn[number] = group
        return number

    async def session(self, ctx: SessionContext) -> list[Trajectory]:
        """One sample, by slime's own function."""
        number = ctx.prompt.extra["drawn"]
        self._number_of[ctx.group_id] = number
        sample = copy.deepcopy(self._drawn[number][ctx.session])
        if getattr(sample, "session_id", "") is None:
            sample.session_id = ctx.key
        for _ in range(ABORTS_MAX):
            made = await self._stack.generate_and_rm(self._args, sample, self._params(ctx), evaluation=False)
            rows = made if isinstance(made, list) else [made]
            statuses = {row.status.value for row in rows}
            if "failed" in statuses:
                raise RetryableError("the sample's status is FAILED")
            if "aborted" not in statuses:
                self._made.setdefault(ctx.group_id, {})[ctx.session] = made
                return [trajectory_of(self._args, row) for row in rows]
            # One sample goes on from its tokens; several begin anew.
            sample = copy.deepcopy(self._drawn[number][ctx.session]) if isinstance(made, list) else made
            await anyio.sleep(ABORT_PAUSE_S)
        raise RetryableError(f"the engine aborted the sample {ABORTS_MAX} times")

    def _params(self, ctx: SessionContext) -> dict[str, Any]:
        state = self._stack.GenerateState(self._args)
        params = dict(state.sampling_params)
        if getattr(self._args, "sglang_enable_deterministic_inference", False):
            params["sampling_seed"] = state.group_sampling_seeds[ctx.session]
        return params

    def hand_over(self, batch: Batch, run: Run) -> list[list[Any]]:
        """The samples of a batch, in the order in which slime has them; those of groups that have left are dropped."""
        groups = [[self._made[group.group_id][session] for session, _ in group.sessions] for group in batch.groups]
        handed = set(batch.group_ids)
        for group_id in [known for known in self._number_of if known in handed or known not in run.book.groups]:
            self._made.pop(group_id, None)
            self._drawn.pop(self._number_of.pop(group_id), None)
        # What left before a session of it began is in neither. Prompts are submitted in the order of their draws.
        live = {group.source_position for group in run.book.groups.values()}
        submitted = run.book.source_position
        for number in [number for number in self._drawn if number < submitted and number not in live]:
            del self._drawn[number]
        return sorted(groups, key=_first_index)


def _first_index(group: list[Any]) -> int:
    first = group[0][0] if isinstance(group[0], list) else group[0]
    return -1 if first.index is None else int(first.index)


class _DataSource:
    """slime's data source, drawn from group by group."""

    name = "slime's data source"

    def __init__(self, inner: Any, work: _Work) -> None:
        self._inner = inner
        self._work = work
        self._taken: set[str] = set()
        self.position = 0

    def draw(self) -> Prompt | None:
        groups = self._inner.get_samples(1)
        if not groups:
            return None
        (group,) = groups
        self.position += 1
        first = group[0]
        group_id = None if first.group_index is None else str(first.group_index)
        if group_id in self._taken:
            group_id = None  # It came back, by somebody's add_samples.
        elif group_id is not None:
            self._taken.add(group_id)
        metadata = first.metadata if isinstance(first.metadata, Mapping) else {}
        dataset = metadata.get("data_source", "")
        extra = {"drawn": self._work.keep(group), "index": first.index, "label": _plain(first.label)}
        return Prompt(_plain(first.prompt), str(dataset), len(group), group_id, extra)

    def seek(self, position: int) -> None:
        """Each start is a new run, so there is nothing to go on behind."""


def _plain(value: Any) -> Any:
    """The value if a log can hold it, else what it looks like."""
    try:
        msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError):
        return repr(value)[:1000]
    return value


def trajectory_of(args: Any, sample: Any) -> Trajectory:
    """What the log keeps of a sample.

    Raises:
        UnusableResult: it has no reward.
    """
    if sample.reward is None:
        raise UnusableResult("generate_and_rm gave the sample no reward")
    start = len(sample.tokens) - sample.response_length
    mask = [1] * sample.response_length if sample.loss_mask is None else list(sample.loss_mask)
    log_probs = list(sample.rollout_log_probs or ())
    parts = sample.reward if isinstance(sample.reward, Mapping) else {}
    numbers = {name: float(value) for name, value in parts.items() if isinstance(value, int | float)}
    return Trajectory(
        prompt_ids=list(sample.tokens[:start]),
        response_ids=list(sample.tokens[start:]),
        log_probs=log_probs if len(log_probs) == sample.response_length else (),
        environment=_runs_of_zeros(mask),
        metrics={**numbers, "reward": float(sample.get_reward_value(args))},
        text=sample.response,
        info={"status": sample.status.value, "engine_versions": [str(version) for version in sample.weight_versions]},
    )


def _runs_of_zeros(mask: list[int]) -> list[tuple[int, int]]:
    found, start = [], 0
    for value, run in itertools.groupby(mask):
        stop = start + len(list(run))
        if not value:
            found.append((start, stop))
        start = stop
    return found


# slime's settings --------------------------------------------------------------------------------------


def parts_of(package: str) -> Any:
    """What is used of slime or miles.

    Raises:
        BadSettings: it isn't installed, or has another shape.
    """
    found = {}
    for name, module in PARTS.items():
        try:
            found[name] = getattr(importlib.import_module(f"{package}.{module}"), name)
        except ImportError as error:
            raise BadSettings(
                f"--rollout-function-path groupstate.integrations.{package}.generate_rollout needs the package "
                f"{package}, of which {package}.{module} can't be imported: {error}"
            ) from error
        except AttributeError as error:
            raise BadSettings(
                f"{package}.{module} has no {name}, so this version of {package} isn't one that "
                f"groupstate.integrations.{package} knows"
            ) from error
    return SimpleNamespace(**found)


def settings_of(args: Any) -> dict[str, Any]:
    """The table `groupstate` of `--custom-config-path`.

    Raises:
        BadSettings: no table, or one with what isn't known.
    """
    settings = getattr(args, "groupstate", None)
    if settings is None:
        return {}
    if not isinstance(settings, Mapping):
        raise BadSettings(f"groupstate in --custom-config-path is {settings!r}; it must be a table: path, rules")
    for name in settings:
        if name not in OPTIONS:
            raise BadSettings(unknown_key(str(name), OPTIONS, "groupstate in --custom-config-path"))
    return dict(settings)


def free_folder(path: str | Path) -> Path:
    """A folder for one start: `path/start-1`, or the first number that is free."""
    return next(folder for number in itertools.count(1) if not (folder := Path(path) / f"start-{number}").exists())


def checked_rules(args: Any, table: Mapping[str, Any] | None) -> Rules:
    """The rules, with slime's batch size. Without any, sync mode: nothing ahead, as slime's own function.

    Raises:
        BadSettings: they, or slime's options, can't work together.
    """
    where = "groupstate.rules in --custom-config-path"
    given = {"mode": "sync", "failure": "refill"} if table is None else dict(table)
    rules = rules_from_dict({"batch_size": args.rollout_batch_size, **given}, where)
    for problem in (*_option_problems(args), *_rule_problems(args, rules)):
        raise BadSettings(problem)
    return rules


def _option_problems(args: Any) -> list[str]:
    """Options of slime's that mean something to its own function and can't here, each with what does it instead."""
    found = []
    if getattr(args, "group_rm", False):
        found.append(
            "--group-rm scores a group at once, after its last sample; groupstate needs each session's reward when it "
            "ends: score single samples by --custom-rm-path"
        )
    if getattr(args, "dynamic_sampling_filter_path", None) is not None:
        found.append(
            f"--dynamic-sampling-filter-path {args.dynamic_sampling_filter_path} isn't asked: the rules filter; set "
            "filter_metric: reward in their place, and leave the option out"
        )
    ahead = getattr(args, "over_sampling_batch_size", None)
    if ahead is not None and ahead != args.rollout_batch_size:
        found.append(
            f"--over-sampling-batch-size {ahead} isn't asked: the rules' admission says how many groups are ahead; "
            "leave the option out"
        )
    if getattr(args, "rollout_all_samples_process_path", None) is not None:
        found.append(
            "--rollout-all-samples-process-path isn't called: evicted groups are in the log; leave the option out"
        )
    return found


def _rule_problems(args: Any, rules: Rules) -> list[str]:
    found = []
    if rules.batch_size != args.rollout_batch_size:
        found.append(
            f"the rules' batch_size {rules.batch_size} isn't --rollout-batch-size {args.rollout_batch_size}; leave it "
            "out of the rules"
        )
    if getattr(args, "colocate", False) and rules.mode != "sync":
        found.append(
            "--colocate puts the engine to sleep while the trainer learns, and async rules generate meanwhile; set "
            "mode: sync, or leave --colocate out"
        )
    short = {
        "survivors_min": rules.survivors_min is not None,
        "failure: keep": rules.mode == "sync" and rules.failure == "keep",
        f"empty: {rules.empty}": bool(rules.kept_empty),
        "empty_session: allow": rules.empty_session == "allow",
    }
    for name in [name for name, is_so in short.items() if is_so]:
        found.append(
            f"the rules' {name} lets groups through with fewer than --n-samples-per-prompt {args.n_samples_per_prompt} "
            "samples, over which slime normalizes rewards; leave it out (in sync mode set failure: refill)"
        )
    if rules.oversample:
        found.append("the rules' oversample starts more sessions than slime's data source gives samples; leave it out")
    if rules.basis not in ("dispatch", "target_version"):
        found.append(
            f"the rules' basis {rules.basis} needs weight versions of tokens, and those of the engine aren't rollout "
            "ids; take basis: dispatch"
        )
    return found


generate_rollout = RolloutFunction("slime")
