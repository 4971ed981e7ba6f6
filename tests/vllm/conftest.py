"""Real vLLM on a CPU, in `make test-vllm` alone: elsewhere nothing of this folder is collected.

Rule: vLLM takes some ten seconds to start and binds to one event loop, so tests share engines of the session, and
every async test here runs on the session's loop.
"""

import gc
import importlib.util
import os
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from groupstate.engines.vllm import VllmEngine

# Before vllm is imported, here or in a process that is started from here.
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # The worker lives in the engine's process: 8 s and 0.4 GB less.
    "OMP_NUM_THREADS": "1",  # Two threads wait for each other at every operation, for long on a busy machine.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",  # Else it keeps code for each number of tokens that a step ever had.
    "TORCHDYNAMO_DISABLE": "1",  # Else the first request compiles a kernel with g++.
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

HAS_VLLM = importlib.util.find_spec("vllm") is not None

HERE = Path(__file__).parent


FOREIGN_WARNINGS = (
    "ignore:Unclosed context:ResourceWarning",  # vLLM leaves its sockets to the end of the process.
)
"""Everything else is an error here as everywhere."""


def pytest_configure(config: pytest.Config) -> None:
    for warning in FOREIGN_WARNINGS:
        config.addinivalue_line("filterwarnings", warning)


def pytest_sessionfinish() -> None:
    # The same for what is left when the filters above no longer hold.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return None if HAS_VLLM or not collection_path.is_relative_to(HERE) else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not item.path.is_relative_to(HERE):
            continue
        item.add_marker(pytest.mark.vllm)
        if pytest_asyncio.is_async_test(item):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model twice, as `v0` and `v1`: the same shapes, other weights."""
    from tests.vllm.tiny_model import write_model

    root = tmp_path_factory.mktemp("models")
    for seed in (0, 1):
        write_model(root / f"v{seed}", seed=seed)
    return root


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared(models: Path) -> AsyncIterator["VllmEngine"]:
    """One vLLM for the session. Tests wrap its `llm` and take `llm`, which is set right after each test."""
    from tests.vllm.engines import start

    engine = await start(models / "v0", skip_tokenizer_init=True)
    yield engine
    await engine.aclose()


@pytest_asyncio.fixture(loop_scope="session")
async def llm(shared: "VllmEngine", models: Path) -> AsyncIterator["AsyncLLM"]:
    """The session's AsyncLLM, which generates, with the weights of `v0` and no request."""
    yield shared.llm
    await shared.llm.pause_generation(mode="abort")
    await shared.llm.wake_up()
    await shared.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(models / "v0")})
    await shared.llm.resume_generation()
