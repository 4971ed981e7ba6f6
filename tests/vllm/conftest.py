"""Real vLLM on a CPU, in `make test-vllm` alone: elsewhere nothing of this folder is collected.

Rule: vLLM takes some ten seconds to start and binds to one event loop, so tests share engines of the session, and
every async test here runs on the session's loop.
"""

import importlib.util
import os
from pathlib import Path

import pytest
import pytest_asyncio

# Before vllm is imported, here or in a process that is started from here.
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # The worker lives in the engine's process: 8 s and 0.4 GB less.
    "OMP_NUM_THREADS": "1",  # Two threads wait for each other at every operation, for long on a busy machine.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",  # Else the first request compiles a kernel with g++.
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

HAS_VLLM = importlib.util.find_spec("vllm") is not None

HERE = Path(__file__).parent


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
