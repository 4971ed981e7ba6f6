"""Reading scenario files, strictly: what isn't understood is refused with its place and the nearest right word."""

import tomllib
from pathlib import Path
from typing import Any, get_args

import attrs

from groupstate import errors
from groupstate.core import events as ev
from groupstate.core.near import nearest
from groupstate.core.phases import Phase
from groupstate.core.prompt import GROUP_SIZE_MAX
from groupstate.core.rules import Rules, rules_from_dict
from groupstate.errors import BadSettings, GroupstateError
from groupstate.runtime.opening import BY_PATH, own_selection
from groupstate.simulate.kinds import (
    Flag,
    Form,
    Kind,
    ListOf,
    Number,
    OneOf,
    OrMissing,
    RulesTable,
    Seconds,
    TableOf,
    Text,
    Whole,
    Yes,
    known,
    refused,
)
from groupstate.simulate.kinds import (
    MalformedScenario as MalformedScenario,  # for who loads files
)

ID = Text()
SESSION = Text(r"[\s\S]+/[0-9]+", "'id/session', such as 'a/0'")
ROW = Text(r"[\s\S]+/[0-9]+/[0-9]+", "'id/session/index', such as 'a/0/0'")
ENDED = Text(r"(finished|failure|partial) [0-9]+/[0-9]+", "how a group ended, such as 'partial 3/4'")
METRICS = TableOf(Number())
VERSION = Whole(0)
ATTEMPT = Whole(1)
ERROR = OneOf(
    tuple(
        sorted(
            name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, GroupstateError)
        )
    )
)
"""Every error of the library by the name of its class."""

UNKNOWN = "unknown"
"""The phase of a group that was never submitted."""
PHASE = OneOf((*map(str, Phase), UNKNOWN))
COUNTED = OneOf((*map(str, Phase), "submitted", "owed"))
FAILURE_KINDS = tuple(kind for kind in get_args(ev.FailureKind) if kind != "spare")

TRAJECTORY = Form({"metrics": METRICS, "versions": ListOf(VERSION)})

VERBS: dict[str, tuple[Kind, dict[str, Kind]]] = {
    "submit": (
        ID,
        {
            "n": Whole(1, GROUP_SIZE_MAX),
            "weight_version": VERSION,
            "target_version": VERSION,
            "partition": OneOf((ev.TRAIN, ev.VALIDATION)),
            "dataset": ID,
        },
    ),
    "start": (ID, {"attempt": ATTEMPT}),
    "finish": (SESSION, {"metrics": METRICS, "trajectories": ListOf(TRAJECTORY), "attempt": ATTEMPT}),
    "fail": (SESSION, {"kind": OneOf(FAILURE_KINDS), "retryable": Flag(), "attempt": ATTEMPT}),
    "cancel": (ID, {}),
    "requeue": (ID, {"weight_version": VERSION}),
    "publish": (VERSION, {}),
    "sample": (Whole(), {"weight_version": VERSION, "partition": OneOf((ev.TRAIN, ev.VALIDATION))}),
    "waiting": (Flag(), {"groups": ListOf(ID), "error": ERROR, "waiter": Whole(1)}),
    "cancel_sample": (Yes(), {"waiter": Whole(1)}),
    "commit": (Whole(), {}),
    "release": (Whole(), {}),
    "advance_s": (Seconds(), {}),
    "checkpoint": (ID, {}),
    "close": (Yes(), {}),
    "crash": (Yes(), {"keep_bytes": Whole(0), "lose_bytes": Whole(0)}),
    "recover": (Yes(), {"at": ID, "rules": RulesTable(), "n": Whole(1, GROUP_SIZE_MAX)}),
    "check": (Yes(), {}),
}
"""Each step's verb with the kind of its value and its options."""

EXPECTATIONS: dict[str, Kind] = {
    "groups": ListOf(ID),
    "blocked": Flag(),
    "evicted": TableOf(ListOf(OneOf(get_args(ev.EvictReason)))),
    "submitted": ListOf(ID),
    "forfeited": Whole(0),
    "requeued": ListOf(ID),
    "reasons": TableOf(OrMissing(ListOf(OneOf(get_args(ev.EvictReason))))),
    "credit": TableOf(OrMissing(Whole(0))),
    "requeues": TableOf(Whole(0)),
    "held_by": OrMissing(ID),
    "starved": ListOf(ID),
    "phase": TableOf(PHASE),
    "counts": TableOf(Whole(0), COUNTED),
    "metrics": TableOf(OrMissing(Number())),
    "histograms": TableOf(OrMissing(TableOf(Whole(0)))),
    "fenced": OneOf(get_args(ev.FenceReason)),
    "error": ERROR,
    "batch": ListOf(ROW),
    "rows": TableOf(OrMissing(TableOf(OrMissing(Number()))), ROW),
    "ended": TableOf(OrMissing(ENDED)),
}
"""Each expectation with the kind of its value."""

SOURCE = Form(
    {"groups": ListOf(ID), "datasets": TableOf(ListOf(ID)), "admits": Flag()}, excludes=("groups", "datasets")
)
FILE = ("title", "rules", "source", "steps")


@attrs.frozen
class Step:
    verb: str
    subject: Any
    options: dict[str, Any]
    expect: dict[str, Any]

    def __str__(self) -> str:
        subject = repr(self.subject)
        return f"{{ {self.verb} = {subject.lower() if isinstance(self.subject, bool) else subject} }}"

    @property
    def address(self) -> tuple[str, int]:
        """(group id, session) of `id/session`, split from the right."""
        group_id, _, session = self.subject.rpartition("/")
        return group_id, int(session)


@attrs.frozen
class Scenario:
    path: str
    title: str
    rules: Rules
    source: tuple[str, ...] | dict[str, tuple[str, ...]] | None
    """Ids of the prompts, or those of each dataset."""
    steps: tuple[Step, ...]
    admits: bool = False
    """New groups are drawn ahead of the samplers, as while a rollout runs."""

    @property
    def reopens(self) -> bool:
        """The run is opened a second time, so its log has to be a file."""
        return any(step.verb in {"close", "crash"} for step in self.steps)

    @property
    def first_version(self) -> int:
        """The highest stamp of the leading submits."""
        version = 0
        for step in self.steps:
            if step.verb != "submit":
                break
            version = max(version, step.options.get("weight_version", 0))
        return version

    @property
    def group_size(self) -> int:
        """Sessions of a group that a shortage draws, which replaces none."""
        return next((int(step.options.get("n", 1)) for step in self.steps if step.verb == "submit"), 1)

    @property
    def folder_name(self) -> str:
        return Path(self.path).stem or "run"


def load(path: Path) -> Scenario:
    """
    Raises:
        MalformedScenario: not TOML, an unknown key or step, a value of the wrong type.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise MalformedScenario(f"{path}: {error}") from error
    return parse(data, str(path))


def parse(data: dict[str, Any], path: str = "scenario") -> Scenario:
    """
    Raises:
        MalformedScenario: an unknown key or step, a value of the wrong kind, rules that can't be.
    """
    known(data, FILE, path)
    if not isinstance(data.get("steps"), list) or not data["steps"]:
        raise MalformedScenario(f"{path}: it needs steps = [ ... ] with at least one step")
    ID.check(data.get("title", ""), f"{path}: title")
    rules = _rules(data.get("rules", {}), f"{path}: rules")
    steps = tuple(_step(step, f"{path}: step {number}") for number, step in enumerate(data["steps"], 1))
    source, admits = _source(data.get("source"), f"{path}: source")
    return Scenario(path, data.get("title", ""), rules, source, steps, admits)


def _rules(data: Any, where: str) -> Rules:
    RulesTable().check(data, where)
    try:
        rules = rules_from_dict(data, where)
    except BadSettings as error:
        raise MalformedScenario(str(error)) from error
    try:
        own_selection(rules, way_on=BY_PATH)
    except BadSettings as error:
        raise MalformedScenario(f"{where}: {error}") from error
    return rules


def _source(data: Any, where: str) -> tuple[tuple[str, ...] | dict[str, tuple[str, ...]] | None, bool]:
    if data is None:
        return None, False
    SOURCE.check(data, where)
    admits = data.get("admits", False)
    if "datasets" in data:
        return {name: tuple(ids) for name, ids in data["datasets"].items()}, admits
    return tuple(data.get("groups", [])), admits


def _step(data: Any, where: str) -> Step:
    if not isinstance(data, dict):
        raise refused(where, data, "a table")
    verbs = [key for key in data if key in VERBS]
    if len(verbs) != 1:
        named = ", ".join(data) or "nothing"
        near = [match for key in data for match in nearest(key, VERBS)]
        hint = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(VERBS)}"
        raise MalformedScenario(f"{where} holds {named}; a step has exactly one verb: {hint}")
    (verb,) = verbs
    kind, options = VERBS[verb]
    known(data, (verb, *options, "expect"), where)
    kind.check(data[verb], f"{where}: {verb}")
    given = {key: data[key] for key in data if key in options}
    for key, value in given.items():
        options[key].check(value, f"{where}: {key}")
    expect = data.get("expect", {})
    Form(EXPECTATIONS).check(expect, f"{where}: expect")
    if "rules" in given:
        given["rules"] = _rules(given["rules"], f"{where}: rules")
    if verb == "waiting":
        # A waiting step is nothing but expectations.
        own = {key: given.pop(key) for key in ("groups", "error") if key in given}
        expect = {"waiting": data[verb], **own, **expect}
    return Step(verb, data[verb], given, expect)
