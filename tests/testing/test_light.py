"""What needs hypothesis or pytest says so, and nothing else brings them in."""

import json
import subprocess
import sys

import pytest


def python(code: str) -> tuple[str, str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    return done.stdout, done.stderr


@pytest.mark.parametrize(
    "statement",
    [
        "import groupstate.testing",
        "from groupstate.testing import play, assert_invariants, Twin, ScriptedEngine, VirtualLoop",
    ],
)
def test_what_needs_no_test_library_brings_in_none(statement: str) -> None:
    out, err = python(f"{statement}\nimport json, sys; print(json.dumps(sorted(sys.modules)))")

    assert not {"hypothesis", "pytest", "pytest_asyncio", "torch"} & set(json.loads(out)), err


@pytest.mark.parametrize(
    ("name", "missing", "feature", "package"),
    [
        ("GroupMachine", "hypothesis", "groupstate.testing.strategies", "hypothesis"),
        ("strategies", "hypothesis", "groupstate.testing.strategies", "hypothesis"),
        ("EngineContract", "pytest", "groupstate.testing.contracts", "pytest and pytest-asyncio"),
        ("LogContract", "pytest_asyncio", "groupstate.testing.contracts", "pytest and pytest-asyncio"),
        ("fixtures", "pytest_asyncio", "groupstate.testing.fixtures", "pytest and pytest-asyncio"),
    ],
)
def test_without_the_extra_it_says_what_to_install(name: str, missing: str, feature: str, package: str) -> None:
    how = f"import groupstate.testing.{name}" if name == "fixtures" else f"from groupstate.testing import {name}"
    _, err = python(f"import sys; sys.modules[{missing!r}] = None; {how}")

    assert f"MissingExtra: {feature} needs {package}; install the extra 'testing' of groupstate" in err


def test_a_name_that_is_not_there_is_told_as_python_does() -> None:
    import groupstate.testing

    with pytest.raises(AttributeError, match="has no attribute 'GroupMachin'"):
        groupstate.testing.GroupMachin  # noqa: B018


def test_every_name_can_be_had() -> None:
    import groupstate.testing

    assert all(getattr(groupstate.testing, name) is not None for name in groupstate.testing.__all__)
    assert set(groupstate.testing.__all__) <= set(dir(groupstate.testing))
