"""Every history of a small world, the shortest first.

`explore` goes through all states that a world can come to, by breadth: each state is reached first by a shortest
history, so what it finds wrong is told by the shortest story there is. Each step runs the real ledger and the real
controller with the rules in question, and the checks look on.

Rule 1: a state is expanded once; whether another run is the same is `key_of`'s to say.
Rule 2: from where something is wrong nothing goes on.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TypeAlias

import attrs

from groupstate.core import events as ev
from groupstate.core.arguments import shown
from groupstate.core.custom import CustomRule
from groupstate.core.rules import Rules
from groupstate.errors import BadSettings
from groupstate.logs import hushed
from groupstate.testing.attributes import check_runs
from groupstate.testing.exhaustive.cells import CELLS, why_missed
from groupstate.testing.exhaustive.sameness import Key, key_of
from groupstate.testing.exhaustive.stage import Cell, Stage, Wrong
from groupstate.testing.exhaustive.world import World

Check: TypeAlias = Callable[[Stage], str | None]
"""A check of the user's own on each state: what is wrong, or None."""

STATES_MAX: Final = 200_000
"""States at which a search gives up: some minutes, and about 2 GB."""


@attrs.frozen
class Breach:
    """Something that can't be true, and the shortest history that leads to it."""

    rule: str
    text: str
    story: tuple[str, ...]
    """Lines of the notation: `Story(...).tell(*story)` does it again."""

    def __str__(self) -> str:
        return "\n".join([f"{self.rule}: {self.text}", *(f"  {line}" for line in self.story)])


@attrs.frozen
class Exploration:
    """What a search has found."""

    world: World
    states: int
    transitions: int
    depth: int
    """Things that happen on the way to the state that is farthest away."""
    complete: bool
    """False where the search was ended before it was through."""
    cells: dict[Cell, tuple[str, ...]]
    """Cells of the table that some history goes through, each with the shortest."""
    outcomes: Counter[str]
    """Evictions, forfeits and refusals that were met, as text, by transitions."""
    breaches: tuple[Breach, ...]
    """One for each rule that is broken, the shortest story of each."""

    @property
    def missed(self) -> dict[Cell, str]:
        """Cells that no history goes through, each with the reason; empty where there is none that is known."""
        return {cell: why_missed(self.world, cell) for cell in CELLS if cell not in self.cells}


def explore(
    world: World,
    *,
    rules: Rules | None = None,
    selection: CustomRule | None = None,
    checks: Iterable[Check] = (),
    states_max: int = STATES_MAX,
    check_keys: bool = False,
) -> Exploration:
    """Go through every state that a world can come to.

    Args:
        rules: in place of the world's.
        selection: in place of the world's: a rule of your own, which may evict too.
        checks: called for each state; what they return is wrong with it, None if nothing is.
        states_max: states at which the search ends, `complete` or not.
        check_keys: make sure that runs which are taken for the same go on in the same way. Takes several times as long.
    """
    search = _Search(_changed(world, rules, selection), checks)
    search.onward = {} if check_keys else None
    with hushed():
        # What a rule did wrong is in the result, and not thousands of times in the log.
        search.run(states_max)
    return search.found()


def shortest_story(
    world: World,
    where: Callable[[Stage], bool],
    *,
    rules: Rules | None = None,
    selection: CustomRule | None = None,
    states_max: int = STATES_MAX,
) -> tuple[str, ...] | None:
    """The shortest history to a state that `where` is true of, as lines of the notation; None if there is none."""
    check_runs("where", where, "it must be a plain function that returns whether this is the state")
    search = _Search(_changed(world, rules, selection), ())
    with hushed():
        return search.run(states_max, where)


def _changed(world: World, rules: Rules | None, selection: CustomRule | None) -> World:
    return attrs.evolve(
        world, rules=rules or world.rules, selection=selection if selection is not None else world.selection
    )


Onward: TypeAlias = tuple[str, int, Key]
"""A verb, whether a crash follows, and where it leads."""


@attrs.frozen
class _Node:
    """A state, by the way to it."""

    before: int
    lines: tuple[str, ...]
    depth: int


class _Search:
    def __init__(self, world: World, checks: Iterable[Check]) -> None:
        self.world = world
        self.checks = tuple(checks)
        for check in self.checks:
            check_runs(
                f"check {_name(check)}", check, "it must be a plain function that returns what is wrong, or None"
            )
        self.nodes: list[_Node] = []
        self.known: dict[Key, int] = {}
        self.queue: deque[tuple[int, Stage]] = deque()
        self.transitions = 0
        self.complete = False
        self.cells: dict[Cell, tuple[str, ...]] = {}
        self.outcomes: Counter[str] = Counter()
        self.breaches: dict[str, Breach] = {}
        self.onward: dict[Key, frozenset[Onward]] | None = None
        """What each state leads to, for checking that other runs of the same key lead to the same."""

    def run(self, states_max: int, where: Callable[[Stage], bool] | None = None) -> tuple[str, ...] | None:
        """Search until there is nothing new, or `where` is true; returns the story to that."""
        stage = Stage(self.world)
        begin = _Node(-1, (), 0)
        if self.world.admits:
            # Changes nothing; the rules admit what there is room for.
            begin = _Node(-1, ("publish 0",), 0)
            stage.go("publish 0")
            stage.spent.clear()
        if self._is_new(begin, stage) and where is not None and where(stage):
            return begin.lines
        while self.queue and len(self.nodes) < states_max:
            number, stage = self.queue.popleft()
            for after, lines in successors(stage):
                self.transitions += 1
                node = _Node(number, lines, self.nodes[number].depth + 1)
                if self._is_new(node, after) and where is not None and where(after):
                    return self._story(node)
        self.complete = not self.queue
        return None

    def _is_new(self, node: _Node, stage: Stage) -> bool:
        """Look at what a step led to; True for a state that nothing is wrong with and that nobody came to before."""
        for cell in stage.cells:
            if cell not in self.cells:
                self.cells[cell] = self._story(node)
        self._count(stage)
        wrong = list(stage.wrong)
        key = None
        if not wrong:
            key = stage.key = key_of(stage)
            if self.onward is not None:
                wrong += self._wrong_key(key, stage)
            if key in self.known and not wrong:
                return False
            wrong += stage.wrong_replay()
            wrong += [Wrong(_name(check), text) for check in self.checks if (text := _text(check, stage)) is not None]
        if wrong:
            for found in wrong:
                self.breaches.setdefault(found.rule, Breach(found.rule, found.text, self._story(node)))
            return False
        assert key is not None
        number = self.known[key] = len(self.nodes)
        self.nodes.append(node)
        self.queue.append((number, stage))
        return True

    def _wrong_key(self, key: Key, stage: Stage) -> Iterator[Wrong]:
        assert self.onward is not None
        leads = frozenset((lines[0].partition(" ")[0], len(lines), key_of(after)) for after, lines in successors(stage))
        known = self.onward.setdefault(key, leads)
        if known != leads:
            yield Wrong(
                "key",
                f"this and {self._story(self.nodes[self.known[key]])} are taken for the same, and aren't: "
                f"{known ^ leads}",
            )

    def _count(self, stage: Stage) -> None:
        for record in stage.log.read(stage.began + 1):
            name = _OUTCOMES.get(type(record.event))
            if name is not None:
                self.outcomes[name(record.event)] += 1

    def _story(self, node: _Node) -> tuple[str, ...]:
        parts = [node.lines]
        while node.before >= 0:
            node = self.nodes[node.before]
            parts.append(node.lines)
        return tuple(line for lines in reversed(parts) for line in lines)

    def found(self) -> Exploration:
        return Exploration(
            self.world,
            len(self.nodes),
            self.transitions,
            max([node.depth for node in self.nodes], default=0),
            self.complete,
            self.cells,
            self.outcomes,
            tuple(self.breaches.values()),
        )


def successors(stage: Stage) -> Iterator[tuple[Stage, tuple[str, ...]]]:
    """Everything that can come of a state in one step, with the lines that lead there. Each is to be looked at before
    the next is asked for."""
    for line in stage.moves():
        after = stage.fork()
        after.go(line)
        yield after, (line,)
        if stage.world.torn and not after.wrong and after.may("recover"):
            for keep in after.commits[:-1]:
                torn = stage.fork()
                torn.take(after, keep)
                torn.go("recover")
                yield torn, (line, f"recover keep={keep}")
    after = stage
    for line in stage.late_moves():
        # They change nothing, so that one may come on top of the other.
        after = stage.fork() if after is stage or after.wrong else after
        after.go(line)
        if key_of(after) != stage.key:
            after.wrong.append(Wrong("late", "a second result, or one for an attempt that is over, changed something"))
        yield after, (line,)


def _text(check: Check, stage: Stage) -> str | None:
    """
    Raises:
        BadSettings: what it returned is no text that says what is wrong.
    """
    text: Any = check(stage)
    if text is None or isinstance(text, str):
        return text
    raise BadSettings(f"check {_name(check)} returned {shown(text)}; it must return what is wrong as a text, or None")


def _name(check: Check) -> str:
    return getattr(check, "__name__", type(check).__name__)


_OUTCOMES: Final[dict[type[ev.Event], Callable[[Any], str]]] = {
    ev.GroupEvicted: lambda event: f"evicted as {' and '.join(event.reasons)}, credit {event.credit}",
    ev.GroupFinished: lambda event: "finished in part" if event.partial else "finished",
    ev.GroupFailed: lambda event: "failed, cancelled" if event.cancelled else "failed",
    ev.GroupRequeued: lambda event: "requeued by the rules" if event.by_rule else f"requeued: {event.reason}",
    ev.RefillForfeited: lambda event: f"forfeited: {event.reason}",
    ev.ResultFenced: lambda event: f"fenced: {event.reason}",
    ev.BatchRequestCancelled: lambda event: f"request ended: {event.reason}",
    ev.BatchReturned: lambda event: f"returned: {event.reason}",
    ev.AdmissionHeld: lambda event: f"held: {event.reason}" if event.reason else "hold over",
    ev.GroupSubmitted: lambda event: f"submitted: {event.cause}",
}
"""What is counted, beside cells."""
