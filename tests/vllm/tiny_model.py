"""A tiny random Qwen2 as a directory that vLLM loads: nothing is downloaded, and transformers isn't needed.

Rule: it never says a special token by itself, so that an answer is as long as a test asks for.

A head of 32 is the smallest that vLLM's attention takes on a CPU. The tokenizer has one token per byte, since a Qwen2
tokenizer is byte-level and anything else gives it empty prompts.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

VOCABULARY = 512
CONTEXT = 2000
WIDTH = 128
LAYERS = 2
HEADS = 4
KEY_VALUE_HEADS = 2
HEAD = WIDTH // HEADS
FEED_FORWARD = 256
SPECIAL = ("<unk>", "<s>", "</s>")


def state_dict(seed: int = 0) -> dict[str, Tensor]:
    """Weights by the names of a checkpoint. The output layer is loud, so that two seeds greatly differ in what they
    say, and greedy answers don't hang on rounding."""
    chance = torch.Generator().manual_seed(seed)

    def drawn(*shape: int, loud: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=chance) * 0.5 * loud / shape[-1] ** 0.5

    weights = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, WIDTH, generator=chance),
        "model.norm.weight": torch.ones(WIDTH),
        "lm_head.weight": drawn(VOCABULARY, WIDTH, loud=4.0),
    }
    outputs = {"q_proj": HEADS * HEAD, "k_proj": KEY_VALUE_HEADS * HEAD, "v_proj": KEY_VALUE_HEADS * HEAD}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for name, size in outputs.items():
            weights[f"{at}.self_attn.{name}.weight"] = drawn(size, WIDTH)
            weights[f"{at}.self_attn.{name}.bias"] = torch.zeros(size)
        weights[f"{at}.self_attn.o_proj.weight"] = drawn(WIDTH, HEADS * HEAD)
        weights[f"{at}.mlp.gate_proj.weight"] = drawn(FEED_FORWARD, WIDTH)
        weights[f"{at}.mlp.up_proj.weight"] = drawn(FEED_FORWARD, WIDTH)
        weights[f"{at}.mlp.down_proj.weight"] = drawn(WIDTH, FEED_FORWARD)
        weights[f"{at}.input_layernorm.weight"] = torch.ones(WIDTH)
        weights[f"{at}.post_attention_layernorm.weight"] = torch.ones(WIDTH)
        # No layer writes to channel 0, ...
        weights[f"{at}.self_attn.o_proj.weight"][0] = 0.0
        weights[f"{at}.mlp.down_proj.weight"][0] = 0.0
    # ... so it is positive everywhere, and what special tokens lose by it nothing makes good.
    weights["model.embed_tokens.weight"][:, 0] = 1.0
    weights["lm_head.weight"][:, 0] = 0.0
    weights["lm_head.weight"][: len(SPECIAL), 0] = -100.0
    return weights


def config(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": FEED_FORWARD,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_VALUE_HEADS,
        "max_position_embeddings": CONTEXT,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "bos_token_id": SPECIAL.index("<s>"),
        "eos_token_id": SPECIAL.index("</s>"),
        "dtype": "float32",
        **changes,
    }


def write_model(folder: Path, *, seed: int = 0, tokenizer: bool = True) -> Path:
    """Write config, weights and, if wanted, a tokenizer; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(), indent=1))
    save_file(state_dict(seed), folder / "model.safetensors", metadata={"format": "pt"})
    if tokenizer:
        write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Byte-level BPE without a merge: token 3 and up are the bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "</s>",
        "unk_token": "<unk>",
        "model_max_length": CONTEXT,
        "chat_template": "{% for message in messages %}{{ message['content'] }}\n{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
