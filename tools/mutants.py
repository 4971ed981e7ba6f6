"""Mutation testing of `groupstate/core`: mutmut changes the code in small ways, and a test has to fail for each.

Rule 1: a file at a time, and what it gave is kept before the next begins, so a run can be stopped and goes on later.
Rule 2: first the tests that are about a file, which are few and fast. At the end, what they let live in any file meets
all tests of the core but the slow ones (`SLOW`): a mutant that only those would kill counts as one that survives.
Rule 3: a survivor has a reason, written by hand into the results. It goes with the change, not with mutmut's number.
"""

import argparse
import difflib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from tools.generated_part import DOCS, GeneratedPart

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "tests" / "mutants" / "results.toml"
PAGE = DOCS / "testing.md"
WORK = ROOT / ".cache" / "mutants"
BEGIN = "<!-- generated from tests/mutants/results.toml by `make mutants`; edits are overwritten -->"
END = "<!-- end of what is generated from the results -->"

BOOK_ALONE = (
    "core/test_book_looking.py",
    "core/test_book_ids.py",
    "core/test_book_counts.py",
    "core/test_book_batches.py",
    "core/test_book_payloads.py",
    "core/test_book_marks.py",
    "core/test_book_basis.py",
    "core/test_book_replay.py",
)
BOOK = (
    *BOOK_ALONE,
    "core/test_targets.py",
    "core/test_datasets.py",
    "core/test_requeues.py",
    "core/test_rules.py",
)
INVARIANTS_ALONE = (
    "core/test_invariants_good_logs.py",
    "core/test_invariants_groups.py",
    "core/test_invariants_counts.py",
    "core/test_invariants_batches.py",
)
INVARIANTS = (*INVARIANTS_ALONE, "core/test_witnesses.py", "core/test_rule_invariants.py")

TESTS: Mapping[str, tuple[str, ...]] = {
    "evict": (
        "core/test_evict_matrix.py",
        "core/test_evict_lag.py",
        "core/test_evict_zero_variance.py",
        "core/test_evict_credit.py",
        "core/test_doomed.py",
        "core/test_datasets.py",
        "core/test_requeues.py",
        "core/test_spread.py",
    ),
    "supply": ("core/test_supply.py", "core/test_targets.py", "core/test_datasets.py"),
    "rules": ("core/test_rules.py", "core/test_rule_problems.py", "core/test_datasets.py"),
    "rule_problems": ("core/test_rule_problems.py", "core/test_rules.py"),
    "select": ("core/test_select.py", "core/test_datasets.py", "core/test_targets.py"),
    "custom": ("core/test_custom.py",),
    "presets": ("core/test_presets.py",),
    "group": ("core/test_group.py", "core/test_requeues.py"),
    "book_checks": (*BOOK_ALONE, "core/test_group.py"),
    "book": BOOK,
    "book_changes": BOOK,
    "departed": ("core/test_departed.py",),
    "frontier": ("core/test_frontier.py",),
    "phases": ("core/test_phases.py",),
    "held": (*BOOK_ALONE, "core/test_datasets.py", "core/test_metrics.py"),
    "shelf": ("core/test_snapshot.py", *BOOK_ALONE, "core/test_targets.py", "core/test_datasets.py"),
    "snapshot": ("core/test_snapshot.py",),
    "spread": ("core/test_spread.py",),
    "arguments": ("core/test_arguments.py",),
    "prompt": ("core/test_prompt.py",),
    "tracked": INVARIANTS_ALONE,
    "metrics": ("core/test_metrics.py",),
    "packed": ("core/test_packed.py",),
    "trajectory": ("core/test_trajectory.py", "core/test_packed.py"),
    "invariants": (*INVARIANTS, "core/test_standing.py"),
    "group_invariants": INVARIANTS,
    "batch_invariants": INVARIANTS,
    "misfits": INVARIANTS,
    "typed_settings": (
        "core/test_typed_settings.py",
        "core/test_rules.py",
        "core/test_rule_problems.py",
        "runtime/test_settings.py",
    ),
    "near": ("core/test_near.py", "inspect/test_words.py", "runtime/test_settings.py"),
    "explain": ("core/test_explain.py",),
    "folding": ("core/test_folding.py",),
    "standing": ("core/test_standing.py",),
    "followed": ("core/test_standing.py",),
}
"""The modules of the core in which mutmut finds something to change, rules and decisions first, with the tests that are
about each. It changes nothing outside of functions, such as a table, and no decorated function."""

SLOW = (
    "core/test_plain_rules.py",
    "core/test_tallies.py",
    "core/test_histories.py",
    "core/test_rule_invariants.py",
)
"""Left out, for what they take: random runs of seconds each. The rules' plain model is among them."""

CONFIGURATION = """
[tool.mutmut]
source_paths = ["groupstate"]
only_mutate = [{mutated}]
also_copy = ["docs"]
pytest_add_cli_args_test_selection = [{selection}]
pytest_add_cli_args = [{arguments}]
track_dependencies = false
use_git_change_detection = false
timeout_multiplier = 8.0
"""
SELECTED = ("-m", "not long and not crash and not vllm")
# mutmut starts pytest anew for each mutant: only the plugins that the tests need, none that collects garbage, and
# no timers for each test, since mutmut has one of its own.
PLUGINS = ("pytest_asyncio.plugin", "pytest_timeout", "_hypothesis_pytestplugin")
UNUSED = ("cacheprovider", "unraisableexception", "threadexception")
ARGUMENTS = (
    "-q",
    "--no-header",
    "--hypothesis-profile=mutants",
    "--timeout=0",
    "-o",
    "faulthandler_timeout=0",
    *(word for name in UNUSED for word in ("-p", f"no:{name}")),
    *(word for name in PLUGINS for word in ("-p", name)),
)

KILLED = {1, 3}
"""Exit codes of pytest for tests that fail, and for an error within it."""
TIMED_OUT = {-24, -9, 24, 36, 152, 255}
"""mutmut's, for a mutant whose tests took several times as long as they do: it loops, or waits for ever."""

STRING = re.compile(r"""(?P<quote>["'])(?P<body>(?:\\.|(?!(?P=quote)).)*)(?P=quote)""")
TEXT = "only the words of a message: tests hold what it is about, not every letter"


@attrs.frozen
class Mutant:
    function: str
    """The function that it changes, `Class.method` for a method."""
    change: str
    """The lines that it changes, before and after, as one line; where several are alike, which of them."""
    text: bool
    """Whether it only changes a string that has a space in it, which makes it a sentence for people."""


@attrs.frozen
class Survivor:
    name: str
    """mutmut's, for this source of the file."""
    function: str
    change: str
    reason: str


@attrs.frozen
class FileResult:
    """What became of the mutants of one file."""

    path: str
    source: str
    """Digest of the file that was mutated."""
    commit: str
    date: str
    minutes: float
    mutants: int
    killed: int
    """Those that ran out of time among them."""
    timeouts: int
    texts: int
    texts_killed: int
    survivors: tuple[Survivor, ...]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def read_results(text: str) -> dict[str, FileResult]:
    """By path, in the order of the results file."""
    results = {}
    for table in tomllib.loads(text).get("file", []):
        survivors = tuple(Survivor(**survivor) for survivor in table.pop("survivor", []))
        results[table["path"]] = FileResult(**table, survivors=survivors)
    return results


def written(results: Iterable[FileResult]) -> str:
    """The results as TOML. A string of JSON is one of TOML too."""
    lines = ["# Written by `make mutants`; the reasons are written by hand and kept while the change stays the same."]
    for result in results:
        lines += ["", "[[file]]", *_pairs(attrs.asdict(result, filter=lambda field, _: field.name != "survivors"))]
        for survivor in result.survivors:
            lines += ["", "[[file.survivor]]", *_pairs(attrs.asdict(survivor))]
    return "\n".join(lines) + "\n"


def _pairs(values: Mapping[str, Any]) -> list[str]:
    return [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in values.items()]


def described(before: Sequence[str], after: Sequence[str], function: str) -> Mutant:
    """The mutant that makes these lines of those."""
    removed, added = [], []
    for line in difflib.ndiff(before, after):
        if line.startswith("- "):
            removed.append(line[2:].strip())
        elif line.startswith("+ "):
            added.append(line[2:].strip())
    old, new = " ".join(removed), " ".join(added)
    place = 0
    while place < len(before) and before[place] == after[place]:
        place += 1
    alike = [line.strip() for line in before].count(before[place].strip())
    which = f" (number {[line.strip() for line in before[: place + 1]].count(before[place].strip())} of {alike})"
    return Mutant(function, f"{old} -> {new}{which if alike > 1 else ''}", is_text(old, new))


def is_text(before: str, after: str) -> bool:
    """Whether only a string with a space in it differs, by its capital letters or by XX at both ends."""
    for found in STRING.finditer(before):
        head, body, tail = before[: found.start("body")], found["body"], before[found.end("body") :]
        if " " in body and after.startswith(head) and after.endswith(tail):
            changed = after[len(head) : len(after) - len(tail)]
            if changed != body and (changed == f"XX{body}XX" or changed.casefold() == body.casefold()):
                return True
    return False


def mutants_of(folder: Path, module: str) -> dict[str, Mutant]:
    """Every mutant that mutmut made of a module, by its name there."""
    made = folder / "mutants" / "groupstate" / "core" / f"{module}.py"
    lines = made.read_text(encoding="utf-8").splitlines()
    spans = json.loads(Path(f"{made}.spans").read_text(encoding="utf-8"))["spans"]
    mutants = {}
    for name, (first, last) in spans.items():
        mangled, _, number = name.rpartition("__mutmut_")
        if number != "orig":
            start, end = spans[f"{mangled}__mutmut_orig"]
            function = mangled.removeprefix("x_").removeprefix("xǁ").replace("ǁ", ".")
            # The first line of each has its name, which is another.
            before, after = (
                [line.replace(key, mangled) for line in lines[begin - 1 : stop]]
                for key, begin, stop in ((f"{mangled}__mutmut_orig", start, end), (name, first, last))
            )
            mutants[f"groupstate.core.{module}.{name}"] = described(before, after, function)
    return mutants


def exit_codes(folder: Path, module: str) -> dict[str, int | None]:
    meta = folder / "mutants" / "groupstate" / "core" / f"{module}.py.meta"
    codes: dict[str, int | None] = json.loads(meta.read_text(encoding="utf-8"))["exit_code_by_key"]
    return codes


def run_mutmut(
    modules: Sequence[str], folder: Path, selection: Sequence[str], names: Sequence[str], jobs: int
) -> dict[str, int]:
    """What pytest ended with for each of these mutants, or for all of the modules."""
    prepare(folder, modules, selection)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    command = [str(Path(sys.executable).parent / "mutmut"), "run", "--max-children", str(jobs), *names]
    with (folder / "log").open("wb") as log:
        ended = subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)
    every = {name: code for module in modules for name, code in exit_codes(folder, module).items()}
    codes = {name: every[name] for name in names or every}
    undone = [name for name, code in codes.items() if code is None]
    if ended.returncode or undone:
        raise SystemExit(f"mutmut didn't try {len(undone)} of {len(codes)} mutants: see {folder / 'log'}")
    return {name: code for name, code in codes.items() if code is not None}


def prepare(folder: Path, modules: Sequence[str], selection: Sequence[str]) -> None:
    """A copy of what mutmut works on, with its settings."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for part in ("groupstate", "tests", "docs"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    own = CONFIGURATION.format(
        mutated=json.dumps([path_of(module) for module in modules])[1:-1],
        selection=json.dumps([*selection, *SELECTED])[1:-1],
        arguments=json.dumps(ARGUMENTS)[1:-1],
    )
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (folder / "pyproject.toml").write_text(project + own, encoding="utf-8")


def path_of(module: str) -> str:
    return f"groupstate/core/{module}.py"


def tried(module: str, reasons: Mapping[tuple[str, str], str], jobs: int) -> FileResult:
    """Every mutant of one module, by the tests that are about it."""
    began, folder = time.monotonic(), WORK / module
    codes = run_mutmut([module], folder, [f"tests/{name}" for name in TESTS[module]], [], jobs)
    minutes = round((time.monotonic() - began) / 60, 1)
    return counted(ROOT / path_of(module), mutants_of(folder, module), codes, reasons, minutes=minutes)


def tried_again(modules: Sequence[str], results: Mapping[str, FileResult], jobs: int) -> dict[str, FileResult]:
    """The results of modules without those of their unexplained survivors that a test of the core kills."""
    names = [f"groupstate.core.{module}.{one.name}" for module in modules for one in unexplained(module, results)]
    about = dict.fromkeys(f"tests/{name}" for module in modules for name in TESTS[module])
    codes = run_mutmut(modules, WORK / "again", list(about), names, jobs)
    if alive := [name for name, code in codes.items() if code not in KILLED | TIMED_OUT]:
        others = ["tests/core", *(f"--ignore=tests/{name}" for name in SLOW)]
        codes |= run_mutmut(modules, WORK / "others", others, alive, jobs)
    return {
        path_of(module): without_killed(results[path_of(module)], mutants_of(WORK / "again", module), codes)
        for module in modules
    }


def without_killed(result: FileResult, mutants: Mapping[str, Mutant], codes: Mapping[str, int]) -> FileResult:
    """A result after some of its survivors were tried again."""
    found = {name: codes[name] for name in mutants if codes.get(name) in KILLED | TIMED_OUT}
    killed = {name.rpartition(".")[2] for name in found}
    return attrs.evolve(
        result,
        commit=_git("rev-parse", "--short", "HEAD"),
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        killed=result.killed + len(killed),
        timeouts=result.timeouts + sum(code in TIMED_OUT for code in found.values()),
        texts_killed=result.texts_killed + sum(mutants[name].text for name in found),
        survivors=tuple(one for one in result.survivors if one.name not in killed),
    )


def counted(
    path: Path,
    mutants: Mapping[str, Mutant],
    codes: Mapping[str, int],
    reasons: Mapping[tuple[str, str], str],
    *,
    minutes: float,
) -> FileResult:
    killed = {name for name, code in codes.items() if code in KILLED | TIMED_OUT}
    texts = {name for name in codes if mutants[name].text}
    survivors = []
    for name in codes.keys() - killed:
        mutant = mutants[name]
        reason = reasons.get((mutant.function, mutant.change), TEXT if mutant.text else "")
        survivors.append(Survivor(name.rpartition(".")[2], mutant.function, mutant.change, reason))
    return FileResult(
        path=path.relative_to(ROOT).as_posix(),
        source=digest(path),
        commit=_git("rev-parse", "--short", "HEAD"),
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        minutes=minutes,
        mutants=len(codes),
        killed=len(killed),
        timeouts=sum(code in TIMED_OUT for code in codes.values()),
        texts=len(texts),
        texts_killed=len(texts & killed),
        survivors=tuple(sorted(survivors, key=lambda one: (one.function, one.change))),
    )


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def is_behind(module: str, results: Mapping[str, FileResult]) -> bool:
    """Whether a module hasn't been tried as it is today."""
    path = path_of(module)
    return path not in results or results[path].source != digest(ROOT / path)


def table(results: Mapping[str, FileResult]) -> str:
    """A row for each module, those that haven't been tried too, and their sum."""
    rows = [
        "| file | mutants | killed | survive | killed | without texts | minutes | tried |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for module in TESTS:
        if result := results.get(path_of(module)):
            rows.append(f"| `{module}.py` | {_figures([result])} | {result.date}, `{result.commit}` |")
        else:
            rows.append(f"| `{module}.py` | | | | | | | not yet |")
    return "\n".join([*rows, f"| all that were tried | {_figures(list(results.values()))} | |"])


def _figures(results: Sequence[FileResult]) -> str:
    mutants, killed = sum(one.mutants for one in results), sum(one.killed for one in results)
    without = mutants - sum(one.texts for one in results), killed - sum(one.texts_killed for one in results)
    minutes = sum(one.minutes for one in results)
    shares = " | ".join(f"{100 * part / whole:.1f} %" if whole else "" for whole, part in ((mutants, killed), without))
    return f"{mutants:,} | {killed:,} | {mutants - killed:,} | {shares} | {minutes:.0f}"


def part(results: Mapping[str, FileResult]) -> GeneratedPart:
    """The part of the page that has the table."""
    return GeneratedPart(PAGE, BEGIN, END, lambda: f"{BEGIN}\n\n{table(results)}\n\n{END}")


def save(results: Mapping[str, FileResult]) -> None:
    in_order = [results[path] for path in map(path_of, TESTS) if path in results]
    RESULTS.write_text(written(in_order), encoding="utf-8")
    part(results).write()


def survivors_of(module: str, results: Mapping[str, FileResult]) -> tuple[Survivor, ...]:
    return results[path_of(module)].survivors if path_of(module) in results else ()


def unexplained(module: str, results: Mapping[str, FileResult]) -> list[Survivor]:
    """Survivors that nobody has written a reason for."""
    return [one for one in survivors_of(module, results) if one.reason in {"", TEXT}]


def without_reason(results: Mapping[str, FileResult]) -> list[str]:
    return [
        f"{result.path}: {survivor.function}: {survivor.change}"
        for result in results.values()
        for survivor in result.survivors
        if not survivor.reason
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Mutation testing of groupstate/core.")
    parser.add_argument("files", nargs="*", help="groupstate/core/NAME.py; default: all that changed since their last")
    parser.add_argument("--survivors", action="store_true", help="only those that survived, say after tests were added")
    parser.add_argument("--jobs", default="auto", help="mutants at a time; default: one on each core")
    options = parser.parse_args()
    if unknown := [file for file in options.files if Path(file).stem not in TESTS]:
        parser.error(f"no mutants are made of {unknown[0]}; there are {', '.join(TESTS)}")
    jobs = os.cpu_count() or 1 if options.jobs == "auto" else int(options.jobs)

    results = read_results(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    chosen = [Path(file).stem for file in options.files]
    for module in [] if options.survivors else chosen or [one for one in TESTS if is_behind(one, results)]:
        known = {(one.function, one.change): one.reason for one in survivors_of(module, results) if one.reason}
        results[path_of(module)] = tried(module, known, jobs)
        save(results)
        print(said(results[path_of(module)]), flush=True)
    again = [one for one in chosen or TESTS if not is_behind(one, results) and unexplained(one, results)]
    if again:
        results |= tried_again(again, results, jobs)
        save(results)
        print(*(said(results[path_of(module)]) for module in again), sep="\n")
    if missing := without_reason(results):
        raise SystemExit(
            "These survive. Kill them with a test, or write a reason into the results:\n" + "\n".join(missing)
        )


def said(result: FileResult) -> str:
    return f"{result.path}: {result.mutants} mutants, {result.mutants - result.killed} survive"


if __name__ == "__main__":
    main()
