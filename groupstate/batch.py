"""What the trainer gets: whole groups with their trajectories, and the same as tensors.

Rule 1: a batch holds whole groups only; a row is found by (group_id, session, index), never by position.
Rule 2: `from_bytes(to_bytes(batch))` equals the batch, number for number.
"""

import array
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import attrs
import msgspec
import msgspec.structs

from groupstate.core.arguments import shown
from groupstate.core.events import VersionSpan
from groupstate.core.metrics import Tally
from groupstate.core.packed import Code, Packed, PackedInfo
from groupstate.core.prompt import Prompt
from groupstate.core.trajectory import Trajectory, held, held_info, metrics_of
from groupstate.errors import BadInput, BadSettings

if TYPE_CHECKING:
    from torch import Tensor

    from groupstate.tensors import Advantages, Layout


def merged_metrics(batches: "Iterable[Batch]") -> dict[str, float]:
    """Metrics of several batches as if they had been one, for instance of all since weights were last published.

    Counts are added up, means are weighted by what they are means of, and of maxima and minima the outermost stay.
    Batches of both partitions may be given: their names differ.

    Raises:
        BadSettings: no batch is given.
    """
    tallies = [batch.tally for batch in batches]
    if not tallies:
        raise BadSettings("there is nothing to merge: give at least one batch")
    found: dict[str, float] = {}
    for partition in sorted({tally.partition for tally in tallies}):
        found |= Tally.merged(tally for tally in tallies if tally.partition == partition).flat()
    return found


@attrs.frozen
class MetricResult:
    """One metric of a dataset, over the sessions and over the groups that have a value of it."""

    mean: float
    """Over `session_count` sessions."""
    session_count: int
    best: float
    """Each group's highest session, as a mean over `group_count` groups: best@n."""
    group_count: int


@attrs.frozen
class DatasetResult:
    """What became of one dataset's groups."""

    group_count: int
    empty_group_count: int
    """Groups without a single trajectory."""
    session_count: int
    """Sessions of all groups, whatever became of them."""
    failed_session_count: int
    metrics: Mapping[str, MetricResult]


@attrs.frozen
class Row:
    """One trainable row of a batch."""

    group_id: str
    session: int
    index: int
    trajectory: Trajectory
    weight_version: int
    """The stamp of its group: the weight version that was current when the group was submitted."""

    @property
    def key(self) -> str:
        """`{group_id}_{session}_{index}`; splits from the right."""
        return f"{self.group_id}_{self.session}_{self.index}"


@attrs.frozen
class BatchGroup:
    """One prompt group of a batch."""

    group_id: str
    size: int
    """Sessions the group had."""
    phase: str
    """`finished` or `failure`."""
    partial: bool
    dataset: str
    weight_version: int
    lag: int
    """Weight versions between the group's and the trainer's when the batch was sampled."""
    sessions: tuple[tuple[int, tuple[Trajectory, ...]], ...]
    """(session, its trajectories) of each session that finished."""
    prompt: Prompt | None = None

    def rows(self) -> Iterator[Row]:
        for session, trajectories in self.sessions:
            for index, trajectory in enumerate(trajectories):
                yield Row(self.group_id, session, index, trajectory, self.weight_version)


@attrs.frozen
class Batch:
    """Groups that one `sample()` claimed. Commit it once a checkpoint of the trainer holds it."""

    number: int
    partition: str
    groups: tuple[BatchGroup, ...]
    weight_version: int
    """The trainer's version when the batch was sampled."""
    tally: Tally = attrs.field(repr=False)
    """The batch's metrics in the form that merges; `merged_metrics` does it for several batches."""
    metrics: dict[str, float] = attrs.field(init=False, eq=False)
    """What happened since the previous batch, and what is in this one, by name: `tally.flat()`."""
    run_id: str = attrs.field(default="", kw_only=True, eq=False, repr=False)
    """The run that it was sampled from, which alone can commit or release it: `run.id`, or, where that is kept in
    memory, an id that no other run has. Empty where it isn't known. Batches that hold the same are equal, whatever run
    they are from."""

    @tally.default
    def _no_tally(self) -> Tally:
        return Tally(self.partition)

    @metrics.default
    def _flat_tally(self) -> dict[str, float]:
        return self.tally.flat()

    @property
    def group_ids(self) -> list[str]:
        return [group.group_id for group in self.groups]

    @property
    def rows(self) -> list[Row]:
        """All trajectories: groups in sampling order, sessions and trajectories ascending."""
        return [row for group in self.groups for row in group.rows()]

    def __len__(self) -> int:
        return len(self.groups)

    def by_dataset(self, *, missing: Mapping[str, float] | None = None) -> dict[str, DatasetResult]:
        """Results of a validation round, by the name of the dataset; groups without one stand under `""`.

        A session's value of a metric is that of its last trajectory. With x(g, s) the value of session s of group g:

        - `mean`: the sum of all x(g, s) over their number, `session_count`; each session counts once.
        - `best`: max over s of x(g, s), summed over the groups and divided by their number, `group_count`: best@n, and
          with rewards of 0 and 1 pass@n. Each group counts once.

        Failed sessions have no value. They are left out of both means and counted beside them, unless `missing` says
        what they are worth; a mean over the survivors alone is the better the more sessions fail.

        Args:
            missing: by metric, the value of a session that has none, because it failed, returned nothing or didn't
                report it. All sessions and groups of the dataset then count. `{"reward": 0.0}` takes failure for a
                wrong answer.
        """
        by_name: dict[str, list[BatchGroup]] = {}
        for group in self.groups:
            by_name.setdefault(group.dataset, []).append(group)
        return {name: _dataset_result(by_name[name], missing or {}) for name in sorted(by_name)}

    def to_bytes(self) -> bytes:
        """For other ranks of the trainer; `Batch.from_bytes` gives an equal batch back.

        What a prompt or `info` holds comes back as msgpack keeps it: a tuple as a list. `metrics` comes back as
        `tally` has them: what was put into the dict later stays here.

        Raises:
            TypeError: `tally`, `info` or a prompt of a batch made by hand holds what msgpack doesn't know.
        """
        return msgspec.msgpack.encode(_to_wire(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> "Batch":
        """
        Raises:
            BadInput: not what `to_bytes` made, or made by a version with another form.
        """
        try:
            held = memoryview(data)
        except TypeError as error:
            raise BadInput(f"data is {shown(data)}; it must be the bytes that Batch.to_bytes() made") from error
        try:
            return _from_wire(_wire_decoder.decode(held))
        except Exception as error:  # Bytes that came to harm may fail anywhere, in the arithmetic of metrics too.
            raise BadInput(
                f"these {held.nbytes} bytes are not what Batch.to_bytes() of this version makes: {error}"
            ) from error

    def to_torch(
        self,
        *,
        layout: "Layout" = "padded",
        pad_id: int = 0,
        advantages: "Advantages | None" = "grpo",
        reward: str = "reward",
        log_probs: bool = True,
        max_prompt: int | None = None,
        max_response: int | None = None,
        device: Any = None,
    ) -> "dict[str, Tensor]":
        """The rows as tensors, in the order of `rows`: N rows of P prompt and R response tokens.

        Padded, prompts on the left and responses on the right, as verl has them:

        - `input_ids` (N, P + R) int64; `pad_id` where there is no token
        - `attention_mask` (N, P + R) int64: 1 for a token, 0 for a pad
        - `position_ids` (N, P + R) int64: a token's place in its row, from 0
        - `response_mask` (N, R) int64: 1 for a token of the model; 0 for a pad and for what the environment wrote
        - `rollout_log_probs` (N, R) float32: as generated; 0 for a pad
        - `advantages` (N, R) float32: the session's one value wherever `response_mask` is 1, else 0
        - `rewards` (N,) float32: the row's reward, or its session's where it has none of its own
        - `group_index` (N,) int64: place of the row's group in `groups`
        - `weight_version` (N,) int64: the stamp of its group

        Jagged, all rows end to end, T tokens of which Q are responses: `input_ids` (T,) and `position_ids`
        (T,); `offsets` (N + 1,) int64, row i being `offsets[i]` up to `offsets[i + 1]`, which is what
        variable-length attention calls cu_seqlens; `response_mask`, `rollout_log_probs` and `advantages` (Q,)
        with `response_offsets` (N + 1,); `response_index` (Q,) int64, the place of each response token in
        `input_ids`; `rewards`, `group_index` and `weight_version` (N,) as above. Values and offsets rather than
        nested tensors, which torch still calls a prototype; `torch.nested.nested_tensor_from_jagged(values,
        offsets)` makes one of them without a copy.

        A session's reward is that of its last trajectory, and all its rows and tokens get the advantage that
        follows from it. It is compared with those of the group's other sessions that have rows: in a partial
        group, the ones that finished.

        Args:
            layout: `padded` or `jagged`.
            advantages: `grpo`: `(r - mean) / (std + 1e-6)` with the unbiased deviation (DeepSeekMath, arXiv
                2402.03300); `grpo_no_std`: `r - mean` (Dr. GRPO, arXiv 2503.20783); `rloo`: `r` minus the mean
                of the others (arXiv 2402.14740). A session that is alone in its group gets 0. None leaves the
                key out.
            reward: the metric that is the reward.
            log_probs: False leaves `rollout_log_probs` out, for engines that give none.
            max_prompt: P; None takes the longest prompt's.
            max_response: R; None takes the longest response's.
            device: where the tensors go; None leaves them on the CPU.

        Raises:
            UnusableBatch: a row without prompt tokens, reward or log-probabilities, or too long; names it.
            BadSettings: an argument that can't be.
            MissingExtra: torch isn't installed.
        """
        from groupstate.tensors import to_torch

        return to_torch(
            self,
            layout=layout,
            pad_id=pad_id,
            advantages=advantages,
            reward=reward,
            log_probs=log_probs,
            max_prompt=max_prompt,
            max_response=max_response,
            device=device,
        )


def _dataset_result(groups: Sequence[BatchGroup], missing: Mapping[str, float]) -> DatasetResult:
    values = [_session_metrics(group, missing) for group in groups]
    names = sorted({name for group in values for session in group for name in session})
    sessions = sum(group.size for group in groups)
    return DatasetResult(
        group_count=len(groups),
        empty_group_count=sum(not any(rows for _, rows in group.sessions) for group in groups),
        session_count=sessions,
        failed_session_count=sessions - sum(len(group.sessions) for group in groups),
        metrics={name: _metric_result(name, values) for name in names},
    )


def _session_metrics(group: BatchGroup, missing: Mapping[str, float]) -> list[dict[str, float]]:
    """The metrics of each session of the group, failed ones too."""
    found = [{**missing, **(metrics_of(rows[-1]) if rows else {})} for _, rows in group.sessions]
    return found + [dict(missing)] * (group.size - len(found))


def _metric_result(name: str, values: Sequence[Sequence[Mapping[str, float]]]) -> MetricResult:
    by_group = [[session[name] for session in group if name in session] for group in values]
    numbers = [number for group in by_group for number in group]
    best = [max(group) for group in by_group if group]
    return MetricResult(sum(numbers) / len(numbers), len(numbers), sum(best) / len(best), len(best))


# As bytes --------------------------------------------------------------------------------------------


class _WireTrajectory(msgspec.Struct, array_like=True, frozen=True):
    prompt_ids: bytes
    response_ids: bytes
    log_probs: bytes
    spans: tuple[VersionSpan, ...]
    environment: tuple[tuple[int, int], ...]
    reward: float | None
    metrics: dict[str, float]
    text: str
    info: dict[str, Any]
    log_probs_code: Code = "d"
    """What `log_probs` holds."""


class _WirePrompt(msgspec.Struct, array_like=True, frozen=True):
    content: Any
    dataset: str
    n: int | None
    group_id: str | None
    extra: dict[str, Any]


class _WireGroup(msgspec.Struct, array_like=True, frozen=True):
    group_id: str
    size: int
    phase: str
    partial: bool
    dataset: str
    weight_version: int
    lag: int
    sessions: tuple[tuple[int, tuple[_WireTrajectory, ...]], ...]
    prompt: _WirePrompt | None


class _WireBatch(msgspec.Struct, array_like=True, frozen=True, tag="groupstate-batch-3"):
    number: int
    partition: str
    groups: tuple[_WireGroup, ...]
    weight_version: int
    tally: Tally
    run_id: str = ""


class _WireBatch2(_WireBatch, array_like=True, frozen=True, tag="groupstate-batch-2"):
    """All log-probabilities took eight bytes."""


_wire_decoder = msgspec.msgpack.Decoder(_WireBatch | _WireBatch2)


def _to_wire(batch: Batch) -> _WireBatch:
    groups = tuple(
        _WireGroup(
            group.group_id,
            group.size,
            group.phase,
            group.partial,
            group.dataset,
            group.weight_version,
            group.lag,
            tuple((session, tuple(map(_to_wire_trajectory, rows))) for session, rows in group.sessions),
            None if group.prompt is None else _to_wire_prompt(group.prompt),
        )
        for group in batch.groups
    )
    return _WireBatch(batch.number, batch.partition, groups, batch.weight_version, batch.tally, batch.run_id)


def _from_wire(wire: _WireBatch) -> Batch:
    groups = tuple(
        BatchGroup(
            group.group_id,
            group.size,
            group.phase,
            group.partial,
            group.dataset,
            group.weight_version,
            group.lag,
            tuple((session, tuple(map(_from_wire_trajectory, rows))) for session, rows in group.sessions),
            None if group.prompt is None else Prompt(*msgspec.structs.astuple(group.prompt)),
        )
        for group in wire.groups
    )
    return Batch(wire.number, wire.partition, groups, wire.weight_version, wire.tally, run_id=wire.run_id)


def _to_wire_prompt(prompt: Prompt) -> _WirePrompt:
    return _WirePrompt(prompt.content, prompt.dataset, prompt.n, prompt.group_id, dict(prompt.extra))


def _to_wire_trajectory(row: Trajectory) -> _WireTrajectory:
    _, prompt_ids = _packed("i", held(row, "prompt_ids"))
    _, response_ids = _packed("i", held(row, "response_ids"))
    code, log_probs = _packed("d", held(row, "log_probs"))
    return _WireTrajectory(
        prompt_ids,
        response_ids,
        log_probs,
        tuple(row.spans),
        tuple((start, stop) for start, stop in row.environment),
        row.reward,
        dict(row.metrics),
        row.text,
        _wire_info(held_info(row)),
        code,
    )


def _wire_info(info: PackedInfo | Mapping[str, Any]) -> dict[str, Any]:
    """Its bytes as they are, unless somebody has read it: who has may have changed it."""
    if not isinstance(info, PackedInfo):
        return dict(info)
    return cast("dict[str, Any]", msgspec.Raw(info.data)) if info.is_packed else info.value


def _from_wire_trajectory(wire: _WireTrajectory) -> Trajectory:
    return Trajectory(
        prompt_ids=_unpacked("i", wire.prompt_ids),
        response_ids=_unpacked("i", wire.response_ids),
        log_probs=_unpacked(wire.log_probs_code, wire.log_probs),
        spans=wire.spans,
        environment=wire.environment,
        reward=wire.reward,
        metrics=wire.metrics,
        text=wire.text,
        info=wire.info,
    )


def _packed(code: Code, numbers: Packed | Sequence[float]) -> tuple[Code, bytes]:
    """Numbers in the order of bytes that all machines understand, and what they are.

    Args:
        code: what they become, unless they are packed already.
    """
    if isinstance(numbers, Packed):
        code, data = numbers.code, numbers.data
    else:
        data = array.array(code, numbers).tobytes()
    return code, _little_endian(code, data)


def _unpacked(code: Code, data: bytes) -> Any:
    return Packed(code, _little_endian(code, data)) if data else ()


def _little_endian(code: Code, data: bytes) -> bytes:
    """Turned around on machines that have the highest byte first; the same in both directions."""
    if sys.byteorder == "little":
        return data
    numbers = array.array(code, data)
    numbers.byteswap()
    return numbers.tobytes()
