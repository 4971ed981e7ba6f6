"""The examples that the main suite leaves out because they need another stack's package."""

from pathlib import Path
from types import ModuleType

import pytest

from tests.test_docs import PAGES, Block, blocks, main_module, run_python

__all__ = ["main_module"]

EXAMPLES = {path: page for path in PAGES if (page := [block for block in blocks(path) if block.not_run == "needs TRL"])}


def test_there_are_some() -> None:
    assert EXAMPLES


@pytest.mark.parametrize("page", EXAMPLES.values(), ids=[path.name for path in EXAMPLES])
def test_the_examples_of_a_page_run(
    page: list[Block],
    main_module: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    run_python(page, vars(main_module))

    shown = [block.text for block in blocks(page[0].path) if block.kind == "text"]
    assert [text for text in shown if text not in capsys.readouterr().out] == []
