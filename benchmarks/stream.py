"""The events of a run as its log has them, made without running anything.

Groups of eight sessions go from submission to commit. Each session returns one trajectory of two metrics and
one or two spans, with a payload; lengths, rewards and the order of the sessions' ends are drawn from a seed, so the
same stream comes each time. Groups go in batches; while the sessions of one run, the batches before it wait to be
sampled.
"""

import random
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final

from groupstate.core import events as ev

SESSIONS: Final = 8
BATCH_SIZE: Final = 64
WAITING: Final = 4
"""Batches of groups that are sampleable."""
BEGIN_NS: Final = 1_700_000_000_000_000_000
STEP_NS: Final = 997_001

Events = Iterator[ev.AnyEvent]


def records(events: Iterable[ev.AnyEvent], first: int = 1) -> Iterator[ev.Record]:
    return (ev.Record(seq, BEGIN_NS + seq * STEP_NS, event) for seq, event in enumerate(events, first))


def run(groups: int, batch_size: int = BATCH_SIZE, *, kept: int = WAITING, asked: bool = False) -> Events:
    """A whole run. It ends with a few batches that were not sampled.

    Args:
        kept: batches of groups that are sampleable at a time.
        asked: each batch is asked for as soon as the one before it is committed, so that the trainer always waits.
    """
    rng = random.Random(1)
    waiting: deque[tuple[str, ...]] = deque()
    yield ev.RunStarted("benchmark", {}, 1, 0)
    if asked:
        yield ev.BatchRequested(1, ev.TRAIN, batch_size, 0)
    for version, begin in enumerate(range(0, groups, batch_size)):
        numbers = range(begin, min(begin + batch_size, groups))
        yield from ended(numbers, version, rng)
        waiting.append(tuple(map(name, numbers)))
        if len(waiting) > kept:
            yield from _trained(waiting.popleft(), version + 1 - kept, version + 1, kept, asked=asked)
        else:
            yield ev.WeightsPublished(version + 1)


def name(number: int) -> str:
    return f"group-{number:08d}"


def ended(numbers: Iterable[int], version: int, rng: random.Random) -> Events:
    """Groups from submission to their terminal event, their sessions side by side."""
    yield from (_submitted(number, version, rng) for number in numbers)
    sessions = [(number, session) for number in numbers for session in range(SESSIONS)]
    rng.shuffle(sessions)
    for number, session in sessions:
        yield ev.SessionStarted(name(number), session, 1, "worker-3", version)
    rng.shuffle(sessions)
    left = dict.fromkeys(numbers, SESSIONS)
    for number, session in sessions:
        yield finished(number, session, version, rng)
        left[number] -= 1
        if not left[number]:
            yield ev.GroupFinished(name(number))


def finished(number: int, session: int, version: int, rng: random.Random) -> ev.SessionFinished:
    length = rng.randrange(200, 2_000)
    turn = rng.randrange(length) if rng.random() < 0.3 else 0
    spans = (ev.VersionSpan(turn, length, version),)
    if turn:
        spans = (ev.VersionSpan(0, turn, version - 1), *spans)
    metrics = {"reward": float(rng.random() < 0.4), "overlong": rng.random()}
    row = ev.TrajectoryRecord(0, metrics, rng.randrange(50, 400), length, spans)
    key = number * (SESSIONS + 1) + session + 2
    return ev.SessionFinished(name(number), session, 1, (row,), ev.PayloadRef(key, 9 * length, rng.getrandbits(32)))


def _submitted(number: int, version: int, rng: random.Random) -> ev.GroupSubmitted:
    prompt = ev.PayloadRef(number * (SESSIONS + 1) + 1, 400, rng.getrandbits(32))
    return ev.GroupSubmitted(
        name(number), SESSIONS, ev.TRAIN, version, 1, "admission", "math", number, prompt, prompt.length
    )


def _trained(names: tuple[str, ...], batch: int, version: int, lag: int, *, asked: bool) -> Events:
    if not asked:
        yield ev.BatchRequested(batch, ev.TRAIN, len(names), version - 1)
    yield ev.BatchSampled(batch, batch, ev.TRAIN, names, version - 1, (lag,) * len(names))
    yield ev.BatchCommitted(batch)
    yield ev.WeightsPublished(version)
    if asked:
        yield ev.BatchRequested(batch + 1, ev.TRAIN, len(names), version)
