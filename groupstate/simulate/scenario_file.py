"""Reading scenario files, strictly: what isn't understood is refused with its place and the nearest right word."""

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs

from groupstate.core.near import nearest
from groupstate.core.rules import Rules, rules_from_dict
from groupstate.errors import BadSettings, GroupstateError


class MalformedScenario(GroupstateError):
    """A scenario file that can't be run."""


ID: tuple[type, ...] = (str,)
COUNT: tuple[type, ...] = (int,)
FLAG: tuple[type, ...] = (bool,)

VERBS: dict[str, tuple[tuple[type, ...], dict[str, tuple[type, ...]]]] = {
    "submit": (ID, {"n": COUNT, "weight_version": COUNT, "target_version": COUNT, "partition": ID, "dataset": ID}),
    "start": (ID, {"attempt": COUNT}),
    "finish": (ID, {"metrics": (dict,), "trajectories": (list,), "attempt": COUNT}),
    "fail": (ID, {"kind": ID, "retryable": FLAG, "attempt": COUNT}),
    "cancel": (ID, {}),
    "requeue": (ID, {}),
    "publish": (COUNT, {}),
    "sample": (COUNT, {"weight_version": COUNT, "partition": ID}),
    "waiting": (FLAG, {"groups": (list,), "error": ID, "waiter": COUNT}),
    "cancel_sample": (FLAG, {"waiter": COUNT}),
    "commit": (COUNT, {}),
    "release": (COUNT, {}),
    "advance_s": ((int, float), {}),
    "checkpoint": (ID, {}),
    "close": (FLAG, {}),
    "crash": (FLAG, {"keep_bytes": COUNT, "lose_bytes": COUNT}),
    "recover": (FLAG, {"at": ID, "rules": (dict,), "n": COUNT}),
    "check": (FLAG, {}),
}
"""Each step's verb with the type of its value and its options."""

EXPECTATIONS: dict[str, tuple[type, ...]] = {
    "groups": (list,),
    "blocked": FLAG,
    "evicted": (dict,),
    "submitted": (list,),
    "forfeited": COUNT,
    "requeued": (list,),
    "starved": (list,),
    "phase": (dict,),
    "counts": (dict,),
    "metrics": (dict,),
    "histograms": (dict,),
    "fenced": ID,
    "error": ID,
    "batch": (list,),
    "rows": (dict,),
    "ended": (dict,),
}
"""Each expectation with the type of its value."""

SOURCE: dict[str, tuple[type, ...]] = {"groups": (list,), "datasets": (dict,), "admits": FLAG}
TRAJECTORY: dict[str, tuple[type, ...]] = {"metrics": (dict,), "versions": (list,)}
FAILURE_KINDS = ("error", "timeout", "cancelled", "lost", "empty", "refused")


@attrs.frozen
class Step:
    verb: str
    subject: Any
    options: dict[str, Any]
    expect: dict[str, Any]

    def __str__(self) -> str:
        return f"{{ {self.verb} = {self.subject!r} }}"

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
    _known(data, ("title", "rules", "source", "steps"), path)
    if not isinstance(data.get("steps"), list) or not data["steps"]:
        raise MalformedScenario(f"{path}: it needs steps = [ ... ] with at least one step")
    title = _typed(data.get("title", ""), ID, f"{path}: title")
    rules = _rules(data.get("rules", {}), f"{path}: rules")
    steps = tuple(_step(step, f"{path}: step {number}") for number, step in enumerate(data["steps"], 1))
    source, admits = _source(data.get("source"), f"{path}: source")
    return Scenario(path, title, rules, source, steps, admits)


def _rules(data: Any, where: str) -> Rules:
    try:
        return rules_from_dict(_typed(data, (dict,), where), where)
    except BadSettings as error:
        raise MalformedScenario(str(error)) from error


def _source(data: Any, where: str) -> tuple[tuple[str, ...] | dict[str, tuple[str, ...]] | None, bool]:
    if data is None:
        return None, False
    _known(_typed(data, (dict,), where), SOURCE, where)
    for key, value in data.items():
        _typed(value, SOURCE[key], f"{where}.{key}")
    if "groups" in data and "datasets" in data:
        raise MalformedScenario(f"{where} has groups and datasets; it must be one or the other")
    admits = data.get("admits", False)
    if "datasets" in data:
        return {name: _ids(ids, f"{where}.datasets.{name}") for name, ids in data["datasets"].items()}, admits
    return _ids(data.get("groups", []), f"{where}.groups"), admits


def _ids(data: Any, where: str) -> tuple[str, ...]:
    return tuple(_typed(group_id, ID, where) for group_id in _typed(data, (list,), where))


def _step(data: Any, where: str) -> Step:
    _typed(data, (dict,), where)
    verbs = [key for key in data if key in VERBS]
    if len(verbs) != 1:
        named = ", ".join(data) or "nothing"
        near = [match for key in data for match in nearest(key, VERBS)]
        hint = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(VERBS)}"
        raise MalformedScenario(f"{where} holds {named}; a step has exactly one verb: {hint}")
    verb = verbs[0]
    kind, options = VERBS[verb]
    _known(data, (verb, "expect", *options), where)
    subject = _typed(data[verb], kind, f"{where}: {verb}")
    given = {key: _typed(data[key], options[key], f"{where}: {key}") for key in data if key in options}
    expect = _typed(data.get("expect", {}), (dict,), f"{where}: expect")
    _known(expect, tuple(EXPECTATIONS), f"{where}: expect")
    for key, value in expect.items():
        _typed(value, EXPECTATIONS[key], f"{where}: expect.{key}")
    _check_step(verb, subject, given, where)
    if verb == "recover" and "rules" in given:
        given["rules"] = _rules(given["rules"], f"{where}: rules")
    if verb == "waiting":
        # A waiting step is nothing but expectations.
        given_expect = {key: given.pop(key) for key in ("groups", "error") if key in given}
        expect = {"waiting": subject, **given_expect, **expect}
    return Step(verb, subject, given, expect)


def _check_step(verb: str, subject: Any, given: dict[str, Any], where: str) -> None:
    if verb in {"finish", "fail"}:
        group_id, _, session = subject.rpartition("/")
        if not group_id or not session.isdecimal():
            raise MalformedScenario(f"{where}: {verb} = {subject!r}; it must be 'id/session', such as 'a/0'")
    if "kind" in given and given["kind"] not in FAILURE_KINDS:
        raise MalformedScenario(f"{where}: kind = {given['kind']!r}; it must be one of {', '.join(FAILURE_KINDS)}")
    for row in given.get("trajectories", []):
        _known(_typed(row, (dict,), f"{where}: trajectories"), TRAJECTORY, f"{where}: trajectories")
        for key, value in row.items():
            _typed(value, TRAJECTORY[key], f"{where}: trajectories.{key}")
        for version in row.get("versions", []):
            _typed(version, COUNT, f"{where}: trajectories.versions")


def _typed(value: Any, kinds: tuple[type, ...], where: str) -> Any:
    fits = isinstance(value, kinds) and not (isinstance(value, bool) and bool not in kinds)
    if not fits:
        names = " or ".join(kind.__name__ for kind in kinds)
        raise MalformedScenario(f"{where} is {value!r}; it must be of type {names}")
    return value


def _known(data: dict[str, Any], known: Iterable[str], where: str) -> None:
    names = list(known)
    for key in data:
        if key not in names:
            near = nearest(key, names)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names)}"
            raise MalformedScenario(f"{where} has no key {key!r}; {hint}")
