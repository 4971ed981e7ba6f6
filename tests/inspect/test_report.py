"""What the page shows of a run, as tables; and the page itself, as far as no browser is needed."""

import base64
import hashlib
import json
import re
import shutil
import struct
import zlib
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import groupstate as gs
from groupstate.cli import main as command_line
from groupstate.core import events as ev
from groupstate.core.rules import RULES_VERSION
from groupstate.errors import LogError, NotARun
from groupstate.inspect.overview import overview
from groupstate.inspect.report import METRICS_MAX, OUTCOMES, PHASES, Gathered
from groupstate.inspect.report_page import page_html, report
from groupstate.inspect.report_prompts import PROMPT_CHARS_MAX, PromptReader
from groupstate.inspect.report_tables import Packed
from groupstate.log.file import FileLog
from groupstate.log.reading import beginning, read_log
from groupstate.simulate.loop import VirtualLoop, run_virtual
from groupstate.testing import strategies
from tests.histories import make

GOLDEN = make.golden_logs()

WIDTHS = {"B": 1, "H": 2, "I": 4, "q": 8, "d": 8}


def unpacked(data: bytes) -> tuple[dict[str, Any], dict[str, dict[str, list[Any]]]]:
    """What the page makes of `Packed`: the header, and the columns of each table."""
    raw = zlib.decompress(data)
    (length,) = struct.unpack("<I", raw[-4:])
    header, at = json.loads(raw[-4 - length : -4]), 0
    tables: dict[str, dict[str, list[Any]]] = {}
    for table, columns in header["tables"].items():
        tables[table] = {}
        for name, code, count, rising in columns:
            width = WIDTHS[code]
            by_place = raw[at : at + count * width]
            at += count * width
            values = array(code, bytes(by_place[place * count + row] for row in range(count) for place in range(width)))
            numbers = list(values)
            for row in range(1, count if rising else 0):
                numbers[row] += numbers[row - 1]
            tables[table][name] = numbers
    assert at == len(raw) - 4 - length
    return header, tables


def data_of(html: str) -> bytes:
    (encoded,) = re.findall(r'<script type="application/octet-stream" id="data">([^<]*)</script>', html)
    return base64.b64decode(encoded)


def present(counts: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count}


def live_phases(gathered: Gathered) -> dict[str, dict[str, int]]:
    gone = ("evicted", "committed")
    counts = {
        partition: present({phase: count for phase, count in found.items() if phase not in gone})
        for partition, found in gathered.phase_counts().items()
    }
    return {partition: found for partition, found in counts.items() if found}


def assert_as_shown(gathered: Gathered, seen: Any) -> None:
    """The page counts what `groupstate show` counts."""
    phases = {part.partition: present(part.phases) for part in seen.partitions}

    assert present(gathered.totals) == present(seen.totals)
    assert live_phases(gathered) == {name: found for name, found in phases.items() if found}
    assert (gathered.weight_version, gathered.lineage) == (seen.header.weight_version, seen.header.lineage)
    assert (gathered.closed, gathered.openings) == (seen.header.closed, seen.header.openings)
    assert (gathered.source_exhausted, gathered.held_reason) == (
        seen.header.source_exhausted,
        seen.header.admission_held,
    )
    assert [(partition, size) for _, partition, size in gathered.waiting()] == [
        (partition, size) for _, partition, size, _ in seen.requests
    ]


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.name)
def test_totals_and_phases_are_those_of_show(path: Path) -> None:
    (base, start), (again, _) = beginning(path), beginning(path)

    assert_as_shown(Gathered(base).feed(read_log(path, start)), overview(read_log(path, start), None, again))


@given(strategies.logs())
def test_totals_and_phases_are_those_of_show_in_any_history(records: list[ev.Record]) -> None:
    assert_as_shown(Gathered().feed(records), overview(records))


@given(strategies.logs(), st.data())
def test_what_came_since_an_event_completes_what_was_there(records: list[ev.Record], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(records)), label="events known")
    early, whole = Gathered().feed(records[:cut]), Gathered().feed(records[:cut])
    known = {name: {key: list(col) for key, col in cols.items()} for name, cols in early.since(0).items()}
    whole.feed(records[cut:])
    at_once = Gathered().feed(records)

    for name, columns in at_once.since(0).items():
        late = whole.since(cut)[name] if cut else whole.since(0)[name]
        before = known[name] if cut else {}
        for key, column in columns.items():
            rest = list(late[key])
            padded = before.get(key, [float("nan")] * (len(column) - len(rest)))
            assert [repr(value) for value in [*padded, *rest]] == [repr(value) for value in column], (name, key)
    texts = early.texts.since(0) if cut else []
    assert texts + whole.texts.since(cut) == at_once.texts.since(0)


@given(strategies.logs())
def test_what_is_packed_comes_out_again(records: list[ev.Record]) -> None:
    gathered = Gathered().feed(records)
    header, tables = unpacked(Packed(gathered.since(0)).beside({"name": "<&\u2028"}))

    assert header["name"] == "<&\u2028"
    assert {name: {key: [repr(value) for value in column] for key, column in columns.items()}
            for name, columns in gathered.since(0).items()} == {
        name: {key: [repr(value) for value in column] for key, column in columns.items()}
        for name, columns in tables.items()
    }  # fmt: skip


def records(*events: ev.AnyEvent) -> list[ev.Record]:
    first = ev.RunStarted("r", {}, RULES_VERSION, 0, library="0.1")
    return [ev.Record(seq, seq * 1_000_000_000, event) for seq, event in enumerate([first, *events], 1)]


def whole(name: str, partition: str = ev.TRAIN) -> list[ev.AnyEvent]:
    """A group of one session from submission to its end."""
    row = (ev.TrajectoryRecord(0, {"reward": 1.0}, 1, 5),)
    return [
        ev.GroupSubmitted(name, 1, partition, 0, 1, "submit"),
        ev.SessionStarted(name, 0, 1),
        ev.SessionFinished(name, 0, 1, row),
        ev.GroupFinished(name),
    ]


def trained(name: str, batch: int, *, partition: str = ev.TRAIN) -> list[ev.AnyEvent]:
    return [
        ev.BatchRequested(batch, partition, 1, 0),
        ev.BatchSampled(batch, batch, partition, (name,), 0, (0,)),
        ev.BatchCommitted(batch),
    ]


FAILED = [
    ev.GroupSubmitted("f", 1, ev.VALIDATION, 0, 1, "submit"),
    ev.SessionFailed("f", 0, 1, "error"),
    ev.GroupFailed("f"),
]


@pytest.mark.parametrize(
    "events",
    [
        [*whole("a"), ev.GroupEvicted("a", ("stale",), 3, 2), ev.RefillForfeited(5, "full"), *whole("b")],
        [
            *whole("a"),
            *whole("b"),
            ev.CheckpointMarked(1, 0, 1),
            *trained("a", 1),
            ev.CheckpointMarked(2, 0, 1),
            *trained("b", 2),
            ev.RunRewound(2, 14, 0, 2),
        ],
        [ev.BatchRequested(1, ev.TRAIN, 1, 0), ev.RunRecovered({}, RULES_VERSION, 0, 1)],
        [*FAILED, *trained("f", 1, partition=ev.VALIDATION)[:2], ev.BatchReturned(1, "released")],
    ],
    ids=["more forfeited than owed", "gone back to the second mark", "opened again", "a failed group came back"],
)
def test_turns_that_are_rare(events: list[ev.AnyEvent]) -> None:
    assert_as_shown(Gathered().feed(records(*events)), overview(records(*events)))


def test_an_attempt_has_its_beginning_its_end_and_what_came_of_it() -> None:
    row = (ev.TrajectoryRecord(0, {"reward": 0.5}, 3, 40), ev.TrajectoryRecord(1, {"reward": 1.0}, 3, 2))
    gathered = Gathered().feed(
        records(
            ev.GroupSubmitted("a", 3, ev.TRAIN, 0, 1, "submit"),
            ev.SessionStarted("a", 0, 1, "gpu-0"),
            ev.SessionStarted("a", 1, 1),
            ev.SessionFailed("a", 1, 1, "error", "boom", 1.0),
            ev.SessionFinished("a", 0, 1, row),
            ev.SessionStarted("a", 1, 2),
            ev.SessionFailed("a", 2, 1, "cancelled"),
        )
    )
    columns = gathered.attempts.columns
    texts = gathered.texts.texts

    assert [OUTCOMES[outcome] for outcome in columns["outcome"]] == ["error", "finished", "cancelled"]
    assert list(zip(columns["start"], columns["seq"], strict=True)) == [(4, 5), (3, 6), (0, 8)]
    assert (list(columns["again"]), list(columns["rows"]), list(columns["tokens"])) == (
        [1, 0, 0],
        [0, 2, 0],
        [0, 42, 0],
    )
    assert [texts[number] for number in columns["message"]] == ["boom", "", ""]
    assert [texts[number] for number in columns["worker"]] == ["", "gpu-0", ""]
    assert [value for value in gathered.attempts.metrics["reward"] if value == value] == [1.0]
    assert gathered.under_way() == [[0, 1, 2, 7, 0]]


def test_a_group_that_starts_over_ends_its_open_attempts() -> None:
    gathered = Gathered().feed(
        records(
            ev.GroupSubmitted("a", 2, ev.TRAIN, 0, 1, "submit"),
            ev.SessionStarted("a", 0, 1),
            ev.SessionStarted("a", 1, 1),
            ev.GroupRequeued("a", "lost"),
            ev.SessionStarted("a", 0, 2),
        )
    )

    assert [PHASES[phase] for phase in gathered.phases.columns["phase"]] == ["pending", "running", "pending", "running"]
    assert [OUTCOMES[outcome] for outcome in gathered.attempts.columns["outcome"]] == ["requeued", "requeued"]
    assert gathered.under_way() == [[0, 0, 2, 6, 0]]


def test_a_clock_that_was_set_back_stands_still() -> None:
    first = ev.RunStarted("r", {}, RULES_VERSION, 0)
    times = [5_000_000, 9_000_000, 4_000_000, 9_500_000]
    events = [first, *(ev.WeightsPublished(version) for version in (1, 2, 3))]
    gathered = Gathered().feed(
        ev.Record(seq, at_ns, event) for seq, (at_ns, event) in enumerate(zip(times, events, strict=True), 1)
    )

    assert list(gathered.events.columns["at_us"]) == [0, 4_000, 4_000, 4_500]


def test_metrics_beyond_the_bound_are_named() -> None:
    metrics = {f"m{number:02}": 1.0 for number in range(METRICS_MAX + 2)}
    gathered = Gathered().feed(
        records(
            ev.GroupSubmitted("a", 1, ev.TRAIN, 0, 1, "submit"),
            ev.SessionStarted("a", 0, 1),
            ev.SessionFinished("a", 0, 1, (ev.TrajectoryRecord(0, metrics),)),
        )
    )

    assert gathered.attempts.left_out == {"m12", "m13"}


def test_numbers_that_no_run_writes_are_cut_to_what_a_column_holds() -> None:
    gathered = Gathered().feed(
        records(
            ev.GroupSubmitted("a", -1, ev.TRAIN, 2**70, 1, "submit"),
            ev.SessionStarted("a", 70_000, -5),
            ev.SessionFailed("a", 70_000, -5, "error"),
            ev.GroupEvicted("a", ("stale",), 3, 2**40),
        )
    )

    assert list(gathered.groups.columns["size"]) == [0]
    assert list(gathered.groups.columns["stamp"]) == [2**63 - 1]
    assert (gathered.attempts.columns["session"][0], gathered.attempts.columns["attempt"][0]) == (2**16 - 1, 0)
    assert list(gathered.evictions.columns["credit"]) == [2**32 - 1]


def test_a_log_that_no_run_wrote_ends_where_it_can_not_be_followed() -> None:
    gathered = Gathered()

    with pytest.raises(LogError, match=r"event 3 \(GroupFinished\) can't follow"):
        gathered.feed(records(ev.WeightsPublished(1), ev.GroupFinished("nobody")))
    assert (gathered.last_seq, gathered.weight_version) == (2, 1)


# Prompts --------------------------------------------------------------------------------------------------


PROMPTS = [
    "plain",
    [{"role": "system", "content": "be brief"}, {"role": "user", "content": "how many?"}],
    [11, 12, 13],
    {"question": 7},
    "x" * 400,
]


async def _reward(ctx: gs.SessionContext) -> gs.Trajectory:
    return gs.Trajectory(reward=float(ctx.session))


def run_with(path: Path, prompts: list[Any]) -> Path:
    async def main(loop: VirtualLoop) -> None:
        log = FileLog.create(path, inline=True, durability="os", now_ns=loop.clock_ns)
        async with gs.open_run(
            source=prompts, session=_reward, group_size=2, clock_ns=loop.clock_ns, log=log
        ) as run:  # fmt: skip
            await run.commit(await run.sample(len(prompts)))

    run_virtual(main)
    return path


def test_a_prompt_is_told_by_its_beginning(tmp_path: Path) -> None:
    made = report(run_with(tmp_path / "run", PROMPTS))

    assert made.prompts == (
        "plain",
        "how many?",
        "3 token ids: 11 12 13",
        '{"question":7}',
        "x" * PROMPT_CHARS_MAX + "...",
    )


def test_prompts_that_came_later_are_found_where_the_search_had_ended(tmp_path: Path) -> None:
    path = tmp_path / "run"
    refs: list[ev.PayloadRef | None] = []
    found = []

    async def main(loop: VirtualLoop) -> None:
        log = FileLog.create(path, inline=True, durability="os", now_ns=loop.clock_ns)
        async with gs.open_run(session=_reward, group_size=1, clock_ns=loop.clock_ns, log=log) as run:
            reader = PromptReader(path)
            for name in ("first", "second"):
                run.submit(name)
                await run.commit(await run.sample(1))
                refs[:] = Gathered().feed(read_log(path)).prompts
                found.append(reader.texts(refs))

    run_virtual(main)
    assert found == [["first"], ["first", "second"]]


def test_prompts_that_are_gone_are_none(tmp_path: Path) -> None:
    path = run_with(tmp_path / "run", PROMPTS)
    shutil.rmtree(path / "payloads")

    assert set(report(path).prompts) == {None}


# The page -------------------------------------------------------------------------------------------------


HOSTILE = "<script>alert(1)</script><!-- </script> \u2028 <img src=x onerror=alert(2)>"


def test_nothing_of_a_run_is_part_of_the_markup(tmp_path: Path) -> None:
    html = report(run_with(tmp_path / "run", [HOSTILE])).html(HOSTILE)
    header, _ = unpacked(data_of(html))

    assert "alert(" not in html
    assert "onerror" not in html
    assert header["prompts"] == [HOSTILE]
    assert header["name"] == HOSTILE
    assert html.count("<script") == 2


def test_the_policy_names_the_one_script_and_the_one_style_and_nothing_to_load_from(driven: Path) -> None:
    html = report(driven).html()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    rules = dict(part.split(" ", 1) for part in policy.split("; "))

    def hashed(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    assert rules == {
        "default-src": "'none'",
        "script-src": hashed(script),
        "style-src": hashed(style),
        "connect-src": "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    assert not re.findall(r"(?:src|href)=[\"'](?!#)", html)
    assert "Permission is hereby granted" in html, "the licence of the charting library goes with it"


def test_a_page_that_is_served_has_no_data_and_may_ask_its_server() -> None:
    html = page_html(live=True)

    assert data_of(html) == b""
    assert "connect-src 'self'" in html


def test_the_verdict_is_that_of_check(driven: Path, kept: Callable[..., Path]) -> None:
    broken = kept(
        ev.RunStarted("r", {}, RULES_VERSION, 0),
        ev.GroupSubmitted("a", 1, ev.TRAIN, 0, 1, "submit"),
        ev.GroupFinished("a"),
    )

    assert report(driven).verdict.state == "well"
    assert report(driven, check=False).verdict.state == "open"
    found = report(broken)
    assert (found.verdict.state, found.well) == ("wrong", False)
    assert {seq for _, seq, _, _ in found.verdict.found} == {3}


def test_a_damaged_log_is_shown_up_to_the_damage(driven: Path) -> None:
    segment = next((driven / "log").glob("*.seg"))
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 0xFF
    segment.write_bytes(data)
    made = report(driven)

    assert [notice.kind for notice in made.notices] == ["damaged"]
    assert str(segment) in made.notices[0].text
    assert made.gathered.last_seq > 5
    assert (made.verdict.state, made.well) == ("open", False)


def test_a_run_without_an_event_says_so(tmp_path: Path) -> None:
    FileLog.create(tmp_path / "run", inline=True, durability="os")
    made = report(tmp_path / "run")
    header, tables = unpacked(data_of(made.html()))

    assert [notice.kind for notice in made.notices] == ["empty"]
    assert (header["last_seq"], tables["groups"]["seq"]) == (0, [])


def test_a_run_whose_beginning_is_gone_says_so() -> None:
    (path,) = [path for path in GOLDEN if path.name == "compacted"]
    made = report(path)

    assert [notice.kind for notice in made.notices] == ["gone"]
    assert made.gathered.first_seq > 1


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotARun):
        report(tmp_path)


# The command ----------------------------------------------------------------------------------------------


def test_report_writes_the_page(driven: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    done = CliRunner().invoke(command_line, ["report", str(driven), "-o", str(out)])

    assert (done.exit_code, done.stderr) == (0, "")
    assert str(out) in done.stdout
    assert unpacked(data_of(out.read_text()))[0]["name"] == "driven"
    assert list(tmp_path.glob(".*")) == []


def test_report_without_prompts_has_none(tmp_path: Path) -> None:
    run, out = run_with(tmp_path / "run", ["a secret"]), tmp_path / "page.html"
    CliRunner().invoke(command_line, ["report", str(run), "-o", str(out), "--no-prompts"])

    assert unpacked(data_of(out.read_text()))[0]["prompts"] == []


def test_report_of_a_damaged_run_exits_with_1_and_says_where(driven: Path, tmp_path: Path) -> None:
    segment = next((driven / "log").glob("*.seg"))
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 0xFF
    segment.write_bytes(data)
    done = CliRunner().invoke(command_line, ["report", str(driven), "-o", str(tmp_path / "page.html")])

    assert done.exit_code == 1
    assert str(segment) in done.stderr
    assert (tmp_path / "page.html").exists()


def test_report_of_what_is_no_run_exits_with_2_and_writes_nothing(tmp_path: Path) -> None:
    done = CliRunner().invoke(command_line, ["report", str(tmp_path), "-o", str(tmp_path / "page.html")])

    assert done.exit_code == 2
    assert not (tmp_path / "page.html").exists()
