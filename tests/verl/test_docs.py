"""What the pages say of verl: their examples run, and the two lines are lines of its configuration."""

import itertools
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
import yaml

from groupstate.integrations.verl.options import OWN_OPTIONS, Given, Options, read
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


def table(after: str) -> list[list[str]]:
    """The rows of the first table behind a heading."""
    lines = PAGE.split(after, 1)[1].splitlines()
    rows = list(itertools.takewhile(lambda line: line.startswith("|"), itertools.dropwhile(_is_text, lines)))
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows[2:]]


def _is_text(line: str) -> bool:
    return not line.startswith("|")


def test_the_settings_are_those_that_there_are_with_their_defaults() -> None:
    rows = {name.strip("`"): default for name, default, _ in table("### Settings")}
    fields = {field.name: field.default for field in attrs.fields(Options)}
    said = {name: default.strip("`") for name, default in rows.items() if name in fields and name != "rules"}
    shown = {name: str(fields[name]).lower().removesuffix(".0") for name in said}

    assert set(rows) == set(OWN_OPTIONS)
    assert {name: text for name, text in said.items() if shown[name] not in (text, "none")} == {}


@pytest.mark.parametrize("row", table("### What is different on purpose"), ids=lambda row: row[0][:40])
def test_each_departure_has_a_switch_that_is_taken_and_strict_does_the_same(row: list[str]) -> None:
    switch = re.findall(r"`([a-z_]+: [^`]*)`", row[2])[0]
    name, _, value = switch.partition(": ")

    def options(**kwargs: Any) -> Options:
        given = {"filter_groups_metric": "acc", "train_batch_size": 2, **kwargs}
        return read(Given(trainer_mode="separate_async", max_off_policy_threshold=2, max_off_policy_strategy="wait",
                          sampler_kwargs=given, has_refill_fn=True))  # fmt: skip

    made = yaml.safe_load(f"{{{name}: {value}}}")
    mine, plain, strict = options(**made), options(), options(strict=True)
    changed = {field for field in ("rules", *attrs.asdict(plain)) if getattr(mine, field) != getattr(plain, field)}

    assert changed, f"{switch} changes nothing"
    if "`strict`" in row[2] and name != "rules":
        assert {field: getattr(mine, field) for field in changed - {"rules"}} == {
            field: getattr(strict, field) for field in changed - {"rules"}
        }


def test_the_places_that_are_named_are_in_verls_configuration(compose: Any) -> None:
    from omegaconf import OmegaConf

    config = compose()
    places = re.findall(r"`((?:trainer|actor_rollout_ref|reward|algorithm|data)\.[a-z_0-9.]+)", PAGE)

    assert places
    assert [place for place in places if OmegaConf.select(config, place, default=config) is config] == []
