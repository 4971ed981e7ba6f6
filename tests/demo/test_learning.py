"""Warm-up, evaluation and loss at sizes that take seconds."""

from collections.abc import AsyncIterator, Sequence

import attrs
import pytest
import torch
from torch import Tensor

from groupstate.demo.evaluate import held_out_accuracy
from groupstate.demo.loss import grpo_loss
from groupstate.demo.settings import Settings
from groupstate.demo.tasks import Tasks, tokenizer
from groupstate.demo.warmup import WarmUp, warm_up
from groupstate.engines.scripted import ScriptedEngine
from groupstate.engines.torch import TorchEngine
from groupstate.engines.transformer import Transformer

SETTINGS = Settings(
    digits=(1, 1), held_out_count=40, width=16, layers=1, heads=2, warmup_batch_size=32, warmup_steps_max=60,
    warmup_accuracy=0.05, warmup_ramp_steps=5,
)  # fmt: skip


@pytest.fixture
def tasks() -> Tasks:
    return Tasks(seed=0, held_out_count=SETTINGS.held_out_count, terms=SETTINGS.terms, digits=SETTINGS.digits)


def new_model(seed: int = 0) -> Transformer:
    return Transformer(SETTINGS.model(tokenizer().vocabulary_size), seed=seed)


@pytest.fixture
async def engine() -> AsyncIterator[TorchEngine]:
    engine = TorchEngine(new_model())
    yield engine
    await engine.aclose()


# Warm-up --------------------------------------------------------------------------------------------


def test_the_warm_up_stops_once_the_model_is_right_often_enough(tasks: Tasks) -> None:
    reports: list[WarmUp] = []
    end = warm_up(new_model(), tasks, SETTINGS, on_progress=reports.append)

    assert end.reached
    assert end.accuracy >= 0.05
    assert reports[-1] == end
    assert [report.reached for report in reports[:-1]] == [False] * (end.steps - 1)
    assert reports[-1].loss < reports[0].loss
    assert end.next_position == end.steps * SETTINGS.warmup_batch_size


def test_the_warm_up_says_when_it_ran_out_of_steps(tasks: Tasks) -> None:
    end = warm_up(new_model(), tasks, attrs.evolve(SETTINGS, warmup_accuracy=0.99, warmup_steps_max=3))

    assert (end.steps, end.reached) == (3, False)


def test_the_same_seed_warms_up_to_the_same_weights(tasks: Tasks) -> None:
    models = [new_model(), new_model()]
    for model in models:
        warm_up(model, tasks, attrs.evolve(SETTINGS, warmup_steps_max=3))

    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))


# Evaluation -----------------------------------------------------------------------------------------


async def test_an_engine_that_knows_every_answer_is_right_every_time(tasks: Tasks) -> None:
    answers = {tuple(task.prompt_ids): task.answer_ids for task in tasks.held_out}
    knowing = ScriptedEngine(lambda prompt_ids: answers[tuple(prompt_ids)])
    silent = ScriptedEngine(lambda prompt_ids: [tokenizer().eos_id])

    assert await held_out_accuracy(knowing, tasks, SETTINGS) == 1.0
    assert await held_out_accuracy(silent, tasks, SETTINGS) == 0.0


async def test_the_same_weights_get_the_same_accuracy(tasks: Tasks, engine: TorchEngine) -> None:
    assert await held_out_accuracy(engine, tasks, SETTINGS) == await held_out_accuracy(engine, tasks, SETTINGS)


# Loss -----------------------------------------------------------------------------------------------


def batch(model: Transformer, advantages: Sequence[float]) -> dict[str, Tensor]:
    """Two rows, padded on both sides, with the log-probabilities that the model itself gives."""
    tensors = {
        "input_ids": torch.tensor([[1, 5, 6, 7, 2, 0], [0, 1, 9, 4, 3, 8]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1]]),
        "position_ids": torch.tensor([[0, 1, 2, 3, 4, 4], [0, 0, 1, 2, 3, 4]]),
        "response_mask": torch.tensor([[1, 1, 0], [1, 1, 1]]),
        "advantages": torch.tensor(advantages),
    }
    with torch.no_grad():
        own = model.token_log_probs(tensors["input_ids"], tensors["attention_mask"], tensors["position_ids"], 3)
    return {**tensors, "rollout_log_probs": own * tensors["response_mask"]}


def test_on_its_own_rows_the_loss_is_the_mean_advantage_of_the_tokens() -> None:
    loss, metrics = grpo_loss(new_model(), batch(new_model(), [1.0, -0.5]))

    assert float(loss.detach()) == pytest.approx(-(2 * 1.0 - 3 * 0.5) / 5, abs=1e-5)
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-5)
    assert metrics["clipped_share"] == 0.0


def test_a_step_makes_the_better_row_likelier_and_the_worse_one_less_likely() -> None:
    model = new_model()
    tensors = batch(model, [1.0, -1.0])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    grpo_loss(model, tensors)[0].backward()
    optimizer.step()
    after = batch(model, [0.0, 0.0])["rollout_log_probs"].sum(1)
    before = tensors["rollout_log_probs"].sum(1)

    assert after[0] > before[0]
    assert after[1] < before[1]


def test_a_ratio_beyond_the_clip_gives_no_gradient_where_it_would_go_further() -> None:
    model = new_model()
    tensors = batch(model, [1.0, -1.0])
    # As if the better row had been less likely, and the worse one likelier, when they were generated.
    shift = torch.tensor([[-0.5], [0.5]]) * tensors["response_mask"]
    loss, metrics = grpo_loss(model, {**tensors, "rollout_log_probs": tensors["rollout_log_probs"] + shift})
    loss.backward()

    assert metrics["clipped_share"] == 1.0
    assert all(not weight.grad.any() for weight in model.parameters() if weight.grad is not None)


def test_what_a_pad_holds_changes_neither_loss_nor_gradient() -> None:
    losses, gradients = [], []
    for pad in (0.0, 1e30):
        model = new_model()
        tensors = batch(model, [1.0, -1.0])
        tensors["rollout_log_probs"][0, 2] = pad
        loss, _ = grpo_loss(model, tensors)
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append(model.head.weight.grad)

    assert losses[0] == losses[1]
    assert gradients[0] is not None
    assert gradients[1] is not None
    assert torch.equal(gradients[0], gradients[1])


# Settings -------------------------------------------------------------------------------------------


def test_the_learning_rate_rises_and_then_falls_to_zero_at_the_end() -> None:
    settings = Settings(steps=200, ramp_steps=20, learning_rate=1.0)
    rates = [settings.learning_rate_at(step) for step in range(201)]

    assert rates.index(max(rates)) in (18, 19)
    assert rates[0] == pytest.approx(0.05)
    assert rates[199] == pytest.approx(0.005)
    assert rates[200] == 0.0


def test_a_whole_text_fits_the_context() -> None:
    settings = Settings()
    digits = settings.digits[1] * settings.terms[1]
    prompt_tokens_max = 2 + digits + settings.terms[1] - 1

    assert prompt_tokens_max + settings.answer_tokens_max <= settings.context
