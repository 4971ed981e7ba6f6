"""Real packages of other stacks, in `make test-stacks` alone: elsewhere nothing of this folder is collected."""

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

os.environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "TRL_EXPERIMENTAL_SILENCE": "1"}

HERE = Path(__file__).parent

HAS_TRL = importlib.util.find_spec("trl") is not None

FOREIGN_WARNINGS = (
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore::ResourceWarning",
    "ignore::UserWarning",
)
"""These packages warn of much; what groupstate warns of goes through its log."""


def pytest_configure(config: pytest.Config) -> None:
    if HAS_TRL:
        for warning in FOREIGN_WARNINGS:
            config.addinivalue_line("filterwarnings", warning)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return None if HAS_TRL or not collection_path.is_relative_to(HERE) else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.stacks)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """One token for each word of a small language, and a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", "ask", "say", *(str(number) for number in range(20))]
    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
    made.chat_template = (
        "{% for message in messages %}ask {{ message['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}say{% endif %}"
    )
    return made


@pytest.fixture(scope="session")
def model_folder(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen2 of that vocabulary."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("model")
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, eos_token_id=1, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer_folder(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Apart from the model: beside a Qwen2 it would be loaded as one of Qwen2's, whatever it says of itself."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return folder
