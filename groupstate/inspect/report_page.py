"""The page as one HTML file: its parts, the data, and a policy that forbids it everything else.

Rule 1: nothing of a run is ever part of the markup: it is in the compressed data, and the script sets it as text.
Rule 2: the policy names the one script and the one style by their hashes, and no place to load anything from.
"""

import base64
import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from importlib import resources
from typing import Any, Final

import attrs

from groupstate.core.invariants import INVARIANTS
from groupstate.core.rules import Rules
from groupstate.errors import GroupstateError
from groupstate.inspect.checking import Checked
from groupstate.inspect.checking_apart import checking
from groupstate.inspect.report import CAUSES, OUTCOMES, PHASES, REASONS, TURNS, Gathered
from groupstate.inspect.report_prompts import PromptReader
from groupstate.inspect.report_tables import Packed
from groupstate.log.collection import without_collection
from groupstate.log.disk import OsDisk
from groupstate.log.reading import beginning, durable_stop, read_log
from groupstate.log.rundir import RunDir, read_run_info
from groupstate.version import VERSION

FORM: Final = 1
"""Of the data: the script and what it is given belong together."""

SCRIPTS: Final = ("data.js", "state.js", "show.js", "charts.js", "groups.js", "group.js", "main.js")
LIBRARY: Final = "uplot/uPlot.iife.min.js"
LICENCE: Final = "uplot/LICENSE"
STYLES: Final = ("uplot/uPlot.min.css", "page.css")

VIOLATIONS_SHOWN_MAX: Final = 200


@attrs.frozen
class Notice:
    """Something that a reader must know before he believes the page."""

    kind: str
    """`damaged`, `gone`, `empty`, `left_out`."""
    text: str


@attrs.frozen
class Verdict:
    """What the invariants say."""

    state: str
    """`well`, `wrong`, `checking`, or `open`: not to be had."""
    text: str
    found: tuple[tuple[int, int, str, str], ...] = ()
    """Invariant, event, group, sentence."""


NOT_CHECKED: Final = Verdict("open", "Not checked: groupstate check does it.")
UNREADABLE: Final = Verdict("open", "The log can't be read to its end, so it can't be checked.")


@attrs.frozen
class Report:
    """A run as the page has it."""

    gathered: Gathered
    tables: Packed
    """Of `gathered`."""
    prompts: tuple[str | None, ...]
    """By group."""
    verdict: Verdict
    notices: tuple[Notice, ...]

    @property
    def well(self) -> bool:
        return self.verdict.state != "wrong" and all(notice.kind != "damaged" for notice in self.notices)

    def html(self, name: str = "") -> str:
        """The page, with all that it shows.

        Args:
            name: what to call the run.
        """
        meta = meta_of(self.gathered, self.verdict, self.notices, name=name)
        return page_html(self.tables.beside({**meta, **texts_of(self.gathered, 0, self.prompts)}))


def report(run: str | os.PathLike[str], *, prompts: bool = True, check: bool = True) -> Report:
    """Read a run directory for the page. What is damaged ends the page there, and the page says so.

    Args:
        prompts: with the beginnings of the prompts that can still be read.
        check: hold the log against the invariants too, which is three times as much work as the rest; of a long log two
            other processes do it (`checking`).

    Raises:
        NotARun: `run` is no run directory.
    """
    read_run_info(OsDisk(), RunDir.at(run))
    try:
        base, start = beginning(run)
    except GroupstateError as error:
        nothing = Gathered()
        return Report(nothing, Packed(nothing.since(0)), (), UNREADABLE, (Notice("damaged", str(error)),))
    gathered, notices = Gathered(base), list[Notice]()
    with ExitStack() as stack:
        stack.enter_context(without_collection())
        stop = durable_stop(run)
        result = stack.enter_context(checking(run, stop=stop)) if check else None
        try:
            gathered.feed(read_log(run, start, stop))
        except GroupstateError as error:
            notices.append(Notice("damaged", str(error)))
        tables = Packed(gathered.since(0))
        texts = PromptReader(run).texts(gathered.prompts) if prompts else []
        verdict = UNREADABLE if notices else NOT_CHECKED
        if result is not None and gathered.last_seq and not notices:
            verdict = verdict_of(result())
    return Report(gathered, tables, tuple(texts), verdict, (*notices, *notices_of(gathered)))


def notices_of(gathered: Gathered) -> Iterator[Notice]:
    if not gathered.last_seq:
        yield Notice("empty", "This run has no event yet. There is nothing to show until its first one is durable.")
    if gathered.first_seq:
        yield Notice(
            "gone",
            f"The events up to {gathered.first_seq} are gone (keep_log). The page begins there, with the groups that a "
            "snapshot has; of what came before only the totals are known.",
        )
    if gathered.attempts.left_out:
        names = sorted(gathered.attempts.left_out)
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        yield Notice("left_out", f"Metrics beyond the first few aren't on this page: {', '.join(names[:5])}{more}.")


def verdict_of(seen: Checked) -> Verdict:
    found = tuple((v.invariant, v.seq, v.group_id, v.text) for v in seen.violations[:VIOLATIONS_SHOWN_MAX])
    if not found:
        return Verdict("well", f"{seen.verdict}.")
    count = len(seen.violations)
    more = f", the first {len(found)} are listed" if count > len(found) else ""
    return Verdict("wrong", f"{count} {'thing is' if count == 1 else 'things are'} wrong with this log{more}.", found)


def meta_of(gathered: Gathered, verdict: Verdict, notices: Iterable[Notice], *, name: str = "") -> dict[str, Any]:
    """All that isn't a table."""
    defaults = Rules().to_dict()
    own = {key: value for key, value in gathered.rules.items() if key not in defaults or value != defaults[key]}
    return {
        "form": FORM,
        "name": name,
        "run_id": gathered.run_id,
        "library": gathered.library,
        "made_by": VERSION,
        "rules": own,
        "closed": gathered.closed,
        "openings": gathered.openings,
        "source_exhausted": gathered.source_exhausted,
        "held": gathered.held_reason,
        "version": gathered.weight_version,
        "lineage": gathered.lineage,
        "first_seq": gathered.first_seq,
        "last_seq": gathered.last_seq,
        "origin_ms": gathered.origin_ms,
        "made_ms": time.time_ns() // 1_000_000,
        "last_ms": gathered.last_at_ns / 1e6,
        "totals": dict(sorted(gathered.totals.items())),
        "waiting": gathered.waiting(),
        "open": gathered.under_way(),
        "partitions": gathered.partitions,
        "datasets": gathered.datasets,
        "metrics": list(gathered.attempts.metrics),
        "phases": PHASES,
        "outcomes": OUTCOMES,
        "reasons": REASONS,
        "causes": CAUSES,
        "turns": TURNS,
        "verdict": attrs.asdict(verdict),
        "invariants": {str(number): text for number, text in INVARIANTS.items()},
        "notices": [attrs.asdict(notice) for notice in notices],
    }


def texts_of(gathered: Gathered, seq: int, prompts: Iterable[str | None]) -> dict[str, Any]:
    """Texts of what came after event `seq`: group ids, what else the tables point to, prompts."""
    count = len(gathered.groups.since(seq)["seq"])
    ids = gathered.group_ids
    return {"ids": ids[len(ids) - count :], "texts": gathered.texts.since(seq), "prompts": list(prompts)}


# HTML -----------------------------------------------------------------------------------------------------


def page_html(data: bytes = b"", *, live: bool = False) -> str:
    """
    Args:
        data: what `Packed` gave; nothing where the page asks its server for it.
        live: it asks its server, which then is the one place that it may connect to.
    """
    script, style = _script(), _style()
    policy = "; ".join(f"{name} {value}" for name, value in policy_of(script, style, live=live).items())
    encoded = base64.b64encode(data).decode()
    parts = {"POLICY": policy, "STYLE": style, "DATA": encoded, "SCRIPT": script, "LIVE": "yes" if live else "no"}
    html = _asset("page.html")
    for name, text in parts.items():
        html = html.replace(f"@@{name}@@", text, 1)
    return html


def policy_of(script: str, style: str, *, live: bool) -> Mapping[str, str]:
    """The content security policy."""
    return {
        "default-src": "'none'",
        "script-src": _hash(script),
        "style-src": _hash(style),
        "connect-src": "'self'" if live else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }


def _script() -> str:
    licence = _asset(LICENCE).replace("*/", "* /")
    own = "\n".join(_asset(name) for name in SCRIPTS)
    return f"/*\nuPlot\n\n{licence}*/\n{_asset(LIBRARY)}\n(function () {{\n'use strict';\n{own}\n}})();\n"


def _style() -> str:
    return "\n".join(_asset(name) for name in STYLES)


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _asset(name: str) -> str:
    return resources.files("groupstate.inspect").joinpath("page", *name.split("/")).read_text(encoding="utf-8")
