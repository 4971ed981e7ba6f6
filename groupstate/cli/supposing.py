"""`groupstate whatif`. What plays the rules is imported only when it is called."""

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from groupstate.cli.output import Section, while_read, write, write_json, write_sections
from groupstate.cli.runs import first_of, records_of
from groupstate.core.rules import Rules, rules_from_dict
from groupstate.errors import BadInput
from groupstate.inspect.words import span_of
from groupstate.runtime.settings import parsed_assignments, read_settings

if TYPE_CHECKING:
    from groupstate.simulate.whatif.compare import WhatIf
    from groupstate.simulate.whatif.figures import Figures

Tell = Callable[["Figures"], str]

COLUMNS = ("as it was", "own rules, played again", "other rules")


@click.command(short_help="Try other rules on what a run recorded.")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--rules", "file", type=click.Path(path_type=Path), default=None, help="TOML with a table [rules].")
@click.option(
    "--set", "changes", multiple=True, metavar="KEY=VALUE", help="A rule, such as lag_max=2; goes before the file's."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Picks what the log doesn't know; 0 by default.")
@click.option("--json", "as_json", is_flag=True, help="JSON instead of text.")
def whatif(run: Path, file: Path | None, changes: tuple[str, ...], seed: int, as_json: bool) -> None:
    """Play other rules over what RUN recorded, and set what comes of it beside what was.

    Rules that aren't given are the run's own. Kept as they were: how long sessions took and how they ended, their
    metrics and tokens, and what the trainer did how long after what. Made anew: what is submitted, evicted, refilled
    and sampled, and how long the trainer waits. Prompts beyond those of the log, and sessions that were cut off, are
    drawn from the log, and counted: the figures are then an estimate. The run's own rules are played too, as a check.

    A selection rule of yours that was in the script that was run, so that the log names it __main__:rule, is named anew
    by --set selection=train:rule or path/to/train.py:rule; the check is played with it too if it has the same name.

    \b
    Examples:
      groupstate whatif runs/demo --set lag_max=1
      groupstate whatif runs/demo --rules other.toml --set mode=sync
      groupstate whatif runs/demo --set filter_metric=reward --json
    """
    if file is None and not changes:
        raise BadInput("no other rules are given; use --rules FILE or --set KEY=VALUE")
    compare = importlib.import_module("groupstate.simulate.whatif.compare")
    table: dict[str, Any] = {} if file is None else read_settings(file).rules
    table = {**table, **parsed_assignments(changes, "--set")}
    found = compare.what_if(
        records_of(run, first_of(run)), lambda own: rules_from_dict({**own.to_dict(), **table}), seed=seed
    )
    with while_read():
        if as_json:
            write_json(_as_object(found))
        else:
            _write(found, table)


def _as_object(found: "WhatIf") -> dict[str, Any]:
    shown = {name: _figures(getattr(found, name)) for name in ("recorded", "replayed", "other")}
    rest = {name: getattr(found, name) for name in ("parted", "unchecked", "stand_in", "stopped", "made_up", "until")}
    return {**shown, "rules": found.rules.to_dict(), **rest}


def _figures(figures: "Figures | None") -> dict[str, Any] | None:
    if figures is None:
        return None
    return {**attrs.asdict(figures), "reasons": dict(sorted(figures.reasons.items())), "waste": figures.waste}


def _write(found: "WhatIf", table: dict[str, Any]) -> None:
    changed = ", ".join(f"{name} {_was(found.own, name)} -> {value}" for name, value in table.items())
    sides = (found.recorded, found.replayed, found.other)
    reasons = sorted({reason for side in sides if side is not None for reason in side.reasons})
    tells: list[tuple[str, Tell]] = [
        *ROWS[:3],
        *((f"... {reason}", functools.partial(_evicted, reason)) for reason in reasons),
        *ROWS[3:],
    ]
    rows = [(title, *("-" if side is None else tell(side) for side in sides)) for title, tell in tells]
    write_sections([Section("what if", (changed, *COLUMNS), rows)])
    write(f"as a check: {_check(found)}")
    if found.until:
        write(f"left out: the end of the log, from where {found.until}")
    if found.stopped:
        write(f"the other rules stop early: {found.stopped}")
    write("assumed: sessions take as long however many run at once; other batches make no other weights")
    made_up = ", ".join(f"{count:,} {kind}" for kind, count in found.made_up.items())
    write(f"made up for the other rules: {made_up or 'nothing, so under these assumptions they are exact'}")


def _was(own: Rules, name: str) -> Any:
    return own.to_dict().get(name)


def _check(found: "WhatIf") -> str:
    if found.unchecked:
        return f"left out, since the run's own rules can't be played: {found.unchecked}"
    own = f"the run's own rules{f' (with {found.stand_in})' if found.stand_in else ''}, played again"
    if found.is_exact:
        return f"{own}, decide everything as the log says"
    return f"{own}, part from the log: {found.parted}"


def _evicted(reason: str, side: "Figures") -> str:
    return f"{side.reasons[reason]:,}"


def _share(side: "Figures") -> str:
    return f"{side.tokens_thrown:,} ({side.waste:.0%})"


ROWS: tuple[tuple[str, Tell], ...] = (
    ("groups submitted", lambda side: f"{side.groups:,}"),
    ("... as refills", lambda side: f"{side.refills:,}"),
    ("groups evicted", lambda side: f"{side.evicted:,}"),
    ("refills forfeited", lambda side: f"{side.forfeited:,}"),
    ("groups requeued", lambda side: f"{side.requeued:,}"),
    ("batches", lambda side: f"{side.batches:,}"),
    ("groups in them", lambda side: f"{side.trained_groups:,}"),
    ("lag of these, mean", lambda side: f"{side.lag_mean:.2f}"),
    ("lag of these, most", lambda side: f"{side.lag_max:,}"),
    ("groups left over", lambda side: f"{side.left:,}"),
    ("tokens generated", lambda side: f"{side.tokens_generated:,}"),
    ("tokens trained", lambda side: f"{side.tokens_trained:,}"),
    ("tokens thrown away", _share),
    ("trainer waited", lambda side: span_of(side.waited_s)),
    ("longest wait", lambda side: span_of(side.longest_wait_s)),
    ("took", lambda side: span_of(side.elapsed_s)),
)
