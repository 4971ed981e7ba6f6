"""`docs/integrations/verl.md` tells every setting of the drop-in for verl, with its default."""

import re
from pathlib import Path

from groupstate.integrations.verl.options import OWN_OPTIONS, VERL_OPTIONS, Given, Options, read

PAGE = (Path(__file__).parents[2] / "docs" / "integrations" / "verl.md").read_text(encoding="utf-8")


def rows() -> dict[str, str]:
    table = PAGE.partition("| setting | default | meaning |\n| --- | --- | --- |\n")[2].partition("\n\n")[0]
    return {
        row[0].strip("`"): row[1].strip("`") for row in (line.strip("| ").split(" | ") for line in table.split("\n"))
    }


def test_the_table_names_each_setting() -> None:
    assert list(rows()) == list(OWN_OPTIONS)


def test_the_defaults_are_those_that_hold() -> None:
    found = read(
        Given(trainer_mode="sync", max_off_policy_threshold=8, max_off_policy_strategy="drop", sampler_kwargs={})
    )

    told = {name: default for name, default in rows().items() if name in ("durability", "ties", "uid_split", "metrics")}
    assert told == {name: getattr(found, name) for name in told}
    assert float(rows()["stall_s"]) == found.stall_s
    assert isinstance(found, Options)


def test_verls_own_keywords_are_named() -> None:
    assert [name for name in VERL_OPTIONS if f"`{name}`" not in PAGE] == []


def test_the_switches_are_settings() -> None:
    switches = re.findall(r"`([a-z_]+): ", PAGE)

    assert switches
    assert {name for name in switches if name not in OWN_OPTIONS} == set()
