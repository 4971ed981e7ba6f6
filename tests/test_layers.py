"""Who may import whom, with the sentence that a newcomer needs.

Rule: the tables below are the whole truth. A change of layers is a change of a line here, with its reason.
"""

import ast
import gc
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

import groupstate

ROOT = Path(groupstate.__file__).parent

FRONT_DOOR = "groupstate"
"""The unit of `groupstate/__init__.py`, whose names come from everywhere."""


@pytest.fixture(autouse=True)
def quiet_collector() -> Iterator[None]:
    """Python 3.11 fails to build a syntax tree (SystemError) when a finalizer that the garbage collector runs in the
    middle of it builds another; what earlier tests left is collected before, and nothing during these."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


CORE = "core errors version"
MIDDLE = f"tensors batch log engines logs {CORE}"
OUTER = f"runtime inspect integrations {MIDDLE}"

MAY_IMPORT = {
    "version": "",
    "errors": "",
    "core": "errors version",
    "log": CORE,
    "engines": f"logs {CORE}",  # what goes wrong at servers is told at once, not only by those that wait
    "logs": "",
    "batch": f"tensors {CORE}",
    "tensors": f"batch {CORE}",  # for the type checker alone: batch.py hands itself over
    "inspect": MIDDLE,
    "integrations": f"runtime {MIDDLE}",  # they watch runs, and nothing inside knows them
    "runtime": MIDDLE,
    "sync": "runtime",
    "collect": OUTER,
    "simulate": OUTER,
    "testing": f"simulate {OUTER}",
    "demo": f"groupstate sync simulate {OUTER}",
    "cli": f"sync demo collect testing simulate {OUTER}",
    "__main__": "cli",
    FRONT_DOOR: f"runtime {MIDDLE}",
}
"""Unit (a folder or a file of the package) -> the others that it may import. The outer ones stand below."""

CORE_IMPORTS = [
    "__future__",
    "abc",
    "array",
    "bisect",
    "collections",
    "copy",
    "dataclasses",
    "difflib",
    "enum",
    "fractions",
    "functools",
    "hashlib",
    "heapq",
    "itertools",
    "json",
    "inspect",
    "math",
    "numbers",
    "operator",
    "re",
    "statistics",
    "string",
    "struct",
    "textwrap",
    "types",
    "typing",
    "zlib",
    "attrs",
    "msgspec",
    "sortedcontainers",
]
"""All that core may import from outside: nothing that knows the time, draws lots, waits, or touches a disk."""

CORE_CALLS = ["open", "print", "input", "exec", "eval", "id", "hash"]
"""Builtins that core doesn't call: they reach outside, or differ from process to process."""

TORCH_FILES = {
    "engines/torch.py": "the embedded engine",
    "engines/slots.py": "its batched decoding",
    "engines/transformer.py": "its model",
}
"""Where torch may be imported at the top of a file, beside demo/."""

TORCH_INSIDE = ("batch.py", "tensors.py", "engines/model_file.py", "engines/checkpoint.py")
"""Where it may be imported inside functions and for the type checker."""

VLLM_FILE = "engines/vllm.py"

VLLM_PARTS = ("engines/vllm_params.py", "engines/vllm_start.py")
"""Files that import vllm as that one does, which alone imports them."""

HTTPX_FILE = "engines/http/client.py"

HTTPX_UNITS = ("engines/http/", "engines/openai.py")
"""Files that may import that one at their top, and are themselves imported on demand."""

MONITORING_FILES = {
    "prometheus_client": ("integrations/prometheus.py",),
    "opentelemetry": ("integrations/opentelemetry.py", "integrations/spans.py"),
}
"""Where these may be imported; the files are themselves imported on demand, by users alone."""

STACKS = {
    "integrations/verl/queue.py": ("transfer_queue",),
    "integrations/trl.py": ("trl",),
}
"""What an integration integrates with: imported inside functions of these files, and nowhere else."""

STACK_PACKAGES = ("transfer_queue", "ray", "verl", "omegaconf", "tensordict", "trl")

TEST_LIBRARIES = ("hypothesis", "pytest", "pytest_asyncio")

TEST_LIBRARY_UNITS = (
    "testing/strategies.py",
    "testing/machine.py",
    "testing/contracts/",
    "testing/fixtures.py",
)
"""Where hypothesis and pytest may be imported; these are themselves imported on demand."""

UNSAFE = ["pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"]
"""Opening data with these runs code from the data."""

LOOSE_TASKS = {
    "engines/tasks.py": "weights that are being loaded, and the search for a server that is down, outlive the call",
    "testing/contracts/engine.py": "a test looks at a request that is under way, and may cancel it at any moment",
    "testing/contracts/log.py": "a test looks at somebody who waits, and may cancel him",
    "integrations/slime.py": "slime calls a function for each batch, and the run outlives the call that opened it",
    "runtime/attempts.py": "a task group would wait for ever for a session that ignores its cancellation",
    "runtime/closing.py": "a run must close to the end, whoever is cancelled while he waits for it",
    "runtime/rollout.py": "a task group for each group of sessions costs more than all else that a session does",
    "simulate/scenario.py": "a step of a scenario starts a sampler that a later step looks at",
}
"""Files that may start a task outside a task group, with the reason."""

TASK_STARTERS = ("create_task", "ensure_future")


@attrs.frozen
class Import:
    """One import statement of one name, absolute."""

    name: str
    line: int
    at_import_time: bool
    """Whether importing the file does it: not inside a function, and not for the type checker alone."""

    @property
    def root(self) -> str:
        return self.name.partition(".")[0]


def sources() -> dict[str, str]:
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in ROOT.rglob("*.py")}


def violations(files: dict[str, str]) -> list[str]:
    """One sentence for each broken wall; `files` maps paths below groupstate/ to their text."""
    found = []
    for path in sorted(files):
        tree = ast.parse(files[path])
        imports = list(imports_of(path, tree))
        for check in (_layer, _purity, _torch, _vllm, _httpx, _stacks, _monitoring, _test_libraries, _safety):
            found += [sentence for item in imports if (sentence := check(path, item, files))]
        found += [*_impure_calls(path, tree), *_loose_tasks(path, tree)]
    return list(dict.fromkeys(found))


def unit_of(path: str) -> str:
    unit = path.partition("/")[0].removesuffix(".py")
    return FRONT_DOOR if unit == "__init__" else unit


def imports_of(path: str, tree: ast.Module) -> Iterator[Import]:
    for node, at_import_time in _walk(tree, at_import_time=True):
        for name in _names(path, node):
            yield Import(name, getattr(node, "lineno", 0), at_import_time)


def _walk(node: ast.AST, *, at_import_time: bool) -> Iterator[tuple[ast.AST, bool]]:
    yield node, at_import_time
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        for child in node.body:
            yield from _walk(child, at_import_time=False)
        for child in node.orelse:
            yield from _walk(child, at_import_time=at_import_time)
        return
    inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, at_import_time=at_import_time and not inside)


def _names(path: str, node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        package = ["groupstate", *path.split("/")[:-1]]
        base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
        module = ".".join(part for part in (base, node.module) if part)
        return [f"{module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
        return [first.value for first in node.args[:1] if isinstance(first, ast.Constant)]
    return []


def _layer(path: str, item: Import, files: dict[str, str]) -> str | None:
    if item.root != "groupstate":
        return None
    unit, imported = unit_of(path), _imported_unit(item.name, files)
    if unit not in MAY_IMPORT:
        return f"{path} belongs to no layer: give {unit!r} a line in MAY_IMPORT"
    allowed = MAY_IMPORT[unit].split()
    if imported in (unit, *allowed):
        return None
    return f"imports point inward, but {path} imports {item.name}: {unit} may import {', '.join(allowed) or 'nothing'}"


def _imported_unit(name: str, files: dict[str, str]) -> str:
    part = name.split(".")[1] if "." in name else ""
    is_unit = f"{part}.py" in files or any(path.startswith(f"{part}/") for path in files) or part in MAY_IMPORT
    return part if is_unit else FRONT_DOOR


def _purity(path: str, item: Import, files: dict[str, str]) -> str | None:
    if unit_of(path) != "core" or item.root in ("groupstate", *CORE_IMPORTS):
        return None
    return f"core stays pure, but {path} imports {item.root}"


def _torch(path: str, item: Import, files: dict[str, str]) -> str | None:
    own = path in TORCH_FILES or unit_of(path) == "demo"
    brings = item.root == "torch" or any(item.name.startswith(_module(file)) for file in TORCH_FILES)
    if own or not brings:
        return None
    if item.at_import_time:
        return f"importing groupstate must not bring in torch, but {path} imports {_torch_name(item)} at its top"
    if item.root == "torch" and path not in TORCH_INSIDE:
        return f"torch stays in {', '.join([*TORCH_FILES, *TORCH_INSIDE])} and demo, but {path} imports it"
    return None


def _torch_name(item: Import) -> str:
    return "torch" if item.root == "torch" else next(m for f in TORCH_FILES if item.name.startswith(m := _module(f)))


def _module(path: str) -> str:
    return f"groupstate.{path.removesuffix('.py').replace('/', '.')}"


def _vllm(path: str, item: Import, files: dict[str, str]) -> str | None:
    if item.root == "vllm" and path not in (VLLM_FILE, *VLLM_PARTS):
        return f"vllm stays in {', '.join([VLLM_FILE, *VLLM_PARTS])}, but {path} imports it"
    part = next((part for part in VLLM_PARTS if item.name.startswith(_module(part))), None)
    if part is not None and path != VLLM_FILE:
        return f"{part} is imported by {VLLM_FILE} alone, but {path} imports it"
    return None


def _httpx(path: str, item: Import, files: dict[str, str]) -> str | None:
    if item.root == "httpx" and path != HTTPX_FILE:
        return f"httpx stays in {HTTPX_FILE}, but {path} imports it"
    brings = item.name.startswith(tuple(_module(unit.rstrip("/")) for unit in HTTPX_UNITS))
    if brings and item.at_import_time and not path.startswith(HTTPX_UNITS):
        return f"importing groupstate must not bring in httpx, but {path} imports {item.name} at its top"
    return None


def _stacks(path: str, item: Import, files: dict[str, str]) -> str | None:
    if item.root not in STACK_PACKAGES:
        return None
    if item.root not in STACKS.get(path, ()):
        files_of = [file for file, packages in STACKS.items() if item.root in packages]
        return f"{item.root} is integrated with in {', '.join(files_of) or 'no file'}, but {path} imports it"
    if item.at_import_time:
        return f"an integration must be importable without what it integrates with, but {path} imports {item.root}"
    return None


def _monitoring(path: str, item: Import, files: dict[str, str]) -> str | None:
    places = MONITORING_FILES.get(item.root, (path,))
    if path not in places:
        return f"{item.root} stays in {', '.join(places)}, but {path} imports it"
    return None


def _test_libraries(path: str, item: Import, files: dict[str, str]) -> str | None:
    if path.startswith(TEST_LIBRARY_UNITS):
        return None
    if item.root in TEST_LIBRARIES:
        return f"{item.root} stays in {', '.join(TEST_LIBRARY_UNITS)}, but {path} imports it"
    brings = item.name.startswith(tuple(_module(unit.rstrip("/")) for unit in TEST_LIBRARY_UNITS))
    if brings and item.at_import_time:
        return f"importing groupstate must not bring in a test library, but {path} imports {item.name} at its top"
    return None


def _safety(path: str, item: Import, files: dict[str, str]) -> str | None:
    if item.root not in UNSAFE:
        return None
    return f"a log from a stranger must be safe to open, but {path} imports {item.root}"


def _impure_calls(path: str, tree: ast.Module) -> Iterator[str]:
    if unit_of(path) != "core":
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CORE_CALLS:
            yield f"core stays pure, but {path} calls {node.func.id} in line {node.lineno}"


def _loose_tasks(path: str, tree: ast.Module) -> Iterator[str]:
    if path in LOOSE_TASKS:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Attribute) and (name := _loose_task(node)):
            yield (
                f"nothing runs loose, but {path} uses {name} in line {node.lineno}: start the task in an anyio task "
                f"group, or add the file to LOOSE_TASKS with the reason"
            )


def _loose_task(node: ast.ImportFrom | ast.Attribute) -> str | None:
    """The name under which a task is started outside a group. `group.create_task` on a task group is none."""
    if isinstance(node, ast.ImportFrom):
        names = [alias.name for alias in node.names if node.module == "asyncio"]
        return next((name for name in names if name in TASK_STARTERS), None)
    owner = ast.unparse(node.value)
    outside = node.attr in TASK_STARTERS and (owner == "asyncio" or "loop" in owner)
    return f"{owner}.{node.attr}" if outside else None


def test_the_walls_stand() -> None:
    assert violations(sources()) == []


@pytest.mark.parametrize(
    ("path", "text", "sentence"),
    [
        ("core/evict.py", "import random", "core stays pure, but core/evict.py imports random"),
        ("core/evict.py", "from os import path", "core stays pure, but core/evict.py imports os"),
        ("core/evict.py", "def f():\n    import time", "core stays pure, but core/evict.py imports time"),
        ("core/evict.py", "import datetime as dt", "core stays pure, but core/evict.py imports datetime"),
        ("core/evict.py", "import structlog.stdlib", "core stays pure, but core/evict.py imports structlog"),
        ("core/evict.py", "text = open('x')", "core stays pure, but core/evict.py calls open in line 1"),
        (
            "core/evict.py",
            "from groupstate.log.port import EventLog",
            "imports point inward, but core/evict.py imports groupstate.log.port.EventLog: "
            "core may import errors, version",
        ),
        (
            "core/evict.py",
            "from ..runtime import run",
            "imports point inward, but core/evict.py imports groupstate.runtime.run: core may import errors, version",
        ),
        (
            "log/tail.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from groupstate import Run",
            "imports point inward, but log/tail.py imports groupstate.Run: log may import core, errors, version",
        ),
        (
            "errors.py",
            "import groupstate.core.phases",
            "imports point inward, but errors.py imports groupstate.core.phases: errors may import nothing",
        ),
        (
            "runtime/why.py",
            "from groupstate.inspect import explain",
            "imports point inward, but runtime/why.py imports groupstate.inspect.explain: "
            "runtime may import tensors, batch, log, engines, logs, core, errors, version",
        ),
        (
            "extras/text.py",
            "from groupstate.errors import BadInput",
            "extras/text.py belongs to no layer: give 'extras' a line in MAY_IMPORT",
        ),
        (
            "batch.py",
            "import torch",
            "importing groupstate must not bring in torch, but batch.py imports torch at its top",
        ),
        (
            "integrations/verl/run.py",
            "import ray",
            "ray is integrated with in no file, but integrations/verl/run.py imports it",
        ),
        (
            "integrations/verl/queue.py",
            "import transfer_queue as tq",
            "an integration must be importable without what it integrates with, but integrations/verl/queue.py imports "
            "transfer_queue",
        ),
        (
            "runtime/run.py",
            "from groupstate.integrations.verl import ReplayBuffer",
            "imports point inward, but runtime/run.py imports groupstate.integrations.verl.ReplayBuffer: runtime may "
            "import tensors, batch, log, engines, logs, core, errors, version",
        ),
        (
            "runtime/run.py",
            "from groupstate.engines.torch import TorchEngine",
            "importing groupstate must not bring in torch, but runtime/run.py imports groupstate.engines.torch "
            "at its top",
        ),
        (
            "runtime/run.py",
            "def f():\n    from torch import nn",
            "torch stays in engines/torch.py, engines/slots.py, engines/transformer.py, batch.py, "
            "tensors.py, engines/model_file.py, engines/checkpoint.py and demo, but runtime/run.py imports it",
        ),
        (
            "runtime/run.py",
            "import importlib\nvllm = importlib.import_module('vllm')",
            "vllm stays in engines/vllm.py, engines/vllm_params.py, engines/vllm_start.py, "
            "but runtime/run.py imports it",
        ),
        (
            "runtime/run.py",
            "def f():\n    from groupstate.engines.vllm_start import started",
            "engines/vllm_start.py is imported by engines/vllm.py alone, but runtime/run.py imports it",
        ),
        (
            "engines/openai.py",
            "def f():\n    import httpx",
            "httpx stays in engines/http/client.py, but engines/openai.py imports it",
        ),
        (
            "runtime/run.py",
            "from groupstate.engines.openai import OpenAIEngine",
            "importing groupstate must not bring in httpx, but runtime/run.py imports "
            "groupstate.engines.openai.OpenAIEngine at its top",
        ),
        (
            "runtime/run.py",
            "def f():\n    import prometheus_client",
            "prometheus_client stays in integrations/prometheus.py, but runtime/run.py imports it",
        ),
        (
            "integrations/trl.py",
            "import trl",
            "an integration must be importable without what it integrates with, but integrations/trl.py imports trl",
        ),
        (
            "runtime/run.py",
            "def f():\n    from trl.experimental import async_grpo",
            "trl is integrated with in integrations/trl.py, but runtime/run.py imports it",
        ),
        (
            "simulate/faults.py",
            "def f():\n    import hypothesis",
            "hypothesis stays in testing/strategies.py, testing/machine.py, testing/contracts/, testing/fixtures.py, "
            "but simulate/faults.py imports it",
        ),
        (
            "testing/twin.py",
            "from groupstate.testing.machine import GroupMachine",
            "importing groupstate must not bring in a test library, but testing/twin.py imports "
            "groupstate.testing.machine.GroupMachine at its top",
        ),
        (
            "log/codec.py",
            "def f():\n    import pickle",
            "a log from a stranger must be safe to open, but log/codec.py imports pickle",
        ),
        (
            "runtime/sync.py",
            "import asyncio\nasyncio.get_running_loop().create_task(f())",
            "nothing runs loose, but runtime/sync.py uses asyncio.get_running_loop().create_task in line 2: start the "
            "task in an anyio task group, or add the file to LOOSE_TASKS with the reason",
        ),
        (
            "log/tail.py",
            "from asyncio import ensure_future",
            "nothing runs loose, but log/tail.py uses ensure_future in line 1: start the task in an anyio task "
            "group, or add the file to LOOSE_TASKS with the reason",
        ),
    ],
)
def test_a_planted_violation_gets_its_sentence(path: str, text: str, sentence: str) -> None:
    assert violations({path: text}) == [sentence]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("core/evict.py", "from collections.abc import Iterable\nfrom groupstate.core import events as ev"),
        ("core/evict.py", "from . import events\nfrom ..errors import BadInput"),
        ("batch.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import Tensor"),
        ("batch.py", "def to_torch():\n    import torch"),
        ("cli.py", "def demo():\n    from groupstate.engines.torch import TorchEngine"),
        ("demo/train.py", "import torch\nimport groupstate\nfrom groupstate import sync"),
        ("runtime/run.py", "async def f(tasks):\n    tasks.create_task(g())"),
        ("engines/vllm.py", "import vllm"),
        ("testing/contracts/engine.py", "import pytest"),
        ("testing/machine.py", "from groupstate.testing.strategies import rules"),
        ("engines/http/client.py", "import httpx"),
        ("engines/openai.py", "from groupstate.engines.http.fleet import Fleet"),
        ("cli.py", "def run():\n    from groupstate.engines.openai import engine_from_options"),
    ],
)
def test_what_is_allowed_gets_none(path: str, text: str) -> None:
    assert violations({path: text}) == []
