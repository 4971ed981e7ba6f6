"""What `make mutants` found last, and how its results are kept."""

import json
from pathlib import Path

import pytest

from tools import mutants
from tools.mutants import FileResult, Mutant, Survivor

KILLED_MIN = 0.9
"""Of the mutants of the files that were tried, texts among them."""


def kept() -> dict[str, FileResult]:
    return mutants.read_results(mutants.RESULTS.read_text(encoding="utf-8"))


def result(**changes: object) -> FileResult:
    values = {
        "path": "groupstate/core/evict.py",
        "source": "0" * 12,
        "commit": "abcdef0",
        "date": "2026-01-02",
        "minutes": 1.5,
        "mutants": 40,
        "killed": 39,
        "timeouts": 1,
        "texts": 10,
        "texts_killed": 10,
        "survivors": (Survivor("x_judged__mutmut_1", "judged", 'if "a" == b -> if "a" != b', "why 'not'"),),
    }
    return FileResult(**{**values, **changes})


def test_most_mutants_are_killed() -> None:
    results = kept().values()

    assert sum(one.killed for one in results) >= KILLED_MIN * sum(one.mutants for one in results)


def test_each_that_survives_has_a_reason() -> None:
    assert mutants.without_reason(kept()) == []


@pytest.mark.parametrize("path", kept())
def test_what_a_file_gave_adds_up(path: str) -> None:
    one = kept()[path]

    assert (mutants.ROOT / path).exists()
    assert len(one.survivors) == one.mutants - one.killed
    assert one.texts_killed <= one.texts <= one.mutants


def test_every_module_that_has_functions_is_tried_or_said_not_to_be() -> None:
    modules = {path.stem for path in (mutants.ROOT / "groupstate" / "core").glob("*.py")}

    assert modules - set(mutants.TESTS) == {"__init__", "events"}


@pytest.mark.parametrize(
    "name", sorted({name for names in mutants.TESTS.values() for name in names} | set(mutants.SLOW))
)
def test_the_tests_that_are_named_exist(name: str) -> None:
    assert (mutants.ROOT / "tests" / name).exists()


def test_the_page_has_the_table_of_the_results() -> None:
    page = mutants.PAGE.read_text(encoding="utf-8")

    assert mutants.part(kept()).rewritten(page) == page, "docs/testing.md is behind its results: run `make mutants`"


def test_results_come_back_as_they_were_written() -> None:
    one = result(
        survivors=(
            Survivor("x_a__mutmut_1", "a", 'x = "ö\\n" -> x = None', ""),
            Survivor("x_b__mutmut_1", "b", "y -> z", "same"),
        )
    )

    assert mutants.read_results(mutants.written([one])) == {one.path: one}


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ('raise Bad("too many of them")', 'raise Bad("XXtoo many of themXX")', True),
        ('raise Bad("Too many", "of them")', 'raise Bad("Too many", "OF THEM")', True),
        ('raise Bad("too many")', "raise Bad(None)", False),
        ('mode == "sync"', 'mode == "XXsyncXX"', False),
        ('mode == "sync" and "in a row"', 'mode != "sync" and "in a row"', False),
    ],
)
def test_a_text_is_a_string_of_several_words(before: str, after: str, text: bool) -> None:
    assert mutants.is_text(before, after) is text


def test_a_mutant_is_told_by_the_lines_that_it_changes() -> None:
    before = ["def f(x):", "    y = x + 1", "    return y"]
    after = ["def f(x):", "    y = x - 1", "    return y"]

    assert mutants.described(before, after, "f") == Mutant("f", "y = x + 1 -> y = x - 1", False)


def test_mutants_are_read_as_mutmut_writes_them(tmp_path: Path) -> None:
    core = tmp_path / "mutants" / "groupstate" / "core"
    core.mkdir(parents=True)
    lines = ["def xǁBookǁends__mutmut_orig(a):", "    return a", "def xǁBookǁends__mutmut_1(a):", "    return None"]
    (core / "book.py").write_text("\n".join(lines), encoding="utf-8")
    spans = {"xǁBookǁends__mutmut_orig": [1, 2], "xǁBookǁends__mutmut_1": [3, 4]}
    (core / "book.py.spans").write_text(json.dumps({"version": 1, "spans": spans}), encoding="utf-8")

    expected = {"groupstate.core.book.xǁBookǁends__mutmut_1": Mutant("Book.ends", "return a -> return None", False)}
    assert mutants.mutants_of(tmp_path, "book") == expected


def test_a_reason_stays_with_its_change_and_texts_have_theirs() -> None:
    made = {
        "1": Mutant("f", "a -> b", False),
        "2": Mutant("f", "b -> c", False),
        "3": Mutant("f", '"a b" -> "A B"', True),
        "4": Mutant("g", "c -> d", False),
        "5": Mutant("g", "d -> e", False),
    }
    codes = {"1": 0, "2": 33, "3": 0, "4": 1, "5": -24}
    path = mutants.ROOT / "groupstate" / "core" / "evict.py"

    one = mutants.counted(path, made, codes, {("f", "a -> b"): "the same"}, minutes=0.1)

    assert one.survivors == (
        Survivor("3", "f", '"a b" -> "A B"', mutants.TEXT),
        Survivor("1", "f", "a -> b", "the same"),
        Survivor("2", "f", "b -> c", ""),
    )
    assert (one.mutants, one.killed, one.timeouts, one.texts, one.texts_killed) == (5, 2, 1, 1, 0)
    assert mutants.without_reason({one.path: one}) == [f"{one.path}: f: b -> c"]


def test_survivors_that_a_test_kills_by_now_are_counted_as_killed() -> None:
    survivors = (
        Survivor("1", "f", "a -> b", ""),
        Survivor("2", "f", '"a b" -> "A B"', mutants.TEXT),
        Survivor("3", "f", "c -> d", ""),
        Survivor("4", "f", "d -> e", "the same"),
    )
    before = result(mutants=40, killed=36, texts=10, texts_killed=9, timeouts=0, survivors=survivors)
    made = {
        f"groupstate.core.evict.{one.name}": Mutant(one.function, one.change, one.change.startswith(chr(34)))
        for one in survivors
    }
    codes = {"groupstate.core.evict.1": 1, "groupstate.core.evict.2": -24, "groupstate.core.evict.3": 0}

    after = mutants.without_killed(before, made, codes)

    assert (after.mutants, after.killed, after.timeouts, after.texts_killed) == (40, 38, 1, 10)
    assert after.survivors == survivors[2:]
    assert mutants.unexplained("evict", {after.path: after}) == [survivors[2]]


def test_a_file_that_changed_or_was_never_tried_is_behind() -> None:
    path = "groupstate/core/evict.py"

    assert mutants.is_behind("evict", {})
    assert mutants.is_behind("evict", {path: result()})
    assert not mutants.is_behind("evict", {path: result(source=mutants.digest(mutants.ROOT / path))})


def test_a_page_without_its_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="lost one of its two markers"):
        mutants.part({}).rewritten(f"before\n{mutants.BEGIN}\nafter\n")
