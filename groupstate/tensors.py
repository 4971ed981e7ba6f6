"""Rows as torch tensors: padded as verl lays them out, or end to end without a pad.

Rule 1: every number is worked out in Python floats (64 bits) and rounded once, when it enters a tensor.
Rule 2: nothing is cut or made up: a row that doesn't fit, or lacks what is asked for, is an error.
Rule 3: torch is imported inside the functions, so that a run without a trainer never needs it.
"""

import array
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import attrs

from groupstate.core.near import meant
from groupstate.core.packed import Packed
from groupstate.core.trajectory import NumbersField, Trajectory, held, metrics_of
from groupstate.errors import BadSettings, MissingExtra
from groupstate.errors import UnusableBatch as UnusableBatch

if TYPE_CHECKING:
    from torch import Tensor

    from groupstate.batch import Batch, BatchGroup, Row

Advantages: TypeAlias = Literal["grpo", "grpo_no_std", "rloo"]
Layout: TypeAlias = Literal["padded", "jagged"]

STD_EPSILON = 1e-6
"""Added to GRPO's deviation, as TRL and verl do, so that a flat group doesn't divide by zero."""


# Advantages ------------------------------------------------------------------------------------------


def group_advantages(rewards: Sequence[float], method: Advantages) -> list[float]:
    """One advantage per session of a group, from one reward per session.

    `grpo`: `(r - mean) / (std + 1e-6)` with the unbiased deviation (n - 1); DeepSeekMath, arXiv 2402.03300.
    `grpo_no_std`: `r - mean`; Dr. GRPO, arXiv 2503.20783, which shows that the division favours questions
    on which the answers hardly differ. `rloo`: `r` minus the mean of the others; arXiv 2402.14740.

    A session without siblings has nothing to be compared with: its advantage is 0. (verl gives it the bare
    reward instead.) Equal rewards give exactly 0.
    """
    count = len(rewards)
    if count < 2:
        return [0.0] * count
    # Rounding can push the mean of equal numbers out of their range; there it would be no mean.
    mean = min(max(math.fsum(rewards) / count, min(rewards)), max(rewards))
    differences = [reward - mean for reward in rewards]
    if method == "grpo_no_std":
        return differences
    if method == "rloo":
        # r - (sum - r) / (n - 1), written with the mean.
        return [difference * count / (count - 1) for difference in differences]
    std = math.sqrt(math.fsum(difference * difference for difference in differences) / (count - 1))
    return [difference / (std + STD_EPSILON) for difference in differences]


def _session_advantages(group: "BatchGroup", method: Advantages, reward: str) -> dict[int, float]:
    """Session -> its advantage, for the sessions that have rows."""
    sessions = {session: rows for session, rows in group.sessions if rows}
    rewards = [_reward(group.group_id, session, len(rows) - 1, rows, reward) for session, rows in sessions.items()]
    return dict(zip(sessions, group_advantages(rewards, method), strict=True))


# Rows ------------------------------------------------------------------------------------------------


@attrs.frozen
class _Line:
    """A row with the numbers that its tensors need."""

    row: "Row"
    group_index: int
    reward: float
    advantage: float

    @property
    def prompt_ids(self) -> Packed | Sequence[int]:
        return held(self.row.trajectory, "prompt_ids")

    @property
    def response_ids(self) -> Packed | Sequence[int]:
        return held(self.row.trajectory, "response_ids")

    @property
    def log_probs(self) -> Packed | Sequence[float]:
        return held(self.row.trajectory, "log_probs")


def _lines(batch: "Batch", method: Advantages | None, reward: str, *, log_probs: bool) -> list[_Line]:
    lines = []
    for number, group in enumerate(batch.groups):
        advantages = {} if method is None else _session_advantages(group, method, reward)
        rows = dict(group.sessions)
        for row in group.rows():
            _check_tokens(row, log_probs=log_probs)
            value = _reward(row.group_id, row.session, row.index, rows[row.session], reward)
            lines.append(_Line(row, number, value, advantages.get(row.session, 0.0)))
    return lines


def _reward(group_id: str, session: int, index: int, rows: Sequence[Trajectory], name: str) -> float:
    """A row's reward: its own, or its session's (that of the last trajectory) where it has none."""
    for at in (index, len(rows) - 1):
        value = metrics_of(rows[at]).get(name)
        if value is not None:
            return value
    present = ", ".join(map(repr, sorted(metrics_of(rows[-1])))) or "none at all"
    raise UnusableBatch(
        group_id,
        session,
        len(rows) - 1,
        f"has no metric {name!r}",
        f"it has {present}: report {name!r} with the last trajectory of every session, or name another: reward=...",
    )


def _check_tokens(row: "Row", *, log_probs: bool) -> None:
    who = (row.group_id, row.session, row.index)
    prompt_count, response_count = (len(held(row.trajectory, field)) for field in ("prompt_ids", "response_ids"))
    if not prompt_count:
        what = "no prompt tokens" if response_count else "no tokens"
        raise UnusableBatch(
            *who, f"has {what}", "a session that is to be trained on returns prompt_ids and response_ids"
        )
    log_prob_count = len(held(row.trajectory, "log_probs"))
    if log_probs and log_prob_count != response_count:
        raise UnusableBatch(
            *who,
            f"has {log_prob_count} log_probs for {response_count} response tokens",
            "return one for each, or leave them out of the tensors: log_probs=False",
        )


# Tensors ---------------------------------------------------------------------------------------------


def to_torch(
    batch: "Batch",
    *,
    layout: Layout,
    pad_id: int,
    advantages: Advantages | None,
    reward: str,
    log_probs: bool,
    max_prompt: int | None,
    max_response: int | None,
    device: Any,
) -> "dict[str, Tensor]":
    """See `Batch.to_torch`, which is this function."""
    if advantages is not None and advantages not in get_args(Advantages):
        known = get_args(Advantages)
        raise BadSettings(
            f"advantages is {advantages!r}; it must be one of {', '.join(known)}{meant(advantages, known)}, or None"
        )
    if layout not in get_args(Layout):
        raise BadSettings(f"layout is {layout!r}; it must be 'padded' or 'jagged'{meant(layout, get_args(Layout))}")
    try:
        import torch
    except ImportError as error:
        raise MissingExtra("batch.to_torch()", "torch", "torch") from error
    lines = _lines(batch, advantages, reward, log_probs=log_probs)
    if layout == "padded":
        tensors = _padded(lines, pad_id, max_prompt, max_response, log_probs=log_probs)
    else:
        if max_prompt is not None or max_response is not None:
            raise BadSettings("max_prompt and max_response are widths of the padded layout; jagged has none")
        tensors = _jagged(lines, log_probs=log_probs)
    if advantages is None:
        del tensors["advantages"]
    tensors |= {
        "rewards": torch.tensor([line.reward for line in lines], dtype=torch.float32),
        "group_index": torch.tensor([line.group_index for line in lines], dtype=torch.int64),
        "weight_version": torch.tensor([line.row.weight_version for line in lines], dtype=torch.int64),
    }
    return tensors if device is None else {name: tensor.to(device) for name, tensor in tensors.items()}


def _padded(
    lines: Sequence[_Line], pad_id: int, max_prompt: int | None, max_response: int | None, *, log_probs: bool
) -> "dict[str, Tensor]":
    import torch

    prompts = _width(lines, "prompt", lambda line: len(line.prompt_ids), max_prompt)
    responses = _width(lines, "response", lambda line: len(line.response_ids), max_response)
    input_ids = torch.full((len(lines), prompts + responses), pad_id, dtype=torch.int64)
    attention_mask = torch.zeros_like(input_ids)
    response_mask = torch.zeros((len(lines), responses), dtype=torch.int64)
    rollout_log_probs = torch.zeros((len(lines), responses), dtype=torch.float32)
    for at, line in enumerate(lines):
        start, length = prompts - len(line.prompt_ids), len(line.response_ids)
        input_ids[at, start:prompts] = _integers(line, "prompt_ids")
        input_ids[at, prompts : prompts + length] = _integers(line, "response_ids")
        attention_mask[at, start : prompts + length] = 1
        response_mask[at, :length] = _mask(line)
        if log_probs:
            rollout_log_probs[at, :length] = _floats(line)
    values = torch.tensor([line.advantage for line in lines], dtype=torch.float32)
    tensors = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        # Pads before the prompt get 0; those behind the answer repeat its last position, so none leaves the context.
        "position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0),
        "response_mask": response_mask,
        "rollout_log_probs": rollout_log_probs,
        "advantages": values[:, None] * response_mask,
    }
    if not log_probs:
        del tensors["rollout_log_probs"]
    return tensors


def _width(lines: Sequence[_Line], part: str, length: Callable[[_Line], int], bound: int | None) -> int:
    longest = max(lines, key=length, default=None)
    if longest is None:
        return bound or 0
    if bound is None:
        return length(longest)
    if length(longest) > bound:
        row = longest.row
        raise UnusableBatch(
            row.group_id,
            row.session,
            row.index,
            f"has a {part} of {length(longest)} tokens, max_{part} is {bound}",
            f"nothing is cut here: raise max_{part}, or bound what the session generates",
        )
    return bound


def _jagged(lines: Sequence[_Line], *, log_probs: bool) -> "dict[str, Tensor]":
    import torch

    def joined(parts: "list[Tensor]", dtype: Any) -> "Tensor":
        return torch.cat([torch.empty(0, dtype=dtype), *parts])

    def offsets(lengths: "Tensor") -> "Tensor":
        return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])

    prompts = torch.tensor([len(line.prompt_ids) for line in lines], dtype=torch.int64)
    responses = torch.tensor([len(line.response_ids) for line in lines], dtype=torch.int64)
    starts, response_starts = offsets(prompts + responses), offsets(responses)
    places, response_places = (torch.arange(int(each[-1])) for each in (starts, response_starts))
    response_mask = joined([_mask(line) for line in lines], torch.int64)
    values = torch.tensor([line.advantage for line in lines], dtype=torch.float32)
    tensors = {
        "input_ids": joined(
            [part for line in lines for part in (_integers(line, "prompt_ids"), _integers(line, "response_ids"))],
            torch.int64,
        ),
        "position_ids": places - starts[:-1].repeat_interleave(prompts + responses),
        "offsets": starts,
        # As far behind the first response of its row as among responses alone.
        "response_index": response_places + (starts[:-1] + prompts - response_starts[:-1]).repeat_interleave(responses),
        "response_offsets": response_starts,
        "response_mask": response_mask,
        "advantages": values.repeat_interleave(responses) * response_mask,
    }
    if log_probs:
        tensors["rollout_log_probs"] = joined([_floats(line) for line in lines], torch.float32)
    return tensors


def _mask(line: _Line) -> "Tensor":
    """(R,) int64: 1 for each response token of the model, 0 for those of the environment."""
    import torch

    mask = torch.ones(len(line.response_ids), dtype=torch.int64)
    for start, stop in line.row.trajectory.environment:
        mask[start:stop] = 0
    return mask


def _integers(line: _Line, field: Literal["prompt_ids", "response_ids"]) -> "Tensor":
    import torch

    return _tensor(line, field, "q", torch.int64)


def _floats(line: _Line) -> "Tensor":
    import torch

    return _tensor(line, "log_probs", "d", torch.float32)


def _tensor(line: _Line, field: NumbersField, code: str, dtype: Any) -> "Tensor":
    """Numbers as a tensor, by way of an array: torch looks at a sequence of Python's numbers one by one, which takes
    ten times as long, and a thousand times as long as what is packed already.

    Args:
        code: of the array for what isn't packed.

    Raises:
        UnusableBatch: a row made by hand has others.
    """
    import torch

    numbers = held(line.row.trajectory, field)
    if not len(numbers):
        return torch.empty(0, dtype=dtype)
    of_code = {"i": torch.int32, "q": torch.int64, "f": torch.float32, "d": torch.float64}
    if isinstance(numbers, Packed):
        # A copy of the bytes, since torch may write where it reads.
        packed = array.array(numbers.code, numbers.data)
    else:
        try:
            packed = array.array(code, list(numbers))
        except (TypeError, ValueError, OverflowError) as error:
            row = line.row
            problem, remedy = f"has {field} of which one is none: {error}", "give integers, and floats for log_probs"
            raise UnusableBatch(row.group_id, row.session, row.index, problem, remedy) from error
    return torch.frombuffer(packed, dtype=of_code[packed.typecode]).to(dtype)
