"""A hypothesis state machine that drives the real ledger and rules beside a plain model: for rules of your own.

    class LongestFirst(GroupMachine):
        selection = longest_first

        def promise(self, asked):
            assert all(a.size >= b.size for a in asked.selected for b in asked.passed_over)

    TestLongestFirst = LongestFirst.TestCase

After every step the invariants hold, the model expects each event that was recorded, in order, and nobody waits for
what can't come; in the end everything goes well, and whoever waits must have an answer. A failure is a `BrokenStory`.
"""

import functools
import traceback
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, ClassVar

from groupstate.core.custom import CustomRule
from groupstate.core.events import VALIDATION
from groupstate.core.rules import Rules
from groupstate.errors import BadSettings, MissingExtra
from groupstate.testing import attributes, strategies
from groupstate.testing.moves import Moves
from groupstate.testing.notation import Story
from groupstate.testing.plain.run import Row
from groupstate.testing.said import check_names, given_selection, tested_rule
from groupstate.testing.shorter import Shorter
from groupstate.testing.strategies import FAILURES, PARTITIONS, PICKS, SECONDS, STEPS, VALUES, VERSIONS
from groupstate.testing.twin import METRIC, BrokenStory, Twin, names
from groupstate.testing.watched import Asked

try:
    from hypothesis import Phase, settings
    from hypothesis import strategies as st
    from hypothesis.errors import Flaky
    from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
except ModuleNotFoundError as error:
    raise MissingExtra("groupstate.testing.machine", "hypothesis", "testing") from error


LAST_THINGS = ["finish_group", "sample", "publish", "commit", "release", "cancel", "fail_group"]
"""What a process may be at when it dies."""

PACKAGE = Path(__file__).parents[1]

NOT_THE_SAME = (
    "Told again, the same story went otherwise: the rule looks at something beside the book, such as a clock, a random "
    "number, or what it remembers."
)

ENDS = PICKS | st.integers(0, 9999)
"""How a session ends: a number that stands for a value of each metric, and a length."""

ONE_OR_TWO = st.lists(ENDS, min_size=1, max_size=1) | st.lists(ENDS, min_size=1, max_size=2)
ONE_TO_THREE = st.lists(ENDS, min_size=1, max_size=3)


OTHERS = {
    "rules": "run_rules = Rules(...)",
    "settings": "`settings` of the TestCase",
    **dict.fromkeys(("select", "eviction", "evict", "custom"), "selection = the function; it yields Drop too"),
}


class GroupMachine(RuleBasedStateMachine):
    """Runs under your rules, made up by hypothesis. Subclass it, say what it is about in the attributes below, and give
    its `TestCase` to pytest."""

    run_rules: ClassVar[Rules | None] = None
    """The rules that every story is played under. None with a `selection`: `Rules()`; without one: others each time."""
    selection: ClassVar[Any] = None
    """A selection of your own: the function itself. Without it one that `run_rules` names is loaded."""
    values: ClassVar[Sequence[float]] = VALUES
    """Of the metric that sessions report (`filter_metric`, or `reward`). Put the bounds of your rule among them."""
    metrics: ClassVar[Mapping[str, Sequence[float]]] = {}
    """Other metrics that sessions report, by name, and what each may be."""
    lengths: ClassVar[Sequence[int]] = ()
    """How many tokens an answer may have. Without it that is 0, 1 or 2."""
    sources: ClassVar[Sequence[int | None]] = (100, 3, None, 8)
    """How many prompts the source may have; None for no source."""
    patient: ClassVar[bool] = False
    """The selection may keep a sampler waiting although enough groups are sampleable and nothing is in flight."""
    failures: ClassVar[bool] = True
    """Sessions may fail, return nothing, and be cancelled."""
    deaths: ClassVar[bool] = True
    """The process may die, in the middle of whatever happens, and the run be recovered."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Which lines of the library a failure has in common, and whether there is a second one, tells little of a
        rule and takes long to find out."""
        super().__init_subclass__(**kwargs)
        check_names(cls, GroupMachine, OTHERS)
        given_selection(cls)
        _check_attributes(cls)
        usual = cls.TestCase.settings
        cls.TestCase.settings = settings(
            usual,
            phases=[phase for phase in usual.phases if phase not in (Phase.explain, Phase.shrink)],
            report_multiple_bugs=False,
        )
        _tell_in_short(cls)

    def promise(self, asked: Asked) -> None:
        """What each answer of `selection` is held against; override it, and assert what the rule is meant to give."""

    def check(self, story: Story) -> None:
        """What must hold after each line of a story; override it, and look at `story.book`, `story.batches()`,
        `story.evicted()`. It isn't called between the death of a process and its recovery."""

    _broken: ClassVar[Shorter | None] = None
    """The last story in which something was wrong."""

    # The steps ---------------------------------------------------------------------------------------

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        rules = self._rules(data)
        count = data.draw(st.sampled_from(list(self.sources)), "prompts of the source")
        admits = count is not None and data.draw(st.booleans(), "a rollout is running")
        self.twin = self._twin(rules, count, admits)
        self._shorter = Shorter(functools.partial(self._twin, rules), self.twin, count, admits)
        self.moves = Moves(self.twin, values=self.values)

    def _twin(self, rules: Rules, prompts: int | None, admits: bool) -> Twin:
        return Twin(
            rules=rules,
            source=None if prompts is None else names(prompts),
            admits=admits,
            selection=given_selection(type(self)),
            promise=self.promise,
            check=self.check,
            patient=self.patient,
        )

    def _rules(self, data: st.DataObject) -> Rules:
        if self.run_rules is not None or self._selection() is not None:
            return self.run_rules or Rules()
        return data.draw(strategies.rules(), "rules")

    @classmethod
    def _selection(cls) -> CustomRule | None:
        found = tested_rule(cls, "run_rules")
        if found is None and cls.promise is not GroupMachine.promise:
            raise BadSettings(
                f"{cls.__qualname__} has a promise, and no selection that could keep it; say selection = the function"
            )
        return found

    @precondition(lambda self: self.moves.can_submit())
    @rule(size=st.integers(1, 3), partition=PARTITIONS, dataset=st.sampled_from(["", "math", "code"]))
    def submit(self, size: int, partition: str, dataset: str) -> None:
        self.moves.submit(size, partition, dataset)

    @precondition(lambda self: self.moves.can_start())
    @rule(pick=PICKS, alone=st.booleans())
    def start(self, pick: int, alone: bool) -> None:
        self.moves.start(pick, alone)

    @precondition(lambda self: self.moves.can_finish())
    @rule(pick=PICKS, values=ONE_OR_TWO, versions=VERSIONS)
    def finish(self, pick: int, values: list[int], versions: tuple[int, ...]) -> None:
        self.moves.finish(pick, self._values(values), versions)

    @precondition(lambda self: self.moves.can_finish_group())
    @rule(pick=PICKS, values=ONE_TO_THREE, partition=PARTITIONS)
    def finish_group(self, pick: int, values: list[int], partition: str) -> None:
        self.moves.finish_group(pick, self._values(values), partition)

    @precondition(lambda self: self.moves.can_finish_group())
    @rule(count=st.integers(1, 3), values=ONE_TO_THREE)
    def finish_groups(self, count: int, values: list[int]) -> None:
        """Several at once, since single steps seldom lead to a batch."""
        for number in range(count):
            if self.moves.can_finish_group():
                self.moves.finish_group(number, self._values(values))

    @precondition(lambda self: self.moves.can_finish_group())
    @rule(count=st.integers(1, 2), values=ONE_TO_THREE, commits=st.booleans())
    def train(self, count: int, values: list[int], commits: bool) -> None:
        """What a trainer does: sample, learn, publish, and commit later perhaps."""
        for number in range(count):
            if self.moves.can_finish_group():
                self.moves.finish_group(number, self._values(values))
        if self.moves.can_sample():
            self.moves.sample(count)
        if self.moves.is_alive():
            self.moves.publish(1)
        if commits and self.moves.has_batch():
            self.moves.commit(0)

    @precondition(lambda self: self.moves.can_finish_group())
    @rule(size=st.integers(1, 2), values=ONE_TO_THREE)
    def validate(self, size: int, values: list[int]) -> None:
        """A group of validation ends beside a sampler of training, which it is nothing to."""
        self.moves.finish_group(0, self._values(values), VALIDATION)
        if self.moves.can_sample():
            self.moves.sample(size)

    @precondition(lambda self: self.failures and self.moves.can_finish())
    @rule(pick=PICKS, kind=FAILURES, retryable=st.booleans())
    def fail(self, pick: int, kind: str, retryable: bool) -> None:
        self.moves.fail(pick, kind, retryable)

    @precondition(lambda self: self.failures and self.moves.can_finish())
    @rule(pick=PICKS)
    def fail_group(self, pick: int) -> None:
        self.moves.fail_group(pick)

    @precondition(lambda self: self.failures and self.moves.can_finish())
    @rule(pick=PICKS)
    def finish_with_nothing(self, pick: int) -> None:
        self.moves.finish(pick, [])

    @precondition(lambda self: self.twin.rules.has_own_selection is False and self.moves.can_finish())
    @rule(pick=PICKS)
    def finish_without_the_metric(self, pick: int) -> None:
        self.moves.finish(pick, [None])

    @precondition(lambda self: self.moves.can_be_late())
    @rule(pick=st.integers(0, 29))
    def late(self, pick: int) -> None:
        self.moves.late(pick)

    @precondition(lambda self: self.failures and self.moves.can_finish())
    @rule(pick=PICKS)
    def cancel(self, pick: int) -> None:
        self.moves.cancel(pick)

    @precondition(lambda self: self.failures and self.moves.can_requeue())
    @rule(pick=PICKS)
    def requeue(self, pick: int) -> None:
        self.moves.requeue(pick)

    @precondition(lambda self: self.moves.is_alive())
    @rule(step=st.sampled_from([1, 2, 0]))
    def publish(self, step: int) -> None:
        self.moves.publish(step)

    @precondition(lambda self: self.moves.is_alive())
    @rule(seconds=SECONDS)
    def wait(self, seconds: float) -> None:
        self.moves.wait(seconds)

    @precondition(lambda self: self.moves.is_alive())
    @rule(size=st.integers(1, 3), partition=PARTITIONS)
    def sample(self, size: int, partition: str) -> None:
        self.moves.sample(size, partition)

    @precondition(lambda self: self.moves.can_withdraw())
    @rule(pick=PICKS)
    def withdraw(self, pick: int) -> None:
        self.moves.withdraw(pick)

    @precondition(lambda self: self.moves.can_be_undelivered())
    @rule(pick=PICKS)
    def undelivered(self, pick: int) -> None:
        self.moves.undelivered(pick)

    @precondition(lambda self: self.moves.has_batch())
    @rule(pick=PICKS)
    def commit(self, pick: int) -> None:
        self.moves.commit(pick)

    @precondition(lambda self: self.moves.has_batch())
    @rule(pick=PICKS)
    def release(self, pick: int) -> None:
        self.moves.release(pick)

    @precondition(lambda self: self.deaths)
    @rule(step=STEPS, dies=st.none() | st.integers(1, 4))
    def recover(self, step: int, dies: int | None) -> None:
        self.moves.recover(step, dies)

    @precondition(lambda self: self.deaths and self.moves.can_die())
    @rule(writes=st.integers(1, 4), what=st.sampled_from(LAST_THINGS), pick=PICKS)
    def die_in_a_write(self, writes: int, what: str, pick: int) -> None:
        """The process dies in the middle of something, and is recovered: one step, so that it goes as one from a story
        that doesn't need it."""
        self.moves.die(writes)
        if what == "finish_group" and self.moves.can_finish_group():
            self.moves.finish_group(pick, self._values([pick, pick + 1]))
        elif what == "sample":
            self.moves.sample(1 + pick % 3)
        elif what == "publish":
            self.moves.publish(1)
        elif what == "commit" and self.moves.has_batch():
            self.moves.commit(pick)
        elif what == "release" and self.moves.has_batch():
            self.moves.release(pick)
        elif what == "cancel" and self.failures and self.moves.can_finish():
            self.moves.cancel(pick)
        elif what == "fail_group" and self.failures and self.moves.can_finish():
            self.moves.fail_group(pick)
        self.moves.recover(0)

    def _values(self, picks: Sequence[int]) -> list[float | Row]:
        return [self._row(pick) if self.metrics or self.lengths else self._digits(pick)[0] for pick in picks]

    def _row(self, pick: int) -> Row:
        value, *others, tokens = self._digits(pick)
        return Row({self.twin.metric: value, **dict(zip(self.metrics, others, strict=True))}, [], tokens)

    def _digits(self, pick: int) -> list[Any]:
        """A choice of each kind, as the digits of a number are."""
        digits: list[Any] = []
        for choices in self._choices():
            pick, digit = divmod(pick, len(choices))
            digits.append(choices[digit])
        return digits

    @classmethod
    def _choices(cls) -> list[Sequence[Any]]:
        return [cls.values, *cls.metrics.values(), cls.lengths or (None,)]

    def teardown(self) -> None:
        """All goes well in the end, unless something is wrong already."""
        try:
            if not self._is_broken():
                self.twin.end_well(self._values([0, prod(map(len, self._choices())) - 1]))
        finally:
            if hasattr(self, "twin") and self.twin.broken is not None:
                type(self)._broken = self._shorter

    def _is_broken(self) -> bool:
        twin = getattr(self, "twin", None)
        return twin is None or twin.broken is not None


def _check_attributes(cls: type[GroupMachine]) -> None:
    """
    Raises:
        BadSettings: one of them is nothing that a story can be made of, or that can fail.
    """
    where = cls.__qualname__
    attributes.check_rules(f"{where}.run_rules", cls.run_rules)
    attributes.check_numbers(f"{where}.values", cls.values)
    metric = METRIC if cls.run_rules is None else cls.run_rules.filter_metric or METRIC
    attributes.check_metrics(f"{where}.metrics", cls.metrics, metric)
    attributes.check_lengths(f"{where}.lengths", cls.lengths)
    attributes.check_sources(f"{where}.sources", cls.sources)
    attributes.check_booleans(where, cls, "patient", "failures", "deaths")
    attributes.check_asserts(f"{where}.promise", cls.promise)
    attributes.check_asserts(f"{where}.check", cls.check)


def _tell_in_short(cls: type[GroupMachine]) -> None:
    """What pytest shows of a failure is its story, in as few lines as show it, and the user's own code."""
    run = cls.TestCase.runTest

    @functools.wraps(run)
    def run_test(self: Any) -> None:
        cls._selection()  # What can't be found is told once, and not of some story.
        if (broken := _failure(cls, functools.partial(run, self))) is not None:
            raise broken

    cls.TestCase.runTest = run_test  # type: ignore[method-assign]


def _failure(cls: type[GroupMachine], run: Callable[[], None]) -> BrokenStory | None:
    """
    Raises:
        Exception: of a run in which no story was broken.
    """
    cls._broken = None
    is_flaky = False
    try:
        run()
    except (BrokenStory, Flaky) as error:
        if cls._broken is None:
            raise
        is_flaky = isinstance(error, Flaky)
    if cls._broken is None:
        return None
    # Not while the error is handled: it would be shown as well, with a story that is longer.
    broken = cls._broken.run()
    if is_flaky:
        broken.add(NOT_THE_SAME)
    if not _is_of_a_user(broken.__cause__):
        broken.__cause__ = None
    return broken.with_traceback(None)


def _is_of_a_user(error: BaseException | None) -> bool:
    """Whether it comes from code outside this package."""
    frames = traceback.extract_tb(None if error is None else error.__traceback__)
    return any(not Path(frame.filename).is_relative_to(PACKAGE) for frame in frames)
