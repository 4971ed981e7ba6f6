"""vLLM engines for tests: small, on the CPU, up in some ten seconds."""

from pathlib import Path
from typing import Any

import anyio

from groupstate.engines.vllm import VllmEngine
from tests.vllm.tiny_model import CONTEXT

SMALL: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": CONTEXT,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 64 * CONTEXT,  # Else a request with a seed may end vLLM on a CPU.
    "enforce_eager": True,  # Else its kernels are compiled first, for half a minute.
    "kv_cache_memory_bytes": 128 << 20,  # Else the cache takes most of the machine.
    "disable_log_stats": True,
    "seed": 0,
}


async def start(model: Path, **options: Any) -> VllmEngine:
    return await VllmEngine.start(model, **{**SMALL, **options})


def token_count(engine: VllmEngine, request_id: str) -> int:
    """Tokens that a request has so far. No engine says so; vLLM keeps them here."""
    processor = engine.llm.output_processor
    names = processor.external_req_ids.get(request_id, ())
    return sum(processor.request_states[name].detokenizer.num_output_tokens() for name in names)


async def wait_tokens(engine: VllmEngine, request_id: str, count: int = 1) -> None:
    """Until a request has so many tokens."""
    with anyio.fail_after(30):
        while token_count(engine, request_id) < count:  # noqa: ASYNC110
            await anyio.sleep(0.001)


async def requests_left(engine: VllmEngine) -> int:
    """Requests that vLLM has on this side, and one more if its process generates for any, on this side or not.

    There it only tells whether its cache could be emptied, which it can't be while a request uses it.
    """
    return engine.llm.get_num_unfinished_requests() + (not await engine.llm.reset_prefix_cache())
