"""Real verl and TransferQueue, in `make test-verl` alone: elsewhere nothing of this folder is collected.

Rule: Ray and TransferQueue take some ten seconds to start, so there is one of each for the session, and each test has
a partition of its own.
"""

import importlib.util
import logging
import os
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Before TransferQueue is imported, here or in a process that Ray starts.
os.environ |= {
    "TQ_NUM_THREADS": str(os.cpu_count() or 1),
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Else Ray warns of a change to come.
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_OFFLINE": "1",
}

HAS_VERL = all(importlib.util.find_spec(name) is not None for name in ("verl", "transfer_queue"))

HERE = Path(__file__).parent

FOREIGN_WARNINGS = (
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore::ResourceWarning",
    "ignore::UserWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)
"""Ray, tensordict and verl warn of much; what groupstate warns of goes through its log."""


def pytest_configure(config: pytest.Config) -> None:
    if HAS_VERL:
        for warning in FOREIGN_WARNINGS:
            config.addinivalue_line("filterwarnings", warning)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return None if HAS_VERL or not collection_path.is_relative_to(HERE) else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.verl)


@pytest.fixture(scope="session")
def transfer_queue() -> Iterator[Any]:
    """TransferQueue, started. Its three actors ask for one core each, so that Ray must think there are enough."""
    import ray
    import transfer_queue as tq

    ray.init(num_cpus=8, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    tq.init()
    yield tq
    tq.close()
    ray.shutdown()


@pytest.fixture(scope="session")
def verl_classes() -> Any:
    """verl's own buffers. Their package imports trainers, which need much that isn't installed; the file does not."""
    found = importlib.util.find_spec("verl")
    assert found is not None
    assert found.origin is not None
    path = Path(found.origin).parent / "trainer" / "ppo" / "v1" / "replay_buffer.py"
    spec = importlib.util.spec_from_file_location("verl_replay_buffer", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def queue(transfer_queue: Any) -> Iterator[Any]:
    """A partition of its own, empty."""
    from tests.verl.producing import Queue

    made = Queue(f"test-{uuid.uuid4().hex}")
    yield made
    made.clear()


@pytest.fixture
def make(queue: Any) -> Iterator[Callable[..., Any]]:
    """Makes the drop-in for the test's queue."""
    from groupstate.integrations.verl import ReplayBuffer
    from tests.verl.producing import construct

    made: list[Any] = []

    def construct_one(**settings: Any) -> Any:
        made.append(construct(ReplayBuffer, **settings))
        return made[-1]

    yield construct_one
    for buffer in made:
        buffer.close()


@pytest.fixture(params=["groupstate", "verl"])
def make_each(request: pytest.FixtureRequest, make: Callable[..., Any]) -> Callable[..., Any]:
    """The drop-in, and verl's own buffer: what holds of both is the contract."""
    if request.param == "groupstate":
        return make
    from tests.verl.producing import construct

    module = request.getfixturevalue("verl_classes")

    def construct_one(**settings: Any) -> Any:
        sync = settings.get("trainer_mode", "sync") == "sync"
        return construct(module.ReplayBuffer if sync else module.ReplayBufferAsync, **settings)

    return construct_one
