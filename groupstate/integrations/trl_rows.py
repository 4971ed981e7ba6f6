"""A group as values of TRL's rows; nothing here needs TRL.

Rule: all rows of a session have the advantage of its last trajectory's reward, among the sessions of its group.
"""

import statistics
from collections.abc import Iterator
from typing import Any

from groupstate.batch import BatchGroup
from groupstate.core.trajectory import Trajectory, metrics_of
from groupstate.errors import BadInput


def group_rows(group: BatchGroup, number: int, version: int) -> Iterator[dict[str, Any]]:
    """A group as values of TRL's rows. All rows of a session have the advantage of its last trajectory's reward.

    Raises:
        BadInput: a session without a reward.
    """
    rewards = [_reward(group, session, rows[-1]) for session, rows in group.sessions if rows]
    mean, deviation = statistics.fmean(rewards), statistics.pstdev(rewards)
    sessions = [rows for _, rows in group.sessions if rows]
    for reward, rows in zip(rewards, sessions, strict=True):
        for row in rows:
            yield {
                "prompt": messages(None if group.prompt is None else group.prompt.content),
                "completion": [{"role": "assistant", "content": row.text}],
                **arrays(row),
                "advantage": (reward - mean) / (deviation + 1e-8),
                "model_version": version - group.lag,
                "group_id": number,
                "metrics": {**metrics_of(row), "reward": reward, "reward_std": deviation},
            }


def _reward(group: BatchGroup, session: int, row: Trajectory) -> float:
    metrics = metrics_of(row)
    if "reward" not in metrics:
        has = ", ".join(map(repr, sorted(metrics))) or "none"
        raise BadInput(
            f"session {session} of group {group.group_id!r} has no metric 'reward', which advantages come from; it has "
            f"{has}. Return Trajectory(reward=...)"
        )
    return metrics["reward"]


def arrays(row: Trajectory) -> dict[str, Any]:
    """The tokens of a row: the mask is 1 where the model wrote, log-probabilities are 0 where it didn't."""
    import numpy

    before, after = len(row.prompt_ids), len(row.response_ids)
    mask = numpy.zeros(before + after, dtype=numpy.int64)
    mask[before:] = 1
    for start, stop in row.environment:
        mask[before + start : before + stop] = 0
    log_probs = numpy.zeros(before + after, dtype=numpy.float32)
    log_probs[before:] = row.log_probs
    return {
        "input_ids": numpy.asarray([*row.prompt_ids, *row.response_ids], dtype=numpy.int64),
        "completion_mask": mask,
        "old_log_probs": log_probs,
    }


def messages(content: Any) -> list[dict[str, Any]]:
    """A prompt's content as chat messages; a text is what the user says."""
    if isinstance(content, list) and all(isinstance(item, dict) for item in content):
        return content
    return [{"role": "user", "content": content if isinstance(content, str) else ""}]
