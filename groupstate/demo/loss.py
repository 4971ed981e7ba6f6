"""The loss of the demo: GRPO's clipped policy gradient, averaged over tokens.

Rule: only tokens that the model generated count; pads and what an environment wrote have a zero mask.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from groupstate.demo.policy import Policy


def grpo_loss(
    model: Policy,
    tensors: Mapping[str, Tensor],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> tuple[Tensor, dict[str, float]]:
    """The loss to call `backward` on, and what to watch.

    The ratio compares the model with the one that generated each token, whichever version that was, so rows
    of older versions need nothing more. Metrics: `loss`, `ratio_mean`, `clipped_share` (of the tokens),
    `kl` (estimate of the divergence from the generating versions, nats per token), `entropy` (estimate from
    the generated tokens, nats per token).
    """
    mask = tensors["response_mask"].to(model.dtype)
    log_probs = model.token_log_probs(
        tensors["input_ids"], tensors["attention_mask"], tensors["position_ids"], mask.shape[1]
    )
    # A pad's log-probability may be anything; zeroed here, its ratio is 1 and stays finite.
    log_ratio = (log_probs - tensors["rollout_log_probs"].to(model.dtype)) * mask
    ratio = log_ratio.exp()
    advantages = tensors["advantages"].to(model.dtype)
    if advantages.dim() == 1:
        advantages = advantages[:, None]
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    gain = torch.minimum(ratio * advantages, clipped * advantages)
    tokens = mask.sum().clamp(min=1.0)
    loss = -(gain * mask).sum() / tokens
    with torch.no_grad():
        metrics = {
            "loss": loss.detach(),
            "ratio_mean": (ratio * mask).sum() / tokens,
            "clipped_share": ((clipped * advantages < ratio * advantages) * mask).sum() / tokens,
            "kl": ((ratio - 1.0 - log_ratio) * mask).sum() / tokens,
            "entropy": -(log_probs * mask).sum() / tokens,
        }
    return loss, {name: float(value) for name, value in metrics.items()}
