"""What all contracts have in common."""

import asyncio
import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from groupstate.core.arguments import seconds
from groupstate.errors import BadSettings
from groupstate.testing.said import check_names

OTHERS = {
    "run_rules": "rules = Rules(...)",
    **dict.fromkeys(("rule", "select", "eviction", "evict"), "selection = the function"),
}


class Contract:
    """Tests that a subclass inherits. They are async where what they test is; pytest-asyncio runs them, in any mode of
    its own and without further settings."""

    patience_s: ClassVar[float] = 60.0
    """Seconds of the loop's clock after which a test that waits has failed."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for base in cls.__mro__[1:]:
            if issubclass(base, Contract):
                check_names(cls, base, OTHERS)
                break
        if not seconds(f"{cls.__qualname__}.patience_s", cls.patience_s, error=BadSettings):
            raise BadSettings(f"{cls.__qualname__}.patience_s is 0, within which nothing comes; it must be above")
        for name, test in list(vars(cls).items()):
            if name.startswith("test_") and inspect.iscoroutinefunction(test):
                setattr(cls, name, _bounded(test))

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """In pytest-asyncio's mode `strict` only what is marked is run. A copy is marked, in the subclass, since the
        same test may run elsewhere on a loop of another scope."""
        import pytest

        test, definition, config = metafunc.function, metafunc.definition, metafunc.config
        mode = str(config.getoption("asyncio_mode", None) or config.getini("asyncio_mode"))
        if mode != "strict" or not inspect.iscoroutinefunction(test) or definition.get_closest_marker("asyncio"):
            return
        setattr(metafunc.cls, definition.originalname, pytest.mark.asyncio(_copied(test)))


def _copied(test: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(test)
    async def copied(*args: Any, **kwargs: Any) -> None:
        __tracebackhide__ = True
        await test(*args, **kwargs)

    return copied


def _bounded(test: Callable[..., Any]) -> Callable[..., Any]:
    """The test, which fails where it would wait for ever."""

    @functools.wraps(test)
    async def bounded(self: Contract, *args: Any, **kwargs: Any) -> None:
        __tracebackhide__ = True
        scope = asyncio.timeout(self.patience_s)
        try:
            async with scope:
                await test(self, *args, **kwargs)
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise AssertionError(
                f"waited {self.patience_s:g} s for what didn't come; the first traceback ends where it waits "
                "(a contract of what is that slow sets patience_s)"
            ) from error.__cause__

    return bounded
