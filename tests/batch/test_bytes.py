"""A batch as bytes, for the other ranks of a trainer."""

import array
import re

import attrs
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupstate import Batch, Prompt, Rules, Tally, Trajectory, VersionSpan, open_run
from groupstate.core.metrics import Spread
from groupstate.core.packed import Packed
from groupstate.core.trajectory import held
from groupstate.errors import BadInput

from .builders import batch, batches, group, row


@given(made=batches())
def test_bytes_give_an_equal_batch_back(made: Batch):
    assert Batch.from_bytes(made.to_bytes()) == made


async def scored(ctx):
    return Trajectory(reward=float(ctx.session))


async def test_a_sampled_batch_comes_back_equal():
    async def session(ctx):
        return Trajectory(
            prompt_ids=[1, 2],
            response_ids=[3, 4, 5],
            log_probs=[-0.1, -0.2, 0.0],
            spans=[VersionSpan(0, 2, 0)],
            environment=[(2, 3)],
            reward=float(ctx.session),
            info={"tool": ["a", {"b": None}]},
        )

    source = [{"question": "?", "choices": ["x"]}]
    async with open_run(rules=Rules(), source=source, session=session, group_size=2) as run:
        sampled = await run.sample(1)
        back = Batch.from_bytes(sampled.to_bytes())

        assert back == sampled
        assert [r.key for r in back.rows] == [r.key for r in sampled.rows]


async def test_the_run_of_a_batch_goes_along():
    async with open_run(session=scored, group_size=2) as run:
        run.submit("p")
        sampled = await run.sample(1)

        assert Batch.from_bytes(sampled.to_bytes()).run_id == sampled.run_id != ""


def test_bytes_from_before_batches_knew_their_run_are_read():
    made = batch(group([row()]))
    told = msgspec.msgpack.decode(made.to_bytes())
    assert told[-1] == made.run_id == ""

    assert Batch.from_bytes(msgspec.msgpack.encode(told[:-1])) == made


def test_bytes_from_before_log_probs_could_take_four_bytes_are_read():
    made = batch(group([row(log_probs=(-0.1, -0.2))]))
    told = msgspec.msgpack.decode(made.to_bytes())
    kept = told[3][0][7][0][1][0]
    assert (told[0], kept.pop()) == ("groupstate-batch-3", "d")

    assert Batch.from_bytes(msgspec.msgpack.encode(["groupstate-batch-2", *told[1:]])) == made


async def test_info_that_was_changed_is_sent_as_it_is_now():
    async def session(ctx):
        return Trajectory(reward=float(ctx.session), info={"a": [1]})

    async with open_run(session=session, group_size=2) as run:
        run.submit("p")
        sampled = await run.sample(1)
    first, second = [row.trajectory for row in sampled.rows]
    first.info["note"] = "added"
    first.info["a"].append(2)

    back = Batch.from_bytes(sampled.to_bytes())

    assert back == sampled
    assert [row.trajectory.info for row in back.rows] == [{"a": [1, 2], "note": "added"}, {"a": [1]}]
    assert second.info == {"a": [1]}


async def test_log_probs_of_a_sampled_batch_stay_as_small():
    async def session(ctx):
        return Trajectory(response_ids=range(1_000), log_probs=[-0.1] * 1_000, reward=float(ctx.session))

    async with open_run(session=session, group_size=2) as run:
        run.submit("p")
        sampled = await run.sample(1)

    assert len(sampled.to_bytes()) < 2 * 8_000 + 1_000
    assert Batch.from_bytes(sampled.to_bytes()) == sampled


@pytest.mark.parametrize("kind", [list, tuple, lambda numbers: array.array("d" if -0.5 in numbers else "q", numbers)])
def test_rows_with_the_same_numbers_are_equal_whatever_holds_them(kind):
    one = attrs.evolve(row(), prompt_ids=kind([1]), response_ids=kind([2]), log_probs=kind([-0.5]))
    other = attrs.evolve(one, response_ids=kind([3]))

    assert Batch.from_bytes(batch(group([one])).to_bytes()) == batch(group([row((1,), (2,))]))
    assert Batch.from_bytes(batch(group([other])).to_bytes()) != batch(group([row((1,), (2,))]))


async def test_numbers_of_a_sampled_batch_stay_packed_until_they_are_read():
    async def session(ctx):
        return Trajectory(prompt_ids=[1, 2**31 - 1], response_ids=[3], log_probs=[-0.1], reward=float(ctx.session))

    async with open_run(session=session, group_size=2) as run:
        run.submit("p")
        sampled = await run.sample(1)
    row = Batch.from_bytes(sampled.to_bytes()).rows[0].trajectory
    kept = [held(row, field) for field in ("prompt_ids", "response_ids", "log_probs")]

    assert [(type(numbers), numbers.code, len(numbers)) for numbers in kept] == [
        (Packed, "i", 2),
        (Packed, "i", 1),
        (Packed, "f", 1),
    ]
    assert (row.prompt_ids, row.response_ids) == ((1, 2**31 - 1), (3,))
    assert row.log_probs == pytest.approx((-0.1,), abs=1e-8)


@pytest.mark.parametrize("data", [b"", b"\x00", b"groupstate", batch(group([row()])).to_bytes()[:-1]])
def test_other_bytes_are_refused(data):
    with pytest.raises(BadInput, match=r"not what Batch.to_bytes\(\)"):
        Batch.from_bytes(data)


@pytest.mark.parametrize("data", ["groupstate", None, 3, [1, 2]])
def test_what_is_no_bytes_is_refused(data):
    with pytest.raises(BadInput, match=f"^data is {re.escape(repr(data))}; it must be the bytes"):
        Batch.from_bytes(data)


@pytest.mark.parametrize("kind", [bytearray, memoryview, lambda data: array.array("B", data)])
def test_whatever_holds_the_bytes_gives_the_batch_back(kind):
    made = batch(group([row()]))

    assert Batch.from_bytes(kind(made.to_bytes())) == made


def refused_or_read(data: bytes) -> None:
    try:
        read = Batch.from_bytes(data)
    except BadInput:
        return
    assert isinstance(read, Batch)


def test_bytes_of_which_any_one_bit_was_flipped_give_a_batch_or_are_refused():
    tally = Tally("train", {"x": 1.0}, {"reward": Spread(1, 1.0, 1.0, 1.0)}, {"y": {0.5: 2}})
    told = Prompt("p", extra={"a": [{"b": None}]})
    data = attrs.evolve(batch(attrs.evolve(group([row()]), prompt=told)), tally=tally).to_bytes()

    for bit in range(8 * len(data)):
        refused_or_read(data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :])


@given(made=batches(), data=st.data())
def test_bytes_that_came_to_harm_give_a_batch_or_are_refused(made: Batch, data: st.DataObject):
    harmed = bytearray(made.to_bytes())
    for place in data.draw(st.lists(st.integers(0, len(harmed) - 1), min_size=1, max_size=4)):
        harmed[place] = data.draw(st.integers(0, 255))

    refused_or_read(bytes(harmed[: data.draw(st.integers(0, len(harmed)))]))
    refused_or_read(bytes(harmed))
