"""The demo with vLLM in place of the embedded engine, at a tiny size."""

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from groupstate.core.folding import replayed
from groupstate.core.invariants import violations
from groupstate.demo.main import demo
from groupstate.demo.qwen import QwenPolicy
from groupstate.demo.settings import Settings
from groupstate.demo.tasks import tokenizer
from groupstate.log.reading import read_log

TINY = Settings(
    engine="vllm", steps=3, batch_size=4, held_out_count=10, digits=(1, 1), warmup_accuracy=0.05, warmup_steps_max=600,
    checkpoint_every=2, lag_max=4,
)  # fmt: skip


def test_it_trains_a_tiny_qwen_on_what_vllm_generates_and_publishes_each_step(tmp_path: Path) -> None:
    summary = demo(out=tmp_path / "run", recipe=TINY, console=Console(file=io.StringIO()))
    records = list(read_log(tmp_path / "run"))
    book = replayed(records)

    assert summary is not None
    assert (summary.engine, summary.steps) == ("vllm", 3)
    assert (book.weight_version, book.totals["batches_committed"]) == (3, 3)
    assert violations(records) == []


@pytest.mark.long
def test_it_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = Settings(engine="vllm", steps=300)
    summary = demo(out=tmp_path / "run", recipe=recipe, console=Console(file=io.StringIO()))

    assert summary is not None
    with capsys.disabled():
        print(f"\naccuracy {summary.accuracy_before:.1%} before, {summary.accuracy_after:.1%} after 300 steps")
    assert summary.accuracy_after > summary.accuracy_before + 0.06, summary


def test_padding_and_neighbours_change_no_log_probability() -> None:
    policy = QwenPolicy(TINY, tokenizer().vocabulary_size)
    row = torch.tensor([[1, 5, 6, 7, 2]])
    padded = torch.tensor([[0, 0, 1, 5, 6, 7, 2, 0], [1, 9, 4, 3, 8, 5, 5, 2]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 0], [1] * 8])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        alone = policy.token_log_probs(row, torch.ones_like(row), torch.arange(5)[None])
        among = policy.token_log_probs(padded, mask, positions)

    assert torch.allclose(among[0, 2:6], alone[0], atol=1e-5)
