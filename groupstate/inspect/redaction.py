"""What of a run is replaced in a copy that others may see, field by field, and by what.

Rule 1: every field of everything that lies in a log, a snapshot or a payload has a decision here; one without is an
error, never a field that is let through.
Rule 2: the same text gets the same token, and two texts two, so that what depends on texts being equal stays as it is.
Rule 3: numbers, times, and words that the library itself wrote stay: they are what decisions are made of.
"""

import builtins
import hashlib
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias

import attrs
import msgspec
from msgspec.structs import replace

from groupstate import errors
from groupstate.core import events as ev
from groupstate.core.departed import Departed
from groupstate.core.frontier import MIXED
from groupstate.core.group import Group, Session
from groupstate.core.held import DISK_HOLD, Credit, DatasetUse, Mark, OpenBatch, OpenRequest, Window
from groupstate.core.phases import Phase
from groupstate.core.rules import Capacity, PerBatch, PerDataset, Rules, Slots
from groupstate.core.snapshot import BookState, Capture

LONG: Final = 64
"""Texts above this many characters are remembered by their digest."""

Refs: TypeAlias = Mapping[int, tuple[int, int]]
"""By key of a payload: length and crc of what stands in its place."""


def _literals(*hints: Any) -> frozenset[str]:
    """The strings that such types allow by name."""
    found: set[str] = set()
    for hint in hints:
        if typing.get_origin(hint) is typing.Literal:
            found |= {value for value in typing.get_args(hint) if isinstance(value, str)}
        else:
            found |= _literals(*typing.get_args(hint))
    return frozenset(found)


_SETTINGS: Final[tuple[Any, ...]] = (Rules, PerDataset, PerBatch, Slots, Capacity)
_SETTING_NAMES: Final = frozenset(name for kind in _SETTINGS for name in kind.__struct_fields__) | {"kind"}
_SETTING_WORDS: Final = (
    _literals(*(hint for kind in _SETTINGS for hint in typing.get_type_hints(kind).values()))
    | {kind.__struct_config__.tag for kind in (PerBatch, Slots, Capacity)}
    | {"oldest_first", "freshest_first", "exact_version"}
)
_PHASES: Final = frozenset(map(str, Phase))
_REASONS: Final = _literals(ev.EvictReason, ev.FailureKind)

_OWN_GROUP: Final = re.compile(r"g[0-9]{1,15}")
"""Ids that a run makes itself."""
_OWN_RUN: Final = re.compile(r"[0-9a-f]{32}")
_VERSION: Final = re.compile(r"[0-9]+(\.[0-9]+)*((a|b|rc|\.post|\.dev)[0-9]+)*")
_OWN_SOURCES: Final = frozenset({MIXED, "ListSource", "IteratorSource", "FunctionSource"})
_SOURCE_NAMES: Final = frozenset({"size", "epochs", "shuffle_seed", "name", "kind"})
_TOTALS: Final = frozenset(
    (
        *("submitted", "refills", "drawn", "evicted", "credit", "fenced", "sessions_finished", "response_tokens"),
        *("forfeited", "batches", "batches_returned", "committed", "batches_committed", "starved", "sampled"),
    )
)

_NUMBER: Final = r"[0-9.e+-]+"
_OWN_TEXTS: Final = re.compile(
    "|".join(
        (
            "cancelled|damaged|recovery|released|closed|batch full|source exhausted|admission|no source|source failed",
            "it came without a place, or with another size|a group in flight is at the lag bound",
            "the session cancelled itself|SIG[A-Z]{1,8}|its prompt was dispatched anew outside",
            rf"no result within session_deadline_s {_NUMBER}|the group did not end within group_deadline_s {_NUMBER}",
            rf"it ignored its cancellation for {_NUMBER} s|it ended behind mark {_NUMBER}, which the run went back to",
        )
    )
)
"""Texts that the library writes, and in which nothing of a user's is."""
_RUN_CLOSED: Final = "the run closed: "

_KNOWN_ERRORS: Final = frozenset(
    name
    for module in (builtins, errors)
    for name, value in vars(module).items()
    if isinstance(value, type) and issubclass(value, BaseException)
) | {"RetryableError"}


class Redactor:
    """Replaces what may tell something of a user, the same each time."""

    def __init__(self, refs: Refs) -> None:
        self._refs = refs
        self._tokens: dict[str, dict[str | bytes, str]] = {}

    def event(self, event: Any) -> Any:
        """An event of any kind."""
        return self._struct(event)

    def replaced(self) -> dict[str, int]:
        """How many different texts were replaced, by what they were."""
        return {what: len(tokens) for what, tokens in sorted(self._tokens.items())}

    def token(self, what: str, text: str) -> str:
        """Stands for a text; an empty one stays."""
        if not text:
            return ""
        key = text if len(text) <= LONG else hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
        tokens = self._tokens.setdefault(what, {})
        found = tokens.get(key)
        if found is None:
            found = tokens[key] = f"{what}-{len(tokens) + 1}"
        return found

    def _struct(self, value: Any) -> Any:
        """A struct or a class of ours, each of its fields as was decided."""
        actions = _ACTIONS[type(value)]
        changes = {name: action(self, getattr(value, name)) for name, action in actions}
        if not changes:
            return value
        return replace(value, **changes) if isinstance(value, msgspec.Struct) else attrs.evolve(value, **changes)

    # Values of a kind --------------------------------------------------------------------------------

    def group(self, group_id: str) -> str:
        return group_id if _OWN_GROUP.fullmatch(group_id) else self.token("group", group_id)

    def groups(self, ids: Iterable[str]) -> tuple[str, ...]:
        return tuple(map(self.group, ids))

    def dataset(self, name: str) -> str:
        return self.token("dataset", name)

    def partition(self, name: str) -> str:
        return name if name in (ev.TRAIN, ev.VALIDATION) else self.token("partition", name)

    def metric(self, name: str) -> str:
        return name if name == "reward" else self.token("metric", name)

    def metrics(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {self.metric(name): value for name, value in values.items()}

    def metric_names(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(map(self.metric, names))

    def worker(self, name: str) -> str:
        return self.token("worker", name)

    def mark(self, name: str) -> str:
        return self.token("mark", name)

    def source(self, name: str) -> str:
        return self.token("source", name)

    def run_id(self, name: str) -> str:
        return name if _OWN_RUN.fullmatch(name) else self.token("run", name)

    def library(self, version: str) -> str:
        return version if _VERSION.fullmatch(version) else self.token("library", version)

    def source_kind(self, name: str) -> str:
        return name if name in _OWN_SOURCES else self.token("source-class", name)

    def reason(self, text: str) -> str:
        """Why something was done: the library's own words, or a user's."""
        if _OWN_TEXTS.fullmatch(text) or text in _KNOWN_ERRORS:
            return text
        for prefix in (_RUN_CLOSED, DISK_HOLD):
            if text.startswith(prefix):
                return prefix + self.reason(text.removeprefix(prefix))
        return self.token("reason", text)

    def failure(self, text: str) -> str:
        """A failure's text. The kind of an exception stays where it is Python's or the library's own."""
        if _OWN_TEXTS.fullmatch(text):
            return text
        kind, colon, _ = text.partition(": ")
        token = self.token("error", text)
        return f"{kind}: {token}" if colon and kind in _KNOWN_ERRORS else token

    def ref(self, ref: ev.PayloadRef | None) -> ev.PayloadRef | None:
        """A payload's place. What stands there now has another checksum; of one that is gone, none is told."""
        if ref is None:
            return None
        length, crc = self._refs.get(ref.key, (ref.length, 0))
        return ev.PayloadRef(ref.key, length, crc)

    def rows(self, rows: Iterable[ev.TrajectoryRecord]) -> tuple[ev.TrajectoryRecord, ...]:
        return tuple(map(self._struct, rows))

    # Data --------------------------------------------------------------------------------------------

    def rules(self, value: Any, name: str = "") -> Any:
        """The settings of a run: names and words that the library knows stay."""
        if isinstance(value, dict):
            if name == "datasets":
                return {self.dataset(key): self.rules(item) for key, item in value.items()}
            return {
                key if key in _SETTING_NAMES else self.token("setting", key): self.rules(item, key)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.rules(item) for item in value]
        if isinstance(value, str):
            if name == "filter_metric":
                return self.metric(value)
            if value in _SETTING_WORDS:
                return value
            return f"redacted:{self.token('selection', value)}" if name == "selection" else self.token("value", value)
        return self.plain(value)

    def details(self, value: dict[str, Any]) -> dict[str, Any]:
        """What a source says of itself; of a mixed one, by dataset."""
        mixed = bool(value) and all(isinstance(item, dict) and "kind" in item for item in value.values())
        if mixed:
            return {self.dataset(name): self.details(item) for name, item in value.items()}
        known = {"name": self.source, "kind": self.source_kind}
        return {
            key if key in _SOURCE_NAMES else self.token("key", key): known[key](item)
            if key in known and isinstance(item, str)
            else self.plain(item)
            for key, item in value.items()
        }

    def plain(self, value: Any) -> Any:
        """Any plain data: numbers stay."""
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, dict):
            return {self.token("key", str(key)): self.plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.plain(item) for item in value]
        return self.token("value", str(value))

    # Of a snapshot -----------------------------------------------------------------------------------

    def capture(self, taken: Capture) -> Capture:
        """A book as a snapshot has it."""
        return Capture(
            self._struct(taken.state),
            [self._struct(group) for group in taken.groups],
            [self._struct(group) for group in taken.aside],
            self.departed(taken.departed),
        )

    def departed(self, left: Departed) -> Departed:
        made = Departed()
        made.update(zip(self.groups(left), left.values(), strict=True))
        return made

    def structs(self, values: Iterable[Any]) -> list[Any]:
        return [self._struct(value) for value in values]

    def kept(self, kept: tuple[Session, ...] | bytes) -> tuple[Session, ...] | bytes:
        """The sessions of a group, packed or not."""
        if isinstance(kept, bytes):
            return _ENCODE(tuple(map(self._struct, _SESSIONS.decode(kept))))
        return tuple(map(self._struct, kept))

    def opened(self, event: ev.SourceOpened | None) -> ev.SourceOpened | None:
        return None if event is None else self._struct(event)

    def by_dataset(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {self.dataset(name): value for name, value in values.items()}

    def dataset_counts(self, values: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
        return {self.dataset(name): self.totals(counts) for name, counts in values.items()}

    def uses(self, values: Mapping[str, DatasetUse]) -> dict[str, DatasetUse]:
        return {self.dataset(name): self._struct(use) for name, use in values.items()}

    def totals(self, counts: Mapping[str, int]) -> dict[str, int]:
        return {self._total(name): count for name, count in counts.items()}

    def _total(self, name: str) -> str:
        what, slash, rest = name.partition("/")
        if what == "committed" and slash:
            return f"{what}/{self.partition(rest)}"
        known = what in ("evicted", "session_failed") and rest in _REASONS if slash else name in _TOTALS
        return name if known else self.token("total", name)

    def reason_counts(self, counts: Mapping[str, int]) -> dict[str, int]:
        return {name if name in _REASONS else self.token("total", name): count for name, count in counts.items()}

    def windows(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {self.partition(name): self.window(fields) for name, fields in values.items()}

    def windows_out(self, values: Mapping[int, Any]) -> dict[int, Any]:
        return {batch: self.window(fields) for batch, fields in values.items()}

    def window(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """A window's fields by name; those that this version doesn't know are left out."""
        decided = DECISIONS[Window]
        return {
            name: value if decided[name] is None else decided[name](self, value)
            for name, value in fields.items()
            if name in decided
        }

    def committed_at(self, places: Iterable[tuple[int, str]]) -> list[tuple[int, str]]:
        return [(seq, self.group(group_id)) for seq, group_id in places]

    def phases(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {
            self.partition(name): {phase: places for phase, places in by_phase.items() if phase in _PHASES}
            for name, by_phase in values.items()
        }


_ENCODE: Final = msgspec.msgpack.Encoder().encode
_SESSIONS: Final = msgspec.msgpack.Decoder(tuple[Session, ...])

Action: TypeAlias = Callable[[Redactor, Any], Any]

R: Final = Redactor
KEPT: Final = None
"""The field stays as it is: a number, or a word from a list that the decoder holds it to."""

DECISIONS: Final[dict[type, dict[str, Any]]] = {
    ev.RunStarted: {
        "run_id": R.run_id,
        "rules": R.rules,
        "library": R.library,
        **dict.fromkeys(("rules_version", "weight_version", "lineage", "seed")),
    },
    ev.WeightsPublished: dict.fromkeys(("weight_version", "lineage")),
    ev.SourceExhausted: {"source": R.source, "position": KEPT},
    ev.AdmissionHeld: {"reason": R.reason},
    ev.CheckpointMarked: {"name": R.mark, **dict.fromkeys(("mark", "weight_version", "lineage"))},
    ev.RunRecovered: {
        "rules": R.rules,
        "library": R.library,
        **dict.fromkeys(("rules_version", "weight_version", "lineage", "torn_bytes")),
    },
    ev.RunRewound: dict.fromkeys(("mark", "mark_seq", "weight_version", "lineage", "evicts")),
    ev.RunClosed: {"reason": R.reason},
    ev.DatasetStarved: {"dataset": R.dataset, **dict.fromkeys(("versions", "open_groups", "evicted"))},
    ev.SourceOpened: {"name": R.source, "kind": R.source_kind, "details": R.details},
    ev.GroupSubmitted: {
        "group_id": R.group,
        "partition": R.partition,
        "dataset": R.dataset,
        "prompt": R.ref,
        **dict.fromkeys(("size", "weight_version", "lineage", "cause", "source_position", "prompt_length")),
        **dict.fromkeys(("target_version", "oversample", "validation_round")),
    },
    ev.GroupFinished: {"group_id": R.group, "partial": KEPT},
    ev.GroupFailed: {"group_id": R.group, "cancelled": KEPT},
    ev.GroupEvicted: {
        "group_id": R.group,
        "metric": R.metric,
        "message": R.reason,
        **dict.fromkeys(("reasons", "lag", "credit", "shared_value")),
    },
    ev.GroupRequeued: {"group_id": R.group, "reason": R.reason, "by_rule": KEPT, "weight_version": KEPT},
    ev.RefillForfeited: {"count": KEPT, "reason": R.reason},
    ev.SessionStarted: {
        "group_id": R.group,
        "worker": R.worker,
        **dict.fromkeys(("session", "attempt", "weight_version", "observed")),
    },
    ev.SessionFinished: {
        "group_id": R.group,
        "trajectories": R.rows,
        "payload": R.ref,
        **dict.fromkeys(("session", "attempt", "observed")),
    },
    ev.SessionFailed: {
        "group_id": R.group,
        "message": R.failure,
        **dict.fromkeys(("session", "attempt", "failure", "retry_in_s", "observed")),
    },
    ev.ResultFenced: {"group_id": R.group, **dict.fromkeys(("session", "attempt", "result", "reason"))},
    ev.BatchRequested: {"partition": R.partition, **dict.fromkeys(("request", "size", "weight_version"))},
    ev.BatchRequestCancelled: {"request": KEPT, "reason": R.reason},
    ev.BatchSampled: {
        "partition": R.partition,
        "group_ids": R.groups,
        **dict.fromkeys(("batch", "request", "weight_version", "lags")),
    },
    ev.BatchCommitted: {"batch": KEPT},
    ev.BatchReturned: {"batch": KEPT, "reason": R.reason},
    # Parts of events
    ev.TrajectoryRecord: {
        "metrics": R.metrics,
        "not_finite": R.metric_names,
        **dict.fromkeys(("index", "prompt_tokens", "response_tokens", "spans", "environment")),
    },
    ev.VersionSpan: dict.fromkeys(("start", "stop", "weight_version")),
    # Of a snapshot
    Group: {
        "group_id": R.group,
        "partition": R.partition,
        "dataset": R.dataset,
        "prompt": R.ref,
        "kept": R.kept,
        "session_ranges": R.metrics,
        "trajectory_ranges": R.metrics,
        **dict.fromkeys(("size", "phase", "stamp", "version", "aged_from", "submitted_seq", "submitted_at_ns")),
        **dict.fromkeys(("cause", "source_position", "prompt_length", "target_version", "settled_count")),
        **dict.fromkeys(("finished_count", "trajectory_count", "terminal", "terminal_seq", "partial", "cancelled")),
        **dict.fromkeys(("requeue_count", "rule_requeue_count", "oversample", "kept_empty", "rewound_to", "batch")),
        **dict.fromkeys(("sampled_lag", "kept_lag", "ended_version", "last_seq", "last_at_ns", "validation_round")),
    },
    Session: {
        "trajectories": R.rows,
        "payload": R.ref,
        "message": R.failure,
        **dict.fromkeys(("state", "attempt", "failure", "started_at_ns", "ended_at_ns", "last_seq")),
        **dict.fromkeys(("weight_version", "first_attempt")),
    },
    BookState: {
        "run_id": R.run_id,
        "library": R.library,
        "rules": R.rules,
        "source_positions": R.by_dataset,
        "source": R.opened,
        "held_reason": R.reason,
        "requests": R.structs,
        "batches": R.structs,
        "credits": R.structs,
        "marks": R.structs,
        "windows": R.windows,
        "windows_out": R.windows_out,
        "totals": R.totals,
        "datasets": R.dataset_counts,
        "uses": R.uses,
        "committed_at": R.committed_at,
        "phases": R.phases,
        **dict.fromkeys(("version", "started_at_ns", "openings", "rules_version", "weight_version", "lineage")),
        **dict.fromkeys(("last_seq", "last_at_ns", "last_request", "last_batch", "last_mark", "source_position")),
        **dict.fromkeys(("source_exhausted", "closed", "mark_seqs", "targets")),
    },
    OpenRequest: {"partition": R.partition, **dict.fromkeys(("request", "size", "weight_version", "seq", "at_ns"))},
    OpenBatch: {
        "partition": R.partition,
        "group_ids": R.groups,
        **dict.fromkeys(("batch", "lags", "weight_version", "seq")),
    },
    Credit: {"dataset": R.dataset, "evicted": R.group, **dict.fromkeys(("size", "target_version"))},
    Mark: {"name": R.mark, **dict.fromkeys(("mark", "seq", "weight_version", "lineage"))},
    DatasetUse: dict.fromkeys(("submitted", "evicted", "open", "new", "version", "told_version")),
    Window: {
        "evicted": R.reason_counts,
        "sessions_failed": R.reason_counts,
        "starved": R.by_dataset,
        **dict.fromkeys(("evicted_groups", "stale_lags", "submitted", "refills", "forfeited", "fenced", "requeued")),
        "filtered_values": KEPT,
    },
}
"""By class and field: what is done with it. None: it is kept."""


def undecided() -> dict[str, set[str]]:
    """Fields without a decision, and decisions about what is no field, by class; there must be none."""
    found = {}
    kinds: set[Any] = {*ev.EVENT_TYPES, *DECISIONS}
    for kind in kinds:
        names = kind.__struct_fields__ if issubclass(kind, msgspec.Struct) else [f.name for f in attrs.fields(kind)]
        if different := set(names) ^ set(DECISIONS.get(kind, ())):
            found[kind.__name__] = different
    return found


_ACTIONS: Final[dict[type, tuple[tuple[str, Action], ...]]] = {
    kind: tuple((name, action) for name, action in fields.items() if action is not None)
    for kind, fields in DECISIONS.items()
}


# Payloads --------------------------------------------------------------------------------------------


def _payload(data: bytes) -> tuple[str, Any] | None:
    try:
        value = msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, RecursionError, ValueError, TypeError):
        return None
    if not isinstance(value, list):
        return None
    if len(value) >= 2 and isinstance(value[1], dict):
        return "prompt", value
    row_types = (bytes, bytes, bytes, str, dict)
    if all(isinstance(row, list) and tuple(map(type, row[:5])) == row_types for row in value):
        return "rows", value
    return None


def redacted_payload(redactor: Redactor, data: bytes) -> bytes | None:
    """What stands in the place of a payload: a prompt that says nothing, or rows of as many tokens, all of them 0. None
    for what is neither."""
    found = _payload(data)
    if found is None:
        return None
    kind, value = found
    if kind == "prompt":
        return _ENCODE([redactor.token("prompt", data.hex()), {}])
    return _ENCODE(
        [
            [bytes(len(prompt)), bytes(len(response)), bytes(len(log_probs)), redactor.token("answer", text), {}]
            for prompt, response, log_probs, text, _, *_ in value
        ]
    )
