"""`docs/api.md` names everything that is public, and every error, once."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import groupstate
from groupstate import errors, tensors

PACKAGE = Path(groupstate.__file__).parent
PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
ERRORS = [name for name, value in vars(errors).items() if inspect.isclass(value)
          and issubclass(value, errors.GroupstateError)]  # fmt: skip


def test_the_table_names_what_is_public_and_nothing_else():
    table = PAGE.partition("## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| ", table, re.MULTILINE)

    assert sorted(rows) == sorted(groupstate.__all__)


def test_each_row_is_one_sentence():
    table = PAGE.partition("## ")[0]

    for name, text in re.findall(r"^\| `(\w+)` \| (.*) \|$", table, re.MULTILINE):
        assert re.fullmatch(r"[A-Z][^.]*(\.\w[^.]*)*\.", re.sub(r"\(\w+[-\w]*\.md\)", "", text)), name


@pytest.mark.parametrize("name", ERRORS)
def test_each_error_is_in_its_table(name):
    section = PAGE.partition("## Errors")[2].partition("## Other")[0]

    assert f"`{name}`" in section


def test_what_a_run_and_its_batches_raise_is_defined_among_the_errors():
    folders = ("batch", "tensors", "core", "log", "runtime")
    modules = [path for folder in folders for path in sorted(PACKAGE.glob(f"{folder}*")) if path.name != "__pycache__"]
    files = [file for path in modules for file in ([path] if path.suffix else sorted(path.rglob("*.py")))]
    classes = [
        (file.name, node.name)
        for file in files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        and {base.id for base in node.bases if isinstance(base, ast.Name)} & set(ERRORS)
    ]  # fmt: skip

    assert len(files) > 80
    assert classes == []


def test_an_error_that_was_elsewhere_can_be_had_from_there():
    assert tensors.UnusableBatch is errors.UnusableBatch


def test_the_attributes_of_errors_are_those_that_they_have():
    section = PAGE.partition("| error | attributes |")[2].partition("\n\n")[0]
    told = {
        name: re.findall(r"`(\w+)`", text.partition(":")[0])
        for name, text in re.findall(r"\| `(\w+)` \| (.*) \|", section)
    }
    classes = {name: getattr(errors, name) for name in ERRORS if "__init__" in vars(getattr(errors, name))}
    kept = {name: re.findall(r"self\.(\w+) = ", inspect.getsource(kind.__init__)) for name, kind in classes.items()}

    assert told == {name: names for name, names in kept.items() if names}


@pytest.mark.parametrize("name", [n for n in vars(groupstate.Run) if not n.startswith("_")])
def test_each_method_that_users_call_is_named(name):
    inner = {"in_loop", "hurry"}

    assert name in inner or f"run.{name}" in PAGE
