"""Tests for what you write yourself: subclass one, say what it is about in a fixture, and pytest finds its tests.

`EngineContract` for an engine, `LogContract` for an event log, `PayloadStoreContract` for a payload store,
`SelectionContract` for a selection rule, `EvictionContract` for a rule that evicts. groupstate's own engines, logs and
selections are tested by exactly these.
"""

from groupstate.errors import MissingExtra

try:
    import pytest
    import pytest_asyncio as _  # noqa: F401
except ModuleNotFoundError as error:
    if error.name not in ("pytest", "pytest_asyncio"):
        raise
    raise MissingExtra("groupstate.testing.contracts", "pytest and pytest-asyncio", "testing") from error

# Before they are imported, so that a failing assertion says what it compared.
for _name in ("engine", "engine_kind", "log", "payloads", "selection", "eviction"):
    pytest.register_assert_rewrite(f"{__name__}.{_name}")

from groupstate.testing.contracts.engine import EngineContract  # noqa: E402
from groupstate.testing.contracts.engine_kind import EngineKind  # noqa: E402
from groupstate.testing.contracts.eviction import EvictionContract  # noqa: E402
from groupstate.testing.contracts.log import LogContract  # noqa: E402
from groupstate.testing.contracts.payloads import PayloadStoreContract  # noqa: E402
from groupstate.testing.contracts.selection import SelectionContract  # noqa: E402

__all__ = [
    "EngineContract",
    "EngineKind",
    "EvictionContract",
    "LogContract",
    "PayloadStoreContract",
    "SelectionContract",
]
