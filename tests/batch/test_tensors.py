"""`batch.to_torch()`, against plain 64-bit computation."""

import array
import math
import statistics
import struct
from typing import get_args

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupstate import Batch, Trajectory
from groupstate.core.trajectory import NumbersField, checked, held
from groupstate.errors import BadSettings, UnusableBatch, UnusableResult
from groupstate.tensors import Layout, group_advantages

from .builders import batch, batches, group, row, small

# Advantages ------------------------------------------------------------------------------------------


def expected_advantages(rewards: list[float], method: str) -> list[float]:
    """The formulas as they are written in the papers."""
    n = len(rewards)
    if n == 1:
        return [0.0]
    mean = sum(rewards) / n
    if method == "grpo":
        return [(r - mean) / (statistics.stdev(rewards) + 1e-6) for r in rewards]
    if method == "grpo_no_std":
        return [r - mean for r in rewards]
    return [r - sum(rewards[:i] + rewards[i + 1 :]) / (n - 1) for i, r in enumerate(rewards)]


@pytest.mark.parametrize("method", ["grpo", "grpo_no_std", "rloo"])
@given(rewards=st.lists(small, min_size=1, max_size=9))
def test_advantages_are_those_of_the_papers(method, rewards):
    found = group_advantages(rewards, method)

    # A flat group's deviation is noise of 1e-16 over 1e-6, hence the absolute part.
    assert found == pytest.approx(expected_advantages(rewards, method), rel=1e-6, abs=1e-8)


def test_the_deviation_is_the_unbiased_one():
    assert group_advantages([0.0, 1.0], "grpo") == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], rel=1e-5)


@pytest.mark.parametrize("method", ["grpo", "grpo_no_std", "rloo"])
@given(value=small, count=st.integers(1, 50))
def test_equal_rewards_give_exactly_zero(method, value, count):
    assert group_advantages([value] * count, method) == [0.0] * count


@pytest.mark.parametrize("method", ["grpo", "grpo_no_std", "rloo"])
def test_a_group_without_sessions_has_no_advantages(method):
    assert group_advantages([], method) == []


# Padded ----------------------------------------------------------------------------------------------


def test_prompts_are_padded_on_the_left_and_responses_on_the_right():
    tensors = batch(group([row((1, 2), (3,))], [row((4,), (5, 6, 7))])).to_torch(pad_id=99)

    assert tensors["input_ids"].tolist() == [[1, 2, 3, 99, 99], [99, 4, 5, 6, 7]]
    assert tensors["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]]
    assert tensors["position_ids"].tolist() == [[0, 1, 2, 2, 2], [0, 0, 1, 2, 3]]
    assert tensors["response_mask"].tolist() == [[1, 0, 0], [1, 1, 1]]


def test_tokens_of_the_environment_are_masked():
    tensors = batch(group([row((1,), (2, 3, 4, 5), environment=[(1, 3)])])).to_torch()

    assert tensors["response_mask"].tolist() == [[1, 0, 0, 1]]
    assert tensors["attention_mask"].tolist() == [[1, 1, 1, 1, 1]]


def test_all_trajectories_of_a_session_get_the_advantage_of_its_last():
    first, last = row((1,), (2, 3), reward=5.0), row((1,), (2,), reward=1.0)
    tensors = batch(group([first, last], [row((1,), (4,), reward=0.0)])).to_torch(advantages="grpo_no_std")

    assert tensors["advantages"].tolist() == [[0.5, 0.5], [0.5, 0.0], [-0.5, 0.0]]
    assert tensors["rewards"].tolist() == [5.0, 1.0, 0.0]


def test_an_earlier_trajectory_may_leave_the_reward_to_the_last():
    tensors = batch(group([row(reward=None), row(reward=1.0)])).to_torch()

    assert tensors["rewards"].tolist() == [1.0, 1.0]


def test_a_partial_group_is_compared_over_the_sessions_that_finished():
    partial = attrs.evolve(group([row(reward=1.0)], [row(reward=0.0)], size=8), phase="finished")
    tensors = batch(partial).to_torch(advantages="rloo")

    assert tensors["advantages"][:, 0].tolist() == [1.0, -1.0]


def test_a_session_that_finished_without_rows_is_left_out():
    tensors = batch(group([row(reward=1.0)], [], [row(reward=0.0)])).to_torch(advantages="rloo")

    assert tensors["advantages"][:, 0].tolist() == [1.0, -1.0]


def test_a_group_of_one_has_no_advantage():
    assert batch(group([row(reward=3.0)])).to_torch()["advantages"].tolist() == [[0.0, 0.0]]


def test_an_empty_response_is_a_row_without_trainable_tokens():
    tensors = batch(group([row((1,), ())], [row((1,), (2,))])).to_torch()

    assert tensors["response_mask"].tolist() == [[0], [1]]
    assert tensors["input_ids"].tolist() == [[1, 0], [1, 2]]


def test_only_empty_responses_give_a_response_part_of_no_width():
    tensors = batch(group([row((1, 2), ())])).to_torch()

    assert tensors["response_mask"].shape == (1, 0)
    assert tensors["input_ids"].tolist() == [[1, 2]]


def test_a_batch_without_rows_gives_empty_tensors():
    tensors = batch(group([], [])).to_torch()

    assert {name: tensor.shape[0] for name, tensor in tensors.items()} == dict.fromkeys(tensors, 0)


def test_rows_name_their_group_and_its_version():
    tensors = batch(group([row()], group_id="a", version=4), group([row()], [row()], group_id="b")).to_torch()

    assert tensors["group_index"].tolist() == [0, 1, 1]
    assert tensors["weight_version"].tolist() == [4, 0, 0]


def test_widths_can_be_fixed():
    tensors = batch(group([row((1,), (2,))])).to_torch(max_prompt=3, max_response=2)

    assert tensors["input_ids"].tolist() == [[0, 0, 1, 2, 0]]


def test_tensors_go_to_the_device():
    assert batch(group([row()])).to_torch(device="meta")["rewards"].device.type == "meta"


@pytest.mark.parametrize("kind", ["f", "d", list, tuple])
@pytest.mark.parametrize("layout", get_args(Layout))
def test_numbers_may_lie_in_any_sequence(layout, kind):
    def held(numbers):
        if isinstance(kind, str):
            return array.array(kind if isinstance(numbers[0], float) else {"f": "i", "d": "h"}[kind], numbers)
        return kind(numbers)

    plain = row((1, 2), (3, 4, 5), log_probs=(-0.5, 0.0, -0.25), environment=[(1, 2)])
    other = attrs.evolve(
        plain,
        prompt_ids=held(plain.prompt_ids),
        response_ids=held(plain.response_ids),
        log_probs=held(plain.log_probs),
    )
    expected = batch(group([plain, row()])).to_torch(layout=layout)
    found = batch(group([other, row()])).to_torch(layout=layout)

    assert {name: (tensor.dtype, tensor.tolist()) for name, tensor in found.items()} == {
        name: (tensor.dtype, tensor.tolist()) for name, tensor in expected.items()
    }


@pytest.mark.parametrize("layout", get_args(Layout))
@given(made=batches())
def test_packed_rows_give_the_same_tensors_and_stay_packed(layout, made: Batch):
    packed = Batch.from_bytes(made.to_bytes())
    expected, found = made.to_torch(layout=layout), packed.to_torch(layout=layout)

    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        name: tensor.tolist() for name, tensor in expected.items()
    }
    kept = [held(each.trajectory, field) for each in packed.rows for field in get_args(NumbersField)]
    assert all(numbers == () or numbers.is_packed for numbers in kept)


@pytest.mark.parametrize("layout", get_args(Layout))
def test_what_is_written_into_tensors_leaves_the_rows_alone(layout):
    made = Batch.from_bytes(batch(group([row((1,), (2,))])).to_bytes())

    for tensor in made.to_torch(layout=layout).values():
        tensor.fill_(9)

    assert made.rows[0].trajectory == row((1,), (2,))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"prompt_ids": (1.5,)}, "has prompt_ids of which one is none"),
        ({"response_ids": ("a", "b")}, "has response_ids of which one is none"),
        ({"log_probs": (None, -0.5)}, "has log_probs of which one is none"),
    ],
)
@pytest.mark.parametrize("layout", get_args(Layout))
def test_a_row_made_by_hand_with_other_things_than_numbers_is_named(layout, fields, problem):
    made = attrs.evolve(row((1,), (2, 3)), **fields)

    with pytest.raises(UnusableBatch, match=problem):
        batch(group([made])).to_torch(layout=layout)


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16])
def test_a_session_may_return_tensors(kind):
    (found,) = checked(
        Trajectory(
            prompt_ids=torch.tensor([1, 2]),
            response_ids=torch.tensor([3], dtype=torch.int32),
            log_probs=torch.tensor([-0.5], dtype=kind),
        ),
        session=0,
        group_id="g",
    )

    assert (found.prompt_ids, found.response_ids, found.log_probs) == (
        struct.pack("2i", 1, 2),
        struct.pack("i", 3),
        struct.pack("f", -0.5),
    )


@pytest.mark.parametrize(
    ("ids", "problem"),
    [
        (torch.tensor([1.0]), r"has tensor\(1\.\) at response_ids\[0\]"),
        (torch.tensor([[1, 2]]), r"has tensor\(\[1, 2\]\) at response_ids\[0\]"),
        (torch.tensor([1, -2]), r"has tensor\(-2\) at response_ids\[1\]"),
    ],
)
def test_tensors_that_are_no_token_ids_are_refused(ids, problem):
    with pytest.raises(UnusableResult, match=problem):
        checked(Trajectory(response_ids=ids), session=0, group_id="g")


@given(made=batches())
def test_padded_tensors_hold_every_row_whole(made: Batch):
    tensors = made.to_torch(pad_id=2**31, advantages="grpo")

    rows = made.rows
    prompts = max((len(r.trajectory.prompt_ids) for r in rows), default=0)
    advantages = {
        (g.group_id, session): value
        for g in made.groups
        if (finished := [(session, rows) for session, rows in g.sessions if rows])
        for (session, _), value in zip(
            finished,
            expected_advantages([reward_of(rows[-1]) for _, rows in finished], "grpo"),
            strict=True,
        )
    }
    for at, r in enumerate(rows):
        t, start = r.trajectory, prompts - len(r.trajectory.prompt_ids)
        length, mask = len(t.response_ids), mask_of(t)
        assert tensors["input_ids"][at, start : prompts + length].tolist() == [*t.prompt_ids, *t.response_ids]
        assert tensors["attention_mask"][at].sum() == len(t.prompt_ids) + length
        assert tensors["position_ids"][at, start : prompts + length].tolist() == list(range(len(t.prompt_ids) + length))
        assert tensors["response_mask"][at, :length].tolist() == mask
        assert not tensors["response_mask"][at, length:].any()
        assert tensors["rollout_log_probs"][at, :length].tolist() == pytest.approx(list(t.log_probs), rel=1e-6)
        value = advantages[r.group_id, r.session]
        found = tensors["advantages"][at, :length].tolist()
        assert found == pytest.approx([value * m for m in mask], rel=1e-5, abs=1e-7)


def reward_of(trajectory: Trajectory) -> float:
    return trajectory.metrics["reward"] if trajectory.reward is None else trajectory.reward


def mask_of(trajectory: Trajectory) -> list[int]:
    inside = {at for start, stop in trajectory.environment for at in range(start, stop)}
    return [int(at not in inside) for at in range(len(trajectory.response_ids))]


def test_dtypes():
    tensors = batch(group([row()])).to_torch()

    assert {name: tensor.dtype for name, tensor in tensors.items()} == {
        "input_ids": torch.int64,
        "attention_mask": torch.int64,
        "position_ids": torch.int64,
        "response_mask": torch.int64,
        "rollout_log_probs": torch.float32,
        "advantages": torch.float32,
        "rewards": torch.float32,
        "group_index": torch.int64,
        "weight_version": torch.int64,
    }


# Jagged ----------------------------------------------------------------------------------------------


@given(made=batches(), method=st.sampled_from(["grpo", "grpo_no_std", "rloo"]))
def test_jagged_holds_what_padded_holds(made: Batch, method):
    padded = made.to_torch(advantages=method)
    jagged = made.to_torch(advantages=method, layout="jagged")

    here, there = padded["attention_mask"].bool(), jagged
    assert torch.equal(there["input_ids"], padded["input_ids"][here])
    assert torch.equal(there["position_ids"], padded["position_ids"][here])
    lengths = [len(r.trajectory.response_ids) for r in made.rows]
    answered = torch.arange(padded["response_mask"].shape[1]) < torch.tensor(lengths, dtype=torch.int64)[:, None]
    for name in ("response_mask", "rollout_log_probs", "advantages"):
        assert torch.equal(there[name], padded[name][answered]), name
    responses = [token for r in made.rows for token in r.trajectory.response_ids]
    assert there["input_ids"][there["response_index"]].tolist() == responses
    for name in ("rewards", "group_index", "weight_version"):
        assert torch.equal(there[name], padded[name]), name


def test_offsets_part_the_rows():
    tensors = batch(group([row((1, 2), (3,))], [row((4,), ())])).to_torch(layout="jagged")

    assert tensors["offsets"].tolist() == [0, 3, 4]
    assert tensors["response_offsets"].tolist() == [0, 1, 1]


def test_jagged_tensors_make_nested_ones():
    tensors = batch(group([row((1, 2), (3,))], [row((4,), (5, 6, 7))])).to_torch(layout="jagged")
    nested = torch.nested.nested_tensor_from_jagged(tensors["input_ids"], tensors["offsets"])

    assert [part.tolist() for part in nested.unbind()] == [[1, 2, 3], [4, 5, 6, 7]]


# What can't be ---------------------------------------------------------------------------------------


def test_a_row_without_tokens_is_named():
    with pytest.raises(UnusableBatch, match="trajectory 0 of session 1 of group 'g' has no tokens") as caught:
        batch(group([row()], [Trajectory(reward=1.0)])).to_torch()

    assert (caught.value.group_id, caught.value.session, caught.value.index) == ("g", 1, 0)


def test_a_response_without_a_prompt_is_refused():
    with pytest.raises(UnusableBatch, match="has no prompt tokens"):
        batch(group([row((), (1,))])).to_torch()


@pytest.mark.parametrize("method", ["grpo", None])
def test_a_missing_reward_names_group_and_session(method):
    trajectory = attrs.evolve(row(reward=None), metrics={"acc": 1.0})
    with pytest.raises(UnusableBatch, match="session 1 of group 'g' has no metric 'reward'; it has 'acc'"):
        batch(group([row()], [trajectory])).to_torch(advantages=method)


def test_another_metric_can_be_the_reward():
    trajectory = attrs.evolve(row(reward=None), metrics={"acc": 1.0})

    assert batch(group([trajectory])).to_torch(reward="acc")["rewards"].tolist() == [1.0]


def test_missing_log_probs_name_the_row():
    bare = batch(group([row(log_probs=())]))
    with pytest.raises(UnusableBatch, match=r"has 0 log_probs for 2 response tokens.*log_probs=False"):
        bare.to_torch()

    assert "rollout_log_probs" not in bare.to_torch(log_probs=False)
    assert "rollout_log_probs" not in bare.to_torch(log_probs=False, layout="jagged")


@pytest.mark.parametrize(("bound", "part"), [("max_prompt", "prompt"), ("max_response", "response")])
def test_nothing_is_cut(bound, part):
    with pytest.raises(UnusableBatch, match=f"has a {part} of 3 tokens, {bound} is 2"):
        batch(group([row((1, 2, 3), (1, 2, 3))])).to_torch(**{bound: 2})


@pytest.mark.parametrize(
    "arguments", [{"advantages": "GRPO"}, {"layout": "nested"}, {"layout": "jagged", "max_prompt": 3}]
)
def test_arguments_that_cannot_be(arguments):
    with pytest.raises(BadSettings):
        batch(group([row()])).to_torch(**arguments)


def test_advantages_can_be_left_out():
    assert "advantages" not in batch(group([row()])).to_torch(advantages=None)
