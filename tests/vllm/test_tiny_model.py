"""The model that the tests of this folder generate with."""

from pathlib import Path

from safetensors import safe_open

from tests.vllm.tiny_model import state_dict


def test_the_files_hold_what_the_state_says(models: Path) -> None:
    with safe_open(models / "v1" / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == state_dict().keys()
        assert all(file.get_tensor(name).equal(tensor) for name, tensor in state_dict(seed=1).items())


def test_its_tokenizer_knows_every_byte(models: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models / "v0")
    text = "12 + 30 = 42\n\t\u00fc"
    token_ids = tokenizer.encode(text, add_special_tokens=False)

    assert len(token_ids) == len(text.encode())
    assert tokenizer.decode(token_ids) == text
