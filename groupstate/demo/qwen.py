"""A tiny Qwen2 for the demo with vLLM: trained by transformers, generated with by a real vLLM.

Rule: both sides read the same checkpoint format, so nothing here converts weights.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from groupstate.demo.settings import Settings
from groupstate.demo.tasks import tokenizer
from groupstate.errors import MissingExtra

if TYPE_CHECKING:
    from groupstate.engines.vllm import VllmEngine

HEAD_WIDTH = 32
"""The smallest that vLLM's attention on a CPU takes."""

CONTEXT = 64
"""Tokens. More than the tasks need: vLLM plans its cache in blocks."""

MODEL = "model"
"""Folder of the run directory with the configuration and the first weights that vLLM starts from."""

ON_A_CPU = {
    "OMP_NUM_THREADS": "1",  # more wait for each other at every operation of so small a model
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",  # or the first request compiles a kernel, which takes up to half a minute
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process less
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""What vLLM reads from the environment; a value that the user has set stays."""


class QwenPolicy:
    """Qwen2ForCausalLM as the demo's trainer wants it; its weights have the names of a checkpoint, which vLLM knows."""

    def __init__(self, settings: Settings, vocabulary_size: int, *, context: int = CONTEXT) -> None:
        try:
            from transformers import Qwen2Config, Qwen2ForCausalLM
        except ImportError as error:
            raise MissingExtra("groupstate demo --engine vllm", "transformers", "vllm") from error
        words = tokenizer()
        config = Qwen2Config(
            vocab_size=vocabulary_size,
            hidden_size=settings.width,
            intermediate_size=4 * settings.width,
            num_hidden_layers=settings.layers,
            num_attention_heads=max(1, settings.width // HEAD_WIDTH),
            num_key_value_heads=max(1, settings.width // HEAD_WIDTH),
            max_position_embeddings=context,
            tie_word_embeddings=False,
            bos_token_id=words.bos_id,
            eos_token_id=words.eos_id,
            pad_token_id=words.pad_id,
            use_cache=False,
            # Of models so narrow; from the usual 0.02 the warm-up takes twice as many steps, or never gets there.
            initializer_range=0.1,
        )
        with torch.random.fork_rng():
            torch.manual_seed(settings.seed)
            self.network = Qwen2ForCausalLM(config)
        self.network.eval()  # no dropout, whatever the configuration's defaults become

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.network.dtype
        return dtype

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Logits of every token's successor, right-padded rows: (rows, tokens, vocabulary)."""
        logits: Tensor = self.network(input_ids=input_ids).logits
        return logits

    def token_log_probs(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, response_tokens: int | None = None
    ) -> Tensor:
        """Log-probability of each token given those before it, with gradient: (rows, tokens - 1), or of the last
        `response_tokens` alone."""
        start = 0 if response_tokens is None else input_ids.shape[1] - response_tokens - 1
        logits = self.network(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids).logits[
            :, start:-1
        ]
        return -F.cross_entropy(logits.transpose(1, 2), input_ids[:, start + 1 :], reduction="none")

    def parameters(self) -> Iterator[nn.Parameter]:
        yield from self.network.parameters()

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.network.state_dict())

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.network.load_state_dict(state)

    def write(self, folder: Path) -> None:
        """A checkpoint that vLLM can start from: config.json and safetensors."""
        from safetensors.torch import save_file

        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.network.config.architectures = [type(self.network).__name__]
        self.network.config.save_pretrained(folder)
        weights = {name: tensor.contiguous() for name, tensor in self.network.state_dict().items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


async def vllm_engine(policy: QwenPolicy, settings: Settings, folder: Path, weight_version: int) -> "VllmEngine":
    """A vLLM in this process that generates under the policy's weights. Takes some ten seconds to start."""
    for name, value in ON_A_CPU.items():
        os.environ.setdefault(name, value)
    from groupstate.engines.vllm import VllmEngine

    model, context = folder / MODEL, policy.network.config.max_position_embeddings
    policy.write(model)
    return await VllmEngine.start(
        str(model),
        weight_version=weight_version,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=context,
        max_num_seqs=settings.slots_max,
        max_num_batched_tokens=settings.slots_max * context,  # no prompt is computed in parts: see docs/engines.md
        enforce_eager=True,
        kv_cache_memory_bytes=256 << 20,
        disable_log_stats=True,
        use_tqdm_on_load=False,
        seed=settings.seed,
    )
