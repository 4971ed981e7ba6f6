"""Rules and a source of prompts, chosen by numbers: for random runs.

Rule: a lower number stands for a plainer choice, so that what Hypothesis shrinks becomes plainer.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from groupstate.core.prompt import Prompt
from groupstate.core.rules import Capacity, PerBatch, PerDataset, Rules, Slots, recorded_rules
from groupstate.errors import BadSettings
from groupstate.runtime.sources import ListSource, MixedSource, Source
from groupstate.testing.plain.run import Prompts

SETTINGS = 48
"""Numbers that settings are chosen by."""

METRIC = "acc"

ADMISSIONS: Final[tuple[Any, ...]] = (
    None,
    PerBatch(warmup=0),
    PerBatch(warmup=2),
    Slots(n=2),
    Slots(n=3, ready_max=2),
    Slots(n=4, ready_max=1),
    Capacity(lag_max=0),
    Capacity(lag_max=1),
    Capacity(lag_max=2, in_flight_max=2),
)
"""The first is the plain one."""


class Tape:
    """Choices, made by the digits of a number or by number after number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def upto(self, count: int) -> int:
        """From 0 to `count - 1`."""
        self.number, choice = divmod(self.number, count)
        return choice

    def one_of(self, options: Sequence[Any]) -> Any:
        return options[self.upto(len(options))]


def rules_of(numbers: Sequence[int], given: Mapping[str, Any] = MappingProxyType({})) -> Rules | None:
    """Rules by these choices; None if they contradict each other.

    Args:
        given: settings that are as they are, whatever the numbers say.
    """
    left = iter(numbers)

    def pick(*options: Any) -> Any:
        """The first is the plain one, and as frequent as all others together."""
        number = next(left)
        return options[0] if number % 2 == 0 else options[number // 2 % len(options)]

    def even(*options: Any) -> Any:
        return options[next(left) % len(options)]

    mode = even("async", "sync")
    batch_size = even(2, 3, 1, None)
    wait = even("drop", "drop", "wait") if mode == "async" else "drop"
    selection = pick("oldest_first", "freshest_first", "exact_version") if mode == "async" else "oldest_first"
    settings: dict[str, Any] = {
        "mode": mode,
        "batch_size": batch_size,
        "lag_max": even(None, 0, 1, 2),
        "on_stale": wait,
        "basis": pick("dispatch", "first_token", "oldest_token", "newest_token"),
        "wait_gates": pick("training", "each"),
        "cancel_doomed": pick(False, True),
        "filter_metric": even(METRIC, None, METRIC),
        "per": pick("session", "trajectory"),
        "spread": pick("range", "std"),
        "tolerance": pick(0.0, 0.25),
        "on_singleton": pick("keep", "evict"),
        "on_missing": even("evict", "keep", "evict", "error"),
        "failure": even("keep", "refill"),
        "empty": even("refill", "drop", "keep", "keep_finished", "keep_all"),
        "empty_session": pick("fail", "allow"),
        "survivors_min": pick(None, 1, 2),
        "attempts_max": pick(1, 2, 3),
        "requeues_max": pick(0, 1, 2),
        "session_deadline_s": pick(None, 5.0),
        "group_deadline_s": pick(None, 8.0),
        "oversample": pick(0, 1, 2),
        "in_flight_batches_max": pick(1, 2),
        "generated_groups_max": pick(None, 4, 7, 12),
        "eviction_streak_max": pick(None, 2, 4, 6),
        "refill_multiple": pick(1, 2, 3),
        "selection": selection,
        "share_tolerance": pick(0.1, 0.0, 0.5),
        "starvation_versions": pick(None, 1, 2),
        "admission": pick(*ADMISSIONS),
    }
    own = {
        "math": PerDataset(share=pick(None, 0.5, 0.25), lag_max=pick(None, 1, 0, 3), tolerance=pick(None, 0.5)),
        "code": PerDataset(share=pick(None, 0.5, 0.0), lag_max=pick(None, 2), tolerance=None),
    }
    settings["datasets"] = pick({}, own, {"math": own["math"]})
    settings = {**_without_contradictions({**settings, **given}), **given}
    try:
        return recorded_rules(settings)
    except BadSettings:
        return None


def _without_contradictions(settings: dict[str, Any]) -> dict[str, Any]:
    """What most of the contradictions are made to say, so that most choices are some rules."""
    if settings["selection"] == "exact_version":
        plain = {name: PerDataset(share=one.share) for name, one in settings["datasets"].items()}
        settings |= {"basis": "target_version", "on_stale": "drop", "lag_max": 0, "datasets": plain}
        settings["batch_size"] = settings["batch_size"] or 2
    if settings["lag_max"] is None and settings["on_stale"] == "wait":
        settings["lag_max"] = 1
    if isinstance(settings["admission"], Capacity) or (settings["mode"] == "sync" and settings["filter_metric"]):
        settings["batch_size"] = settings["batch_size"] or 2
    if settings["mode"] == "sync" and settings["failure"] == "keep":
        settings["cancel_doomed"] = False
    return settings


def prompts_of(numbers: Sequence[int]) -> Prompts | None:
    """A source of the run, short or long."""
    tape = Tape(sum(number << (16 * place) for place, number in enumerate(numbers)))
    kind = tape.one_of(["list", "mixed", "list", "mixed", "breaks", "none"])
    sizes = [None, 1, 3]
    if kind == "none":
        return None
    length = tape.one_of([100, 100, 3, 6, 12])
    if kind == "mixed":
        datasets = ["math", "code", "chat"][: 2 + tape.upto(2)]
        short = tape.one_of([100, 2, 5])
        lengths = [length, short, length]
        return Prompts(
            {name: [sizes[(i + place) % 3] for i in range(lengths[place])] for place, name in enumerate(datasets)},
            mixed=True,
        )
    step = 1 + tape.upto(3)
    breaks_at = length // 2 if kind == "breaks" else None
    return Prompts({"": [sizes[i * step % 3] for i in range(length)]}, breaks_at=breaks_at)


class Breaking(ListSource):
    """Raises at one prompt, whenever it is asked for."""

    def __init__(self, prompts: Sequence[Any], breaks_at: int | None) -> None:
        super().__init__(prompts)
        self.breaks_at = breaks_at

    def draw(self) -> Prompt | None:
        if self.position == self.breaks_at:
            raise RuntimeError("told so")
        return super().draw()


def source_of(prompts: Prompts | None) -> Source | None:
    if prompts is None:
        return None
    lists = {name: [Prompt(None, name, n) for n in sizes] for name, sizes in prompts.lists.items()}
    return MixedSource(lists) if prompts.mixed else Breaking(lists[""], prompts.breaks_at)
