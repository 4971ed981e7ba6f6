"""A request in vLLM's own words: its sampling parameters, and what it may not ask for.

Rule: `engines/vllm.py` imports this file, and nobody else: there it is said what to install where vLLM is missing.
"""

from collections.abc import Sequence
from functools import cache

import msgspec
import vllm
from vllm.exceptions import VLLMClientError
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from groupstate.engines.port import Request
from groupstate.errors import RequestRefused

# fmt: off
OURS = {
    "temperature", "top_p", "max_tokens", "stop_token_ids", "seed",
    "n", "logprobs", "flat_logprobs", "logprob_token_ids", "prompt_logprobs", "prompt_logprob_token_ids",
    "prompt_logprob_start", "detokenize", "output_kind", "output_text_buffer_length", "skip_clone", "stream_interval",
}
# fmt: on
"""Sampling parameters of vLLM that can't stand in `extra`: fields of their own, or what an answer is read from."""


def vllm_params(llm: AsyncLLM, request: Request, prompt_ids: Sequence[int]) -> vllm.SamplingParams:
    """What vLLM is to do for the request.

    Raises:
        RequestRefused: it can't be asked for so.
    """
    params = request.params
    if bad := sorted(name for name in params.extra if name in OURS or name.startswith("_")):
        raise RequestRefused(
            f"request {request.id} has {', '.join(map(repr, bad))} in extra; that is a field of SamplingParams, "
            "or groupstate's to set"
        )
    if llm.tokenizer is None and (texts := sorted(params.extra.keys() & {"stop", "bad_words"})):
        raise RequestRefused(f"request {request.id} has {texts[0]!r} in extra, which needs a vLLM with a tokenizer")
    if params.seed is not None and (needed := _tokens_for_seeds(llm)):
        raise RequestRefused(
            f"request {request.id} has a seed, and on a CPU vLLM dies when it computes the prompt of such a "
            f"request in parts; start it with max_num_batched_tokens={needed}, so that it never does, or leave "
            "the seed out"
        )
    try:
        made = vllm.SamplingParams(
            temperature=params.temperature,
            top_p=params.top_p,
            max_tokens=min(params.max_tokens, llm.model_config.max_model_len - len(prompt_ids)),
            stop_token_ids=list(params.stop_token_ids),
            seed=params.seed_bits,  # It would take -1 for none.
            logprobs=0,
            flat_logprobs=True,
            detokenize=bool(params.extra.get("stop")),
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
            **params.extra,
        )
        if params.extra:
            _need_readable(made)
    except (TypeError, ValueError, VLLMClientError, msgspec.MsgspecError) as error:
        raise refusal(request, error) from error
    return made


def refusal(request: Request, error: Exception) -> RequestRefused:
    return RequestRefused(f"vLLM refuses request {request.id}: {error}")


def _need_readable(params: vllm.SamplingParams) -> None:
    """As vLLM's process reads them, which checks what its constructor doesn't: on a value of another type it stops to
    read for good, without a word, and every request waits for ever.

    Raises:
        TypeError, ValueError, MsgspecError: it can't.
    """
    encoder, decoder = _wire()
    decoder.decode(encoder.encode(params))


@cache
def _wire() -> tuple[MsgpackEncoder, MsgpackDecoder]:
    """To make them takes longer than to use them."""
    return MsgpackEncoder(), MsgpackDecoder(vllm.SamplingParams)


def _tokens_for_seeds(llm: AsyncLLM) -> int:
    """The `max_num_batched_tokens` that seeds need; 0 if there are enough. vLLM 0.32 winds a generator back after a
    part of a prompt, which torch's on a CPU can't do: its process ends, with every request."""
    scheduler = llm.vllm_config.scheduler_config
    needed = int(scheduler.max_num_seqs * llm.model_config.max_model_len)
    return needed if current_platform.is_cpu() and scheduler.max_num_batched_tokens < needed else 0
