"""The examples that the main suite leaves out because they need vLLM."""

from pathlib import Path
from types import ModuleType

import pytest

from tests.test_docs import PAGES, Block, blocks, main_module, run_python
from tests.vllm.tiny_model import write_model

__all__ = ["main_module"]

EXAMPLES = [block for path in PAGES for block in blocks(path) if block.not_run == "needs vLLM"]


def test_there_are_some() -> None:
    assert EXAMPLES


@pytest.mark.parametrize("block", EXAMPLES, ids=lambda block: block.where)
def test_an_example_runs(
    block: Block, main_module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    run_python([block], vars(main_module))
