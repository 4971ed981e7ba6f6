"""Hypothesis strategies for what a run is made of: valid by construction, and plain stories when they shrink.

    from groupstate.testing import strategies

    @given(strategies.histories(rules=Rules(lag_max=1)))
    def test_something(history):
        story = history.play()

Rule 1: nothing that is drawn has to be thrown away, but rules that contradict each other.
Rule 2: what is drawn can be read: a history is lines of the notation, and its `repr` the call that plays it.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import attrs

from groupstate.core import events as ev
from groupstate.core.rules import Rules
from groupstate.errors import MissingExtra
from groupstate.testing.moves import Moves
from groupstate.testing.notation import Story, play
from groupstate.testing.plain.run import Row
from groupstate.testing.plain.settings import SETTINGS, rules_of
from groupstate.testing.twin import METRIC, Twin, names, rows_in_words

try:
    from hypothesis import assume
    from hypothesis import strategies as st
except ModuleNotFoundError as error:
    if error.name != "hypothesis":
        raise
    raise MissingExtra("groupstate.testing.strategies", "hypothesis", "testing") from error

T = TypeVar("T")

VALUES: Final = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of the metric, unless others are asked for. Few, so that equal ones and bounds come up."""

PICKS: Final = st.integers(0, 7)


# Rules and outcomes ----------------------------------------------------------------------------------


@st.composite
def rules(draw: st.DrawFn, /, **settings: Any) -> Rules:
    """Rules that don't contradict themselves; the simplest are plain ones with a filter.

    Args:
        settings: these as given, all others random.
    """
    found = rules_of(draw(_NUMBERS), settings)
    assume(found is not None)
    assert found is not None
    return found


_NUMBERS: Final = st.lists(st.integers(0, 2**16 - 1), min_size=SETTINGS, max_size=SETTINGS)


@attrs.frozen
class Outcome:
    """How a session ends, in the notation without its name: `finish {} reward=1`, `fail {} lost retryable`."""

    text: str

    def of(self, session: str) -> str:
        """The line for a session, such as `g1.0`."""
        return self.text.replace("{}", session)

    @property
    def finishes(self) -> bool:
        return self.text.startswith("finish")


def values_lists(values: Sequence[float] = VALUES, *, most: int = 2) -> st.SearchStrategy[list[float]]:
    """Of the metric, one for each trajectory of a session; rarely more than one."""
    one = st.sampled_from(list(values))
    return st.lists(one, min_size=1, max_size=1) | st.lists(one, min_size=1, max_size=most)


def outcomes(
    *, metric: str = METRIC, values: Sequence[float] = VALUES, failures: bool = True
) -> st.SearchStrategy[Outcome]:
    """One session's end.

    Args:
        values: what the metric may be.
        failures: sessions may fail, or return nothing.
    """
    good = values_lists(values).map(
        lambda drawn: Outcome("finish {} " + rows_in_words([Row({metric: value}) for value in drawn]))
    )
    if not failures:
        return good
    kinds = ["fail {}", "fail {} lost", "fail {} timeout", "fail {} error retryable", "finish {} nothing"]
    return good | st.sampled_from(kinds).map(Outcome)


# Histories -------------------------------------------------------------------------------------------


@attrs.frozen(repr=False)
class History:
    """A run in the notation, with what it is played under."""

    lines: tuple[str, ...]
    rules: Rules
    source: tuple[str, ...] | None = None
    admits: bool = False

    def play(self, **options: Any) -> Story:
        """The same on the real ledger and rules.

        Args:
            options: more arguments of `groupstate.testing.notation.play`.
        """
        return play(*self.lines, rules=self.rules, source=self.source, admits=self.admits, **options)

    def __repr__(self) -> str:
        twin = Twin(rules=self.rules, source=self.source, admits=self.admits, real=False)
        told = "".join(f"    {line!r},\n" for line in self.lines)
        return f"play(\n{told}{twin.play_arguments()})"


@attrs.frozen
class Move:
    """One kind of thing that may happen: when it can, and what there is to choose."""

    name: str
    """Of a method of `Moves`."""
    possible: str
    """Of the method that says whether it can happen now."""
    arguments: dict[str, st.SearchStrategy[Any]] = attrs.field(factory=dict)
    weight: int = 1


PARTITIONS: Final = st.sampled_from([ev.TRAIN, ev.TRAIN, ev.TRAIN, ev.VALIDATION])
_DATASETS: Final = st.sampled_from(["", "math", "code"])


def moves(values: Sequence[float] = VALUES, *, lacking: bool = False) -> list[Move]:
    """All of them.

    Args:
        lacking: sessions may return trajectories without the metric, or none.
    """
    rows: st.SearchStrategy[Any] = values_lists(values)
    if lacking:
        rows = rows | st.just([None]) | st.just([])
    group_values = st.lists(st.sampled_from(list(values)), min_size=1, max_size=3)
    return [
        Move("submit", "can_submit", {"size": st.integers(1, 3), "partition": PARTITIONS, "dataset": _DATASETS}, 2),
        Move("finish_group", "can_finish_group", {"pick": PICKS, "values": group_values, "partition": PARTITIONS}, 4),
        Move("start", "can_start", {"pick": PICKS, "alone": st.booleans()}),
        Move("finish", "can_finish", {"pick": PICKS, "values": rows, "versions": VERSIONS}, 2),
        Move("fail", "can_finish", {"pick": PICKS, "kind": FAILURES, "retryable": st.booleans()}),
        Move("fail_group", "can_finish", {"pick": PICKS}),
        Move("late", "can_be_late", {"pick": st.integers(0, 29)}),
        Move("cancel", "can_finish", {"pick": PICKS}),
        Move("requeue", "can_requeue", {"pick": PICKS}),
        Move("publish", "is_alive", {"step": st.sampled_from([1, 2, 0])}, 2),
        Move("wait", "is_alive", {"seconds": SECONDS}),
        Move("sample", "can_sample", {"size": st.integers(1, 3), "partition": PARTITIONS}, 3),
        Move("withdraw", "can_withdraw", {"pick": PICKS}),
        Move("commit", "has_batch", {"pick": PICKS}),
        Move("release", "has_batch", {"pick": PICKS}),
        Move("recover", "can_recover", {"step": STEPS}),
        Move("die", "can_die", {"writes": st.integers(1, 4)}),
    ]


VERSIONS: Final = st.sampled_from([(), (0,), (-1, 0), (1, 0)])
"""Of a trajectory's tokens, as steps from the current version."""
FAILURES: Final = st.sampled_from(["error", "lost"])
SECONDS: Final = st.sampled_from([3.0, 6.0, 1.0])
STEPS: Final = st.sampled_from([0, 1, -1])


@st.composite
def histories(
    draw: st.DrawFn,
    *,
    rules: Rules | st.SearchStrategy[Rules] | None = None,
    source: Sequence[str] | None = (),
    values: Sequence[float] = VALUES,
    moves_min: int = 1,
    moves_max: int = 20,
    dies: bool = True,
) -> History:
    """A run from its first line, under the library's own rules; whatever happens in it can happen.

    The plain model is told each line, so that the next one fits.

    Args:
        rules: one, or a strategy for them; None for `Rules()`.
        source: ids of the groups that refills and admission take; empty for a source of a few or many, None for none.
        values: of the metric that the rules filter by, or of `reward`.
        moves_min, moves_max: how many things happen; most take several lines.
        dies: the process may die and the run be recovered.
    """
    given = Rules() if rules is None else rules if isinstance(rules, Rules) else draw(rules)
    if source is not None and not source:
        source = names(draw(st.sampled_from([100, 3, 8])))
    twin = Twin(rules=given, source=source, admits=draw(st.booleans()) if source is not None else False, real=False)
    teller = Moves(twin, values=values)
    kinds = [move for move in moves(values) for _ in range(move.weight) if dies or move.name not in ("recover", "die")]
    for _ in range(draw(st.integers(moves_min, moves_max))):
        possible = [move for move in kinds if getattr(teller, move.possible)()]
        move = draw(st.sampled_from(possible))
        getattr(teller, move.name)(**{name: draw(strategy) for name, strategy in move.arguments.items()})
    return History(tuple(twin.lines), given, None if source is None else tuple(source), twin.model.admits)


def logs(**options: Any) -> st.SearchStrategy[list[ev.Record]]:
    """The records of such a run.

    Args:
        options: see `histories`.
    """
    return histories(**options).map(lambda history: list(history.play(replays=False).log.read()))


def interleavings(*scripts: Sequence[T]) -> st.SearchStrategy[list[T]]:
    """All the steps of several scripts, each in its own order. The simplest is one script after the other.

    strategies.interleavings(["start a", "finish a reward=1"], ["start b", "fail b"])
    """
    left = [list(script) for script in scripts]

    @st.composite
    def woven(draw: st.DrawFn) -> list[T]:
        rest = [list(script) for script in left]
        out: list[T] = []
        while rest := [script for script in rest if script]:
            out.append(rest[draw(st.integers(0, len(rest) - 1))].pop(0))
        return out

    return woven()


# Events ----------------------------------------------------------------------------------------------

_SMALL: Final = st.integers(0, 5)
_TEXTS: Final = st.sampled_from(["", "told so"]) | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
_FLOATS: Final = st.sampled_from([0.0, 0.5, 1.0]) | st.floats(allow_nan=False, allow_infinity=False)
_IDS: Final = st.sampled_from(["a", "b", "g_1"]) | st.text(
    st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8
)
_REFS: Final = st.builds(ev.PayloadRef, st.integers(1, 9), _SMALL, st.integers(0, 2**32 - 1))
_JSON: Final = st.dictionaries(_TEXTS, st.none() | st.booleans() | _SMALL | _TEXTS, max_size=2)


def spans(tokens: int) -> st.SearchStrategy[tuple[ev.VersionSpan, ...]]:
    """Contiguous, in order, covering all tokens; versions only rise."""

    def cut(bounds: set[int]) -> tuple[ev.VersionSpan, ...]:
        places = [0, *sorted(bounds), tokens]
        return tuple(
            ev.VersionSpan(start, stop, version) for version, (start, stop) in enumerate(itertools.pairwise(places))
        )

    if not tokens:
        return st.just(())
    return st.sets(st.integers(1, tokens - 1), max_size=2).map(cut) if tokens > 1 else st.just(cut(set()))


@st.composite
def _trajectories(draw: st.DrawFn) -> tuple[ev.TrajectoryRecord, ...]:
    rows = []
    for index in range(draw(st.integers(0, 2))):
        tokens = draw(_SMALL)
        metrics = draw(st.dictionaries(st.sampled_from(["reward", "acc"]), _FLOATS))
        rows.append(ev.TrajectoryRecord(index, metrics, draw(_SMALL), tokens, draw(spans(tokens))))
    return tuple(rows)


def _one_of_type(alias: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(list(alias.__args__))


_REASONS: Final = st.lists(_one_of_type(ev.EvictReason), min_size=1, max_size=2, unique=True)

FIELDS: Final[dict[str, st.SearchStrategy[Any]]] = {
    **dict.fromkeys(("run_id", "group_id"), _IDS),
    **dict.fromkeys(("library", "source", "name", "kind", "worker", "message", "reason", "metric", "dataset"), _TEXTS),
    **dict.fromkeys(
        (
            "rules_version", "weight_version", "lineage", "seed", "position", "mark", "mark_seq", "torn_bytes",
            "versions", "open_groups", "evicted", "prompt_length", "oversample", "lag", "credit", "count", "session",
            "batch", "request",
        ),
        _SMALL,
    ),
    **dict.fromkeys(("evicts", "partial", "cancelled", "by_rule", "observed", "validation_round"), st.booleans()),
    **dict.fromkeys(("rules", "details"), _JSON),
    **dict.fromkeys(("prompt", "payload"), st.none() | _REFS),
    "size": st.integers(1, 4),
    "attempt": st.integers(1, 3),
    "partition": st.sampled_from([ev.TRAIN, ev.VALIDATION]),
    "cause": _one_of_type(ev.Cause),
    "source_position": st.integers(-1, 5),
    "target_version": st.none() | _SMALL,
    "reasons": _REASONS.map(lambda reasons: tuple(sorted(reasons))),
    "shared_value": st.none() | _FLOATS,
    "retry_in_s": st.none() | _FLOATS.map(abs),
    "trajectories": _trajectories(),
    "failure": _one_of_type(ev.FailureKind),
    "result": st.sampled_from(["finished", "failed", "started"]),
    "group_ids": st.lists(_IDS, min_size=1, max_size=3, unique=True).map(tuple),
    "lags": st.lists(_SMALL, min_size=1, max_size=3).map(tuple),
}  # fmt: skip
"""What the fields of events hold, by name. A new event's new fields have to be named here."""

OWN_FIELDS: Final[dict[tuple[type[ev.Event], str], st.SearchStrategy[Any]]] = {
    (ev.ResultFenced, "reason"): _one_of_type(ev.FenceReason),
}
"""Where a name means something else in one event."""


def events(*kinds: type[ev.Event]) -> st.SearchStrategy[Any]:
    """One event, whose fields are what such a field may hold; nothing is said of a log in which it could come.

    Args:
        kinds: of these kinds; of every kind without.
    """
    return st.sampled_from(list(kinds or ev.EVENT_TYPES)).flatmap(_event)


def _event(kind: type[ev.Event]) -> st.SearchStrategy[ev.Event]:
    fields = {name: OWN_FIELDS.get((kind, name), FIELDS.get(name)) for name in kind.__struct_fields__}
    missing = [name for name, strategy in fields.items() if strategy is None]
    assert not missing, f"{kind.__name__} has fields that groupstate.testing.strategies.FIELDS doesn't know: {missing}"
    if kind is ev.BatchSampled:
        return _batch_sampled()
    make: Callable[..., ev.Event] = kind
    return st.builds(make, **fields)  # type: ignore[arg-type]


@st.composite
def _batch_sampled(draw: st.DrawFn) -> ev.BatchSampled:
    """One lag for each group."""
    ids = draw(FIELDS["group_ids"])
    lags = draw(st.lists(_SMALL, min_size=len(ids), max_size=len(ids)))
    return ev.BatchSampled(draw(_SMALL), draw(_SMALL), ev.TRAIN, ids, draw(_SMALL), tuple(lags))
