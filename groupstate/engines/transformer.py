"""A small causal transformer in plain torch: pre-norm, learned positions, GELU.

Rule 1: the model knows nothing of batches that come and go; how a layer attends is handed in, so the same
weights train on padded rows and generate from a cache.
Rule 2: a row's numbers never depend on its padding or on its neighbours, up to rounding.
"""

from collections.abc import Callable, Mapping
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from groupstate.core.arguments import shown
from groupstate.core.typed_settings import Settings
from groupstate.errors import BadSettings

Attend: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, query, key, value) -> mixed values; all are (rows, tokens, heads, head width)."""


class TransformerConfig(Settings, frozen=True):
    """Shape of a model. The default has about 0.8 million parameters."""

    LEAST: ClassVar[Mapping[str, float]] = dict.fromkeys(("vocabulary_size", "context", "width", "layers", "heads"), 1)

    vocabulary_size: int
    context: int = 64
    """Tokens of prompt and answer together."""
    width: int = 128
    layers: int = 4
    heads: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % self.heads:
            raise BadSettings(f"width {self.width} can't be split over {self.heads} heads; make it a multiple")


class Transformer(nn.Module):
    """Token ids in, logits out."""

    def __init__(self, config: TransformerConfig, *, seed: int = 0) -> None:
        super().__init__()
        if not isinstance(config, TransformerConfig):
            raise BadSettings(f"config is {shown(config)}; it must be a TransformerConfig")
        self.config = config
        self.token = nn.Embedding(config.vocabulary_size, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(_Block(config, layer) for layer in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary_size, bias=False)
        self._draw_weights(torch.Generator().manual_seed(seed))

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        """Logits of every token's successor: (rows, tokens, vocabulary)."""
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        attend = attend_causally if attention_mask is None else _attend_unpadded(attention_mask)
        return self.logits(self.hidden(input_ids, position_ids, attend))

    def token_log_probs(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, response_tokens: int | None = None
    ) -> Tensor:
        """Log-probability of each token given those before it, with gradient: (rows, tokens - 1).

        With `response_tokens` only of the last so many tokens, which saves the logits of the prompts.
        """
        hidden = self.hidden(input_ids, position_ids, _attend_unpadded(attention_mask))
        start = 0 if response_tokens is None else input_ids.shape[1] - response_tokens - 1
        log_probs = self.logits(hidden[:, start:-1]).log_softmax(-1)
        return log_probs.gather(-1, input_ids[:, start + 1 :, None]).squeeze(-1)

    def hidden(self, input_ids: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        x = self.token(input_ids) + self.position(position_ids)
        for block in self.blocks:
            x = block(x, attend)
        assert isinstance(x, Tensor)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(hidden))
        return logits

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.head.weight.dtype
        return dtype

    @torch.no_grad()
    def _draw_weights(self, generator: torch.Generator) -> None:
        # Layers that write into the residual stream start smaller, so that its variance doesn't grow with depth;
        # embeddings start large enough not to drown in what the first layers write.
        shrink = (2 * self.config.layers) ** -0.5
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                scale = 0.3 if name in ("token.weight", "position.weight") else weight.shape[1] ** -0.5
                writes = name.endswith(("mix.weight", "down.weight"))
                weight.normal_(0.0, scale * (shrink if writes else 1.0), generator=generator)
            elif name.endswith("bias"):
                weight.zero_()


class _Block(nn.Module):
    def __init__(self, config: TransformerConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads = config.heads
        self.norm_attention = nn.LayerNorm(config.width)
        self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.mix = nn.Linear(config.width, config.width)
        self.norm_mlp = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        projected = self.query_key_value(self.norm_attention(x))
        query, key, value = projected.unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.mix(attend(self.layer, query, key, value).flatten(2))
        y: Tensor = x + self.down(F.gelu(self.up(self.norm_mlp(x))))
        return y


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, causal: bool = False) -> Tensor:
    mixed = F.scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attn_mask=mask, is_causal=causal
    )
    return mixed.transpose(1, 2)


def attend_causally(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend to everything up to oneself; padding may only stand on the right, where nobody looks."""
    return attention(query, key, value, None, causal=True)


def _attend_unpadded(attention_mask: Tensor) -> Attend:
    tokens = attention_mask.shape[1]
    up_to_here = torch.ones(tokens, tokens, dtype=torch.bool, device=attention_mask.device).tril()
    itself = torch.eye(tokens, dtype=torch.bool, device=attention_mask.device)
    # A pad sees itself: a query with nothing to look at would give NaN, and NaN times a zero mask is NaN.
    mask = ((attention_mask.bool()[:, None, :] | itself) & up_to_here)[:, None]
    return lambda layer, query, key, value: attention(query, key, value, mask)
