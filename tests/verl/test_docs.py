"""What the pages say of verl: their examples run, and the two lines are lines of its configuration."""

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.test_docs import PAGES, ROOT, Block, blocks, main_module, run_python
from tests.verl.producing import Queue
from tests.verl.test_config import LINES, compose

__all__ = ["compose", "main_module"]

PAGE = (ROOT / "docs" / "integrations" / "verl.md").read_text(encoding="utf-8")
EXAMPLES = [block for path in PAGES for block in blocks(path) if block.not_run == "needs verl"]


def test_there_are_some() -> None:
    assert EXAMPLES


@pytest.mark.parametrize("block", EXAMPLES, ids=lambda block: block.where)
def test_an_example_runs(
    block: Block, main_module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transfer_queue: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    run_python([block], vars(main_module))

    assert Queue("train").listed() == set()


def test_the_two_lines_are_those_that_are_tested() -> None:
    assert all(line in PAGE for line in LINES)


def test_the_places_that_are_named_are_in_verls_configuration(compose: Any) -> None:
    from omegaconf import OmegaConf

    config = compose()
    places = re.findall(r"`((?:trainer|actor_rollout_ref|reward|algorithm|data)\.[a-z_0-9.]+)", PAGE)

    assert places
    assert [place for place in places if OmegaConf.select(config, place, default=config) is config] == []
