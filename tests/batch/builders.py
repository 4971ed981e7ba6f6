"""Small batches by hand, and strategies for large ones."""

import array
from collections.abc import Sequence

from hypothesis import strategies as st

from groupstate import Batch, BatchGroup, Prompt, Tally, Trajectory, VersionSpan
from groupstate.core.metrics import Spread


def row(
    prompt: Sequence[int] = (7,),
    response: Sequence[int] = (8, 9),
    *,
    reward: float | None = 1.0,
    log_probs: Sequence[float] | None = None,
    environment: Sequence[tuple[int, int]] = (),
) -> Trajectory:
    return Trajectory(
        prompt_ids=tuple(prompt),
        response_ids=tuple(response),
        log_probs=tuple(-0.5 for _ in response) if log_probs is None else tuple(log_probs),
        environment=tuple(environment),
        metrics={} if reward is None else {"reward": reward},
    )


def group(
    *sessions: Sequence[Trajectory], group_id: str = "g", size: int | None = None, version: int = 0
) -> BatchGroup:
    return BatchGroup(
        group_id=group_id,
        size=size or len(sessions),
        phase="finished",
        partial=size not in (None, len(sessions)),
        dataset="",
        weight_version=version,
        lag=0,
        sessions=tuple((number, tuple(rows)) for number, rows in enumerate(sessions)),
    )


def batch(*groups: BatchGroup) -> Batch:
    return Batch(number=1, partition="train", groups=groups, weight_version=3, tally=Tally("train", {"x": 1.0}))


# Strategies ------------------------------------------------------------------------------------------

finite = st.floats(allow_nan=False, allow_infinity=False)
small = st.floats(-10.0, 10.0)
tokens = st.lists(st.integers(0, 2**31 - 1), max_size=6)
held_tokens = tokens | tokens.map(tuple) | tokens.map(lambda ids: array.array("i", ids))
"""As a session may return them, and as a sampled batch has them."""
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | finite | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
objects = st.dictionaries(st.text(max_size=3), plain, max_size=3)


@st.composite
def ranges(draw: st.DrawFn, length: int) -> tuple[tuple[int, int], ...]:
    """Ranges in order within `length`, none of them empty."""
    cuts = sorted(draw(st.sets(st.integers(0, length), max_size=4)))
    return tuple(zip(cuts[::2], cuts[1::2], strict=False))


def held(numbers: st.SearchStrategy[float], count: int) -> st.SearchStrategy[Sequence[float]]:
    listed = st.lists(numbers, min_size=count, max_size=count)
    return listed | listed.map(tuple) | st.builds(array.array, st.sampled_from("fd"), listed)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    response = draw(held_tokens)
    spans = draw(ranges(len(response)))
    return Trajectory(
        prompt_ids=draw(held_tokens.filter(len)),
        response_ids=response,
        log_probs=draw(held(small, len(response))),
        spans=tuple(VersionSpan(start, stop, draw(st.integers(0, 9))) for start, stop in spans),
        environment=draw(ranges(len(response))),
        reward=draw(st.none() | small),
        metrics={"reward": draw(small), **draw(st.dictionaries(st.text(max_size=3), finite, max_size=2))},
        text=draw(st.text(max_size=5)),
        info=draw(objects),
    )


prompts = st.builds(
    Prompt,
    content=plain,
    dataset=st.text(max_size=3),
    n=st.none() | st.integers(1, 8),
    group_id=st.none() | st.text(min_size=1, max_size=3),
    extra=objects,
)


@st.composite
def batch_groups(draw: st.DrawFn, number: int) -> BatchGroup:
    size = draw(st.integers(1, 4))
    finished = draw(st.lists(st.integers(0, size - 1), unique=True, max_size=size).map(sorted))
    rows = st.lists(trajectories(), max_size=3).map(tuple)
    return BatchGroup(
        group_id=f"g_{number}",
        size=size,
        phase=draw(st.sampled_from(["finished", "failure"])),
        partial=len(finished) < size,
        dataset=draw(st.text(max_size=3)),
        weight_version=draw(st.integers(0, 5)),
        lag=draw(st.integers(0, 5)),
        sessions=tuple((session, draw(rows)) for session in finished),
        prompt=draw(st.none() | prompts),
    )


def tallies(partition: str, numbers: st.SearchStrategy[float] = finite) -> st.SearchStrategy[Tally]:
    names = st.sampled_from(["x", "y/z", "reward"])
    counts = st.dictionaries(numbers, st.integers(1, 9), min_size=1, max_size=3)
    return st.builds(
        Tally,
        st.just(partition),
        st.dictionaries(names, numbers),
        st.dictionaries(names, st.lists(numbers, min_size=1, max_size=3).map(Spread.of)),
        st.dictionaries(names, counts),
    )


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    count = draw(st.integers(0, 3))
    partition = draw(st.sampled_from(["train", "val"]))
    return Batch(
        number=draw(st.integers(1, 9)),
        partition=partition,
        groups=tuple(draw(batch_groups(number)) for number in range(count)),
        weight_version=draw(st.integers(0, 9)),
        tally=draw(tallies(partition)),
    )
