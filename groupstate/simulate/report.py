"""Runs seeds one after the other, says what came of them, and of what went wrong how to repeat it."""

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs

from groupstate.simulate.drawn import drawn_plan
from groupstate.simulate.plan import Plan
from groupstate.simulate.plan_file import plan_text
from groupstate.simulate.retold import retold
from groupstate.simulate.shrink import shrunk
from groupstate.simulate.simulator import Outcome, simulate
from groupstate.version import VERSION

Say = Callable[[str], None]


@attrs.define
class Totals:
    runs: int = 0
    lifetimes: int = 0
    sessions: int = 0
    events: int = 0
    lives: int = 0
    virtual_s: float = 0.0
    processor_s: float = 0.0
    """Of this process."""

    def add(self, outcome: Outcome, processor_s: float) -> None:
        self.runs += 1
        self.lifetimes += outcome.lifetimes
        self.sessions += outcome.sessions
        self.events += outcome.events
        self.lives += outcome.lives
        self.virtual_s += outcome.virtual_s
        self.processor_s += processor_s

    def __str__(self) -> str:
        per_s = self.lifetimes / max(self.processor_s, 1e-9)
        return (
            f"{self.runs:,} runs, {self.lifetimes:,} group lifetimes ({self.sessions:,} attempts of sessions), "
            f"{self.events:,} events, {self.lives:,} processes, {self.virtual_s / 3600:,.1f} virtual hours; "
            f"{self.processor_s:,.1f} s of one core, {per_s:,.0f} lifetimes/s"
        )


def commit() -> str:
    """The commit that runs, as far as it can be known, and the version."""
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return f"groupstate {VERSION}"
    return f"{done.stdout.strip()} (groupstate {VERSION})"


def plans(seed: int, runs: int | None, hours: float | None, most_s: float | None) -> Iterator[Plan]:
    """Seeds from the first on: so many, or until so many seconds have passed."""
    began = time.monotonic()
    number = 0
    while (runs is None or number < runs) and (most_s is None or time.monotonic() - began < most_s):
        yield drawn_plan(seed + number, hours=hours)
        number += 1


def main(todo: Iterator[Plan], *, options: str, out: Path, say: Say = print) -> int:
    """Simulate plan after plan; 0 if nothing went wrong, 1 at the first that did.

    Args:
        options: as given on the command line, for the report.
        out: folder for what a failure leaves.
    """
    totals = Totals()
    say(f"commit {commit()}; options: {options}")
    for plan in todo:
        began = time.process_time()
        outcome = simulate(plan)
        totals.add(outcome, time.process_time() - began)
        if outcome.breach is not None:
            _report(outcome, options, out, say)
            say(str(totals))
            return 1
        say(line_of(outcome))
    say(str(totals))
    return 0


def line_of(outcome: Outcome) -> str:
    ends = ", ".join(f"{how} {count}" for how, count in sorted(outcome.ends.items()))
    return (
        f"seed {outcome.plan.seed}: ok, {outcome.lifetimes} lifetimes, {outcome.events} events, "
        f"{outcome.virtual_s / 3600:.2f} h, processes: {ends}; log {outcome.digest[:16]}"
    )


def _again(plan: Plan, options: str) -> str:
    """The options that repeat one plan."""
    if plan == drawn_plan(plan.seed):
        return f"--seed {plan.seed}"
    if plan == drawn_plan(plan.seed, hours=plan.hours):
        return f"--seed {plan.seed} --hours {plan.hours!r}"
    return options


def _report(outcome: Outcome, options: str, out: Path, say: Say) -> None:
    breach, seed = outcome.breach, outcome.plan.seed
    assert breach is not None
    say(f"FAILED seed {seed}, commit {commit()}, options: {options}\n{breach}")
    say(f"again: groupstate simulate {_again(outcome.plan, options)}")
    say("making it smaller ...")
    small = shrunk(outcome)
    found = small.outcome
    file = out / f"seed-{seed}.plan.toml"
    say(f"after {small.runs} runs: {found.lifetimes} lifetimes, {found.events} events\n{found.breach}")
    if not _written(file, plan_text(found.plan), say):
        return
    say(f"again, smaller: groupstate simulate --plan {file}")
    scenario = retold(found.plan, found.records, breach.kind, f"Seed {seed}: {breach.kind}")
    if scenario is None:
        say("it can't be said as a scenario file: what goes wrong depends on time, on a crash or on who waits")
        return
    file = out / f"seed-{seed}.scenario.toml"
    if not _written(file, scenario, say):
        return
    say(f"as a scenario: groupstate scenario {file}\n{scenario}")


def _written(file: Path, text: str, say: Say) -> bool:
    """Keep what was found, at least before the eyes of whoever looks for it: it may have taken hours."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        say(f"{file} can't be written: {error.strerror}; it would be:\n{text}")
        return False
    return True
