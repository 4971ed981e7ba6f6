"""A story told twice: to the real ledger and rules, and to the plain model of them; compared after every line.

    twin = Twin(rules=Rules(lag_max=1), source=["r1", "r2"])
    twin.submit("a", 2)
    twin.finish_group("a", [0.0, 1.0])
    twin.sample(1)

Rule 1: each method is one line of the notation, or a few; what can't happen now is the caller's mistake.
Rule 2: whatever turns out wrong is a `BrokenStory`, whose text can be pasted as a test.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn, ParamSpec

from groupstate.core import events as ev
from groupstate.core import explain as explaining
from groupstate.core.book import Book
from groupstate.core.custom import CustomRule
from groupstate.core.folding import replayed
from groupstate.core.invariants import INVARIANTS, Checker
from groupstate.core.rules import Rules
from groupstate.errors import BadSettings, CustomRuleError
from groupstate.logs import hushed
from groupstate.testing.attributes import check_asserts, no_answer
from groupstate.testing.notation import Story
from groupstate.testing.plain.model import Model
from groupstate.testing.plain.run import ENDED, IN_FLIGHT, Died, Group, Prompts, Row
from groupstate.testing.plain.told import difference, told
from groupstate.testing.said import rule_of, rules_in_force
from groupstate.testing.watched import Promise, Watched, place_of, without_names

P = ParamSpec("P")

METRIC: Final = "reward"
"""What sessions are told to have, unless the rules filter by another metric."""

ROUNDS_MAX: Final = 150
"""Times that all that is in flight ends, at the end of a story, before whoever waits must have an answer."""


class BrokenStory(AssertionError):
    """A story in which something isn't as it must be. The text holds the story, as a test to be pasted."""

    def __init__(self, what: str, lines: Sequence[str], arguments: str, kind: str = "") -> None:
        self.what = what
        """What is wrong, and what would be right."""
        self.kind = kind
        """What a shorter story must go wrong in as well, to show the same; empty where that can't be told."""
        self.lines = list(lines)
        """The story until there, in the notation of `groupstate.testing.notation`."""
        self._arguments = arguments

    def add(self, what: str) -> None:
        """One more thing that is wrong."""
        self.what += f"\n\n{what}"

    def __str__(self) -> str:
        told = "".join(f"    {line!r},\n" for line in self.lines)
        return f"{self.what}\n\nThe story, of which the last line shows it:\n\nplay(\n{told}{self._arguments})"


Call = tuple[str, tuple[Any, ...], dict[str, Any]]
"""A method of `Twin` that is one line, and what it is given."""


def _line(method: Callable[P, None]) -> Callable[P, None]:
    """The method, which notes that it was called."""

    @functools.wraps(method)
    def noted(*args: P.args, **kwargs: P.kwargs) -> None:
        twin: Any = args[0]
        twin.calls.append((method.__name__, args[1:], kwargs))
        method(*args, **kwargs)

    return noted


class Twin:
    """
    Attributes:
        lines: the story so far.
        model: the plain side; look at its groups, requests and batches to see what can happen next.
    """

    def __init__(
        self,
        *,
        rules: Rules | None = None,
        source: Sequence[str] | None = None,
        group_size: int = 2,
        admits: bool = False,
        selection: CustomRule | None = None,
        promise: Promise | None = None,
        check: Callable[[Story], None] | None = None,
        patient: bool = False,
        real: bool = True,
    ) -> None:
        """
        Args:
            rules, source, group_size, admits, selection: as for `play`.
            promise: holds each answer of `selection` against what it is meant to give.
            check: raises where something doesn't hold after a line.
            patient: the selection may keep a sampler waiting although enough groups are sampleable and nothing is
                under way. Else that is told as a sampler that waits for ever.
            real: False tells the story to the model alone. Such a story can't have a selection of its own.

        Raises:
            BadSettings: the rule can't be found, can't be called as a selection, or can't be asked here; or the promise
                or the check could never say that something is wrong.
        """
        for name, function in (("promise", promise), ("check", check)):
            if function is not None:
                check_asserts(name, function)
        self._given = rules or Rules()
        self._selection = selection
        own = rule_of(self._given, selection)
        if own is not None and not real:
            raise BadSettings(
                "the plain model can't ask a selection of your own, so no story is made up under one here; a "
                "GroupMachine makes some up, beside the real rules"
            )
        self._watched = None if own is None else Watched(own, promise)
        rules = self.rules = rules_in_force(self._given, selection)
        self.metric = rules.filter_metric or METRIC
        self.lines: list[str] = []
        self.calls: list[Call] = []
        """The same as calls, from which it can be told again."""
        self._check = check
        self._patient = patient
        self._source, self._group_size, self._admits = source, group_size, admits
        prompts = None if source is None else Prompts({"": [None] * len(source)}, names=list(source))
        self.model = Model(rules, prompts, group_size=group_size)
        self.model.admits = admits
        self.model.answers = None if self._watched is None else self._watched.answers
        self.story: Story | None = None
        self.broken: BrokenStory | None = None
        self.checker = Checker()
        self._compared = 0
        self.sampled: list[int] = []
        """Requests of all `sample()` so far, in their order."""
        if real:
            self.story = Story(
                rules=rules,
                source=source,
                group_size=group_size,
                admits=admits,
                selection=self._watched,
                replays=False,
            )
            self._feed()
            self.model.said()

    # Lines -------------------------------------------------------------------------------------------

    @_line
    def submit(self, name: str, size: int, *, partition: str = ev.TRAIN, dataset: str = "") -> None:
        options = _said(partition=partition if partition != ev.TRAIN else "", dataset=dataset)
        self._tell(
            f"submit {name}/{size}{options}",
            lambda model: model.submit(size, partition=partition, dataset=dataset, name=name),
        )

    @_line
    def start(self, name: str, number: int | None = None) -> None:
        """One session, or all of a group whose sessions all wait."""
        if number is not None:
            self._tell(f"start {name}.{number}", lambda model: model.start(name, number, None))
            return

        def start_all(model: Model) -> None:
            for each in range(len(model.groups[name].sessions)):
                model.start(name, each, None)

        self._tell(f"start {name}", start_all)

    @_line
    def finish(self, name: str, number: int, rows: Sequence[Row]) -> None:
        self._tell(
            f"finish {name}.{number} {rows_in_words(rows)}", lambda model: model.finish(name, number, list(rows))
        )

    @_line
    def fail(self, name: str, number: int, kind: str = "error", *, retryable: bool = False) -> None:
        words = "" if kind == "error" else f" {kind}"
        self._tell(
            f"fail {name}.{number}{words}{' retryable' if retryable else ''}",
            lambda model: model.fail(name, number, kind, retryable=retryable),
        )

    @_line
    def late(self, name: str, number: int, attempt: int, result: str) -> None:
        """A result that is fenced: of another attempt, once more, or after the end."""
        line = {
            "started": f"start {name}.{number}",
            "finished": f"finish {name}.{number} {self.metric}=1",
            "failed": f"fail {name}.{number}",
        }[result]
        self._tell(f"{line} attempt={attempt}", lambda model: model.late(name, number, attempt, result))

    @_line
    def cancel(self, name: str) -> None:
        self._tell(f"cancel {name}", lambda model: model.cancel(name))

    @_line
    def requeue(self, name: str) -> None:
        self._tell(f"requeue {name}", lambda model: model.requeue(name))

    @_line
    def publish(self, version: int) -> None:
        self._tell(f"publish {version}", lambda model: model.publish(version))

    @_line
    def wait(self, seconds: float) -> None:
        self._tell(f"wait {seconds:g}", lambda model: model.wait(seconds))

    @_line
    def sample(self, size: int, partition: str = ev.TRAIN) -> None:
        options = _said(partition=partition if partition != ev.TRAIN else "")
        number = self.model.request_count + 1
        self.sampled.append(number)
        self._tell(f"sample {size}{options}", lambda model: model.sample(size, partition))

    @_line
    def withdraw(self, request: int) -> None:
        """A `sample()` that waits doesn't any more."""
        place = self.sampled.index(request) + 1
        self._tell(f"withdraw {place}", lambda model: model.withdraw(request))

    @_line
    def undelivered(self, batch: int) -> None:
        """A batch comes back whose sampler was cancelled before he had it."""
        assert self.story is not None, "only the real side knows whose it is"
        claims = [0 if waiter.claim is None else waiter.claim.batch for waiter in self.story.waiters]
        self._tell(f"withdraw {claims.index(batch) + 1}", lambda model: model.give_back(batch, "cancelled"))

    @_line
    def commit(self, batch: int) -> None:
        self._tell(f"commit {batch}", lambda model: model.commit(batch))

    @_line
    def release(self, batch: int) -> None:
        self._tell(f"release {batch}", lambda model: model.give_back(batch, "told so"))

    @_line
    def recover(self, *, version: int | None = None, dies: int | None = None) -> None:
        """The process dies and the log is opened again.

        Args:
            version: the trainer's weight version; None for the run's own.
            dies: writes after which it dies while it recovers.
        """
        options = _said(version="" if version is None else str(version), dies="" if dies is None else str(dies))
        new = self.model.version if version is None else version
        self._tell(f"recover{options}", lambda model: model.recover(new), dies=dies)

    @_line
    def dies(self, writes: int) -> None:
        """The process dies after so many more writes, in the middle of a line perhaps."""
        self._tell(f"dies {writes}", lambda model: None, dies=writes)

    @property
    def died(self) -> bool:
        """Only `recover` can follow."""
        return self.model.writes_left == 0

    # Several lines at once ---------------------------------------------------------------------------

    def finish_group(self, name: str, values: Sequence[float | Row]) -> None:
        """All that isn't settled of a group ends well; session n has the n-th of `values`, over and over: a value of
        the metric, or a whole row."""
        group = self.model.groups[name]
        requeues = group.requeues
        if group.in_flight and all(session.state == "waiting" for session in group.sessions):
            self.start(name)
        for number in range(len(group.sessions)):
            for verb in ("start", "finish"):
                if self.died or not group.in_flight or group.requeues != requeues:
                    return
                if verb == "start" and group.sessions[number].state == "waiting":
                    self.start(name, number)
                elif verb == "finish" and group.sessions[number].state == "open":
                    self.finish(name, number, [self._row(values[number % len(values)])])

    def _row(self, value: float | Row) -> Row:
        return value if isinstance(value, Row) else Row({self.metric: value})

    def end_well(self, values: Sequence[float | Row] = (0.0, 1.0)) -> None:
        """What is in flight ends well, again and again. With a source, whoever waits for training has an answer then;
        without one he waits for what only a submit could bring."""
        if self.model.writes_left is not None:
            self.recover()
        for _ in range(ROUNDS_MAX):
            flying = [group for group in self.model.groups.values() if group.in_flight]
            for group in flying:
                self.finish_group(group.name, values)
            if not flying or not self.model.waiting() or self._source is None:
                break
        if self._source is not None and self.model.waiting() and not self._patient:
            self.wrong(f"{self.model.waiting()} wait though everything goes well")
        self.check_log()

    def check_log(self) -> None:
        """The whole log replays to the book that the run has."""
        if self.story is not None:
            again = replayed(self.story.log.read())
            if again.state() != self.story.book.state():
                self.wrong("A replay of the log leads to another book than the one that the run has")

    # Looking -----------------------------------------------------------------------------------------

    def named(self, *phases: str) -> list[str]:
        """Names of the groups in these phases, in the order of submission."""
        return [group.name for group in self.model.groups.values() if group.phase in phases]

    @property
    def in_flight(self) -> list[Group]:
        return [group for group in self.model.groups.values() if group.phase in IN_FLIGHT]

    @property
    def ended(self) -> list[Group]:
        return [group for group in self.model.groups.values() if group.phase in ENDED]

    def play_arguments(self) -> str:
        """What `play` is given beside the lines, one to a line."""
        arguments = {
            "rules": repr(self._given),
            "source": "" if self._source is None else _source_as_code(self._source),
            "group_size": "" if self._group_size == 2 else repr(self._group_size),
            "admits": "True" if self._admits else "",
            "selection": "" if self._selection is None or self._watched is None else self._watched.name,
        }
        return "".join(f"    {name}={value},\n" for name, value in arguments.items() if value)

    # Both sides --------------------------------------------------------------------------------------

    def _tell(self, line: str, plain: Callable[[Model], None], *, dies: int | None = None) -> None:
        """One line, told to both and compared. The real side comes first, since it may ask the user's own rule."""
        self.lines.append(line)
        if self.story is not None:
            try:
                with hushed():
                    self.story.tell(line)
            except Exception as error:
                self._check_answers()  # A book that a rule has changed may raise anything.
                self.wrong(f"The library raised {type(error).__name__}: {error}", error)
            self._check_rule()
        self._told_plain(line, plain, dies)
        if self.story is not None:
            self._compare()

    def _told_plain(self, line: str, plain: Callable[[Model], None], dies: int | None) -> None:
        model = self.model
        if line.split()[0] in ("recover", "dies"):
            model.writes_left = dies
        try:
            plain(model)
        except Died:
            pass
        except AssertionError as error:
            self.wrong(f"The model expected something else: {error}", error)

    def _compare(self) -> None:
        story = self.story
        assert story is not None
        real, plain = self._feed(), self.model.said()
        if real != plain:
            self.wrong(f"The library and the plain model differ.\n{difference(real, plain)}")
        if answers := self.model.answers:
            if not self.died:
                self.wrong(f"The rule was asked {len(answers)} times more than the model expected")
            answers.clear()  # Of a process that died while it was asked.
        if story.died != self.died:
            self.wrong("The library and the plain model write a different number of times")
        if not self.died:
            self._check_waiters()
            self._check_story(story)

    def _check_story(self, story: Story) -> None:
        returned: Any = None
        try:
            if self._check is not None:
                returned = self._check(story)
        except Exception as error:
            what = f"The check doesn't hold: {str(error) or type(error).__name__}"
            self.wrong(what, error, kind=f"check {place_of(error)}")
        if complaint := no_answer(returned):
            self.wrong(f"The check {complaint}", kind="check")

    def _feed(self) -> list[Any]:
        """What was recorded, in the model's words; held against the invariants."""
        story = self.story
        assert story is not None
        records = list(story.log.read(self._compared + 1))
        self._compared += len(records)
        for record in records:
            for found in self.checker.feed(record):
                self.wrong(f"Invariant {found.invariant} ({INVARIANTS[found.invariant]}) is broken: {found}")
        return [told(record.event) for record in records if not isinstance(record.event, ev.RunStarted)]

    def _check_waiters(self) -> None:
        """Nobody waits for what can't come: with a source, whoever waits for training has something in flight to wait
        for; without one, and for validation, the explanation says what he waits for."""
        story = self.story
        assert story is not None
        assert story.controller is not None
        book = story.book
        mine = {request.number for request in self.model.requests}
        if not mine == set(book.requests) == set(story.controller.waiters):
            self.wrong(f"The model has {sorted(mine)} waiting, the library {sorted(story.controller.waiters)}")
        for partition in sorted({request.partition for request in book.requests.values()}):
            if partition == ev.TRAIN and self._source is not None:
                if not book.in_flight_count():
                    self._check_stall(book)
                continue
            explained = explaining.explain(
                book, self.rules, partition=partition, now_ns=0, has_source=self._source is not None, dispatches=False
            )
            if not (explained.blocked_by and explained.unblocked_by):
                self.wrong(f"The explanation doesn't say what the sampler waits for: {explained}")

    def _check_stall(self, book: Book) -> None:
        request = book.waiting()[0]
        if self._watched is None:
            self.wrong(f"Request {request.request} waits, and nothing is under way that it could wait for")
        if self._patient:
            return
        ready = ", ".join(group.group_id for group in book.ready())
        self.wrong(
            f"The rule {self._watched.name} lets a sample of {request.size} wait for ever: sampleable are "
            f"{ready}, nothing is in flight, and no prompt is drawn while so many are sampleable. Select from them, "
            "drop what will never be taken, or, if the rule waits for something else, say patient = True",
            kind="stall",
        )

    def _check_answers(self) -> None:
        watched = self._watched
        if watched is not None and (problem := watched.taken()) is not None:
            self.wrong(f"The rule {watched.name} {watched.complaint}", problem, kind=watched.kind)

    def _check_rule(self) -> None:
        """What the user's own rule did wrong in this line."""
        self._check_answers()
        story, watched = self.story, self._watched
        assert story is not None
        if watched is None:
            return
        for waiter in story.waiters:
            if isinstance(waiter.error, CustomRuleError):
                what = f"The rule {watched.name} is refused: {waiter.error}"
                self.wrong(what, waiter.error, kind=without_names(what))

    def wrong(self, what: str, cause: BaseException | None = None, *, kind: str = "") -> NoReturn:
        """Something is wrong.

        Args:
            kind: as for `BrokenStory`.

        Raises:
            BrokenStory: it, with the story so far.
        """
        self.broken = BrokenStory(what, self.lines, self.play_arguments(), kind)
        raise self.broken from cause


# Words -----------------------------------------------------------------------------------------------


def rows_in_words(rows: Sequence[Row]) -> str:
    return " | ".join(_row_in_words(row) for row in rows) if rows else "nothing"


def _row_in_words(row: Row) -> str:
    words = [f"{name}={number(value)}" for name, value in row.metrics.items()]
    if row.tokens is not None:
        words.append(f"tokens={row.tokens}")
    if row.versions:
        words.append("versions=" + ",".join(map(str, row.versions)))
    return " ".join(words)


def number(value: float) -> str:
    """As short as it can be read back."""
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def names(count: int) -> list[str]:
    """Ids of a source: r1, r2 and so on."""
    return [f"r{number}" for number in range(1, count + 1)]


def _source_as_code(source: Sequence[str]) -> str:
    count = len(source)
    return f'[f"r{{n}}" for n in range(1, {count + 1})]' if count > 3 and list(source) == names(count) else repr(source)


def _said(**options: str) -> str:
    return "".join(f" {name}={value}" for name, value in options.items() if value)
