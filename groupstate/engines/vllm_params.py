"""A request in vLLM's own words: its sampling parameters, and what it may not ask for.

Rule: `engines/vllm.py` imports this file, and nobody else: there it is said what to install where vLLM is missing.
"""

import copy
from collections import OrderedDict
from collections.abc import Mapping
from functools import cache
from typing import Any

import attrs
import msgspec
import vllm
from vllm.exceptions import VLLMClientError
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from groupstate.engines.port import Request, SamplingParams
from groupstate.errors import RequestRefused

# fmt: off
OURS = {
    "temperature", "top_p", "max_tokens", "stop_token_ids", "seed",
    "n", "logprobs", "flat_logprobs", "logprob_token_ids", "prompt_logprobs", "prompt_logprob_token_ids",
    "prompt_logprob_start", "detokenize", "output_kind", "output_text_buffer_length", "skip_clone", "stream_interval",
}
# fmt: on
"""Sampling parameters of vLLM that can't stand in `extra`: fields of their own, or what an answer is read from."""


KEPT_MAX = 64
"""Parameters that were made and stay, those that were asked for last."""


@attrs.define(eq=False)
class ParamsMaker:
    """Says sampling parameters in vLLM's words. What was checked once and is asked for again is not checked again: the
    requests of a run mostly have the same, and to make and check them takes longer than all else about a request."""

    _llm: AsyncLLM
    _kept: OrderedDict[tuple[bytes, int], vllm.SamplingParams] = attrs.field(factory=OrderedDict, init=False)
    """By the parameters as bytes, which tell 1 from 1.0 and True, and by the room for the answer."""

    def made(self, request: Request, prompt_tokens: int) -> vllm.SamplingParams:
        """What vLLM is to do for the request: parameters of its own, which share no more than vLLM leaves alone.

        Raises:
            RequestRefused: it can't be asked for so.
        """
        max_tokens = min(request.params.max_tokens, self._llm.model_config.max_model_len - prompt_tokens)
        told = _told(request.params)
        if told is None:
            return _made(self._llm, request, request.params.extra, max_tokens)
        key = told, max_tokens
        if key in self._kept:
            self._kept.move_to_end(key)
        else:
            # Of a copy: what is in `extra` is the user's, who may change it later.
            self._kept[key] = _made(self._llm, request, copy.deepcopy(dict(request.params.extra)), max_tokens)
            if len(self._kept) > KEPT_MAX:
                self._kept.popitem(last=False)
        return copy.copy(self._kept[key])


def _told(params: SamplingParams) -> bytes | None:
    """All that they say; None where `extra` holds what can't be told so."""
    try:
        return msgspec.msgpack.encode(params)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None


def _made(llm: AsyncLLM, request: Request, extra: Mapping[str, Any], max_tokens: int) -> vllm.SamplingParams:
    """
    Args:
        extra: the request's, or a copy of it.

    Raises:
        RequestRefused: it can't be asked for so.
    """
    params = request.params
    if bad := sorted(name for name in extra if name in OURS or name.startswith("_")):
        raise RequestRefused(
            f"request {request.id} has {', '.join(map(repr, bad))} in extra; that is a field of SamplingParams, "
            "or groupstate's to set"
        )
    if llm.tokenizer is None and (texts := sorted(extra.keys() & {"stop", "bad_words"})):
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
            max_tokens=max_tokens,
            stop_token_ids=list(params.stop_token_ids),
            seed=params.seed_bits,  # It would take -1 for none.
            logprobs=0,
            flat_logprobs=True,
            detokenize=bool(extra.get("stop")),
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
            **extra,
        )
        if extra:
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
