"""What holds for every test: Hypothesis profiles, a headless matplotlib, and what to leave out where torch isn't.

Rule: a test file that imports an optional package at its top is left out where that package isn't installed,
and the end of the report says so. `make test` installs them all, so nothing is left out there.
"""

import importlib.util
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

OPTIONAL = {
    "torch": r"torch\b|groupstate\.demo\b|groupstate\.engines(?:\.| import )(?:torch|slots|transformer)\b",
    "httpx": r"httpx\b|groupstate\.engines(?:\.| import )(?:openai|http)\b",
    "pyarrow": r"pyarrow\b",
    "matplotlib": r"matplotlib\b",
    "prometheus_client": r"prometheus_client\b|groupstate\.integrations\.prometheus\b",
    "opentelemetry": r"opentelemetry\b|groupstate\.integrations\.(?:opentelemetry|spans)\b",
    "reasoning_gym": r"reasoning_gym\b|groupstate\.demo\b",
}
"""Package -> what brings it in when it stands after a top-level `import` or `from`."""

LEFT_OUT: dict[str, str] = {}

os.environ.setdefault("MPLBACKEND", "Agg")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell without job control starts so what it runs in the background, and every process hands it on: a test that
    # interrupts a process of its own would wait for ever.
    signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile("quick", max_examples=50, stateful_step_count=30, deadline=None)
hypothesis.settings.register_profile("long", max_examples=2000, stateful_step_count=100, deadline=None)
hypothesis.settings.register_profile("fuzz", max_examples=40_000, deadline=None)
# For `make mutants`, where what counts is that a test fails, each time for the same mutants, and not on what.
hypothesis.settings.register_profile(
    "mutants",
    max_examples=20,
    stateful_step_count=20,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)
hypothesis.settings.load_profile("quick")


def missing_package(source: str, installed: dict[str, bool]) -> str | None:
    """The first package that this test file needs at its top and that isn't installed."""
    for package, pattern in OPTIONAL.items():
        if not installed[package] and re.search(rf"^(?:import|from) (?:{pattern})", source, re.MULTILINE):
            return package
    return None


INSTALLED = {package: importlib.util.find_spec(package) is not None for package in OPTIONAL}


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if collection_path.suffix != ".py" or all(INSTALLED.values()):
        return None
    if package := missing_package(collection_path.read_text(encoding="utf-8"), INSTALLED):
        LEFT_OUT[collection_path.name] = package
        return True
    return None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if LEFT_OUT:
        files = ", ".join(f"{name} (no {package})" for name, package in sorted(LEFT_OUT.items()))
        terminalreporter.write_line(f"Left out: {files}")


MEASURED = {Path(__file__).parent / name for name in ("core", "log", "runtime", "histories")}
"""Folders of the tests that take every branch of the packages whose coverage is looked at (pyproject.toml)."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not MEASURED.isdisjoint(item.path.parents) and not item.get_closest_marker("slow"):
            item.add_marker("measured")
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


def _has_gpu() -> bool:
    if not INSTALLED["torch"]:
        return False
    import torch

    return torch.cuda.is_available()


@pytest.fixture(autouse=True)
def _no_structlog_left_configured() -> Iterator[None]:
    """Where one test leaves structlog configured, as `capture_logs` does, the lines of the next ones aren't in
    `caplog`."""
    yield
    structlog = sys.modules.get("structlog")
    if structlog is not None and structlog.is_configured():
        structlog.reset_defaults()
        pytest.fail("the test left structlog configured; use caplog, or end with structlog.reset_defaults()")
