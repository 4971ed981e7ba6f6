"""vLLM as it was started: by what, whether an engine can be made of it, and how its processes ended.

Rule: `engines/vllm.py` imports this file, and nobody else: there it is said what to install where vLLM is missing.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import vllm
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from groupstate.core.arguments import shown
from groupstate.core.near import near
from groupstate.engines.checkpoint import model_folder
from groupstate.errors import EngineError


def started(model: str, engine_args: Mapping[str, Any]) -> AsyncLLM:
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    for name in engine_args:
        if name not in known:
            hint = near(name, known)
            raise EngineError(f"vLLM {vllm.__version__} has no engine argument {name!r}" + (hint and f"; {hint}"))
    try:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, **engine_args))
    except Exception as error:
        raise EngineError(f"vLLM could not start with the model {model!r}: {words(error)}") from error


def need_usable(llm: AsyncLLM) -> None:
    if not hasattr(llm, "update_weight_version"):
        raise EngineError(f"vLLM {vllm.__version__} doesn't say which weights made a token; 0.32 and later do")
    if (mode := llm.model_config.logprobs_mode) != "raw_logprobs":
        raise EngineError(
            f"vLLM has logprobs_mode {mode!r}; log-probabilities here are those before temperature and top-p, so it "
            "must be 'raw_logprobs'"
        )


def need_sleep_level(sleep_level: int) -> int:
    if sleep_level not in (1, 2) or isinstance(sleep_level, bool):
        raise EngineError(f"sleep_level is {shown(sleep_level)}; it must be 1 or 2")
    return sleep_level


def folder_of_model(llm: AsyncLLM) -> Path:
    load, model = llm.vllm_config.load_config, llm.model_config
    if load.load_format == "dummy":
        raise EngineError("vLLM was started with load_format 'dummy', and then it can't load weights")
    return model_folder(model.model, model.revision, load.download_dir)


def process_ids(llm: AsyncLLM) -> list[int]:
    """Of the processes that it started on this machine, as far as it tells."""
    return [process.pid for process in getattr(_manager(llm), "processes", ())]


def exit_codes(llm: AsyncLLM) -> str:
    """How its processes ended, such as -9 by the kernel for want of memory."""
    manager = _manager(llm)
    codes = manager.finished_procs() if hasattr(manager, "finished_procs") else {}
    return "".join(f"; its process {name} ended with code {code}" for name, code in codes.items())


def _manager(llm: AsyncLLM) -> Any:
    return getattr(getattr(llm.engine_core, "resources", None), "engine_manager", None)


def words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
