"""Groups and attempts for users who dispatch sessions themselves, callable from any thread."""

from typing import TYPE_CHECKING, Any, TypeVar, get_args

import attrs

from groupstate.core.arguments import boolean, integer, string
from groupstate.core.events import FailureKind
from groupstate.core.prompt import Prompt
from groupstate.errors import SessionStateError
from groupstate.runtime.session import RetryableError, describe

if TYPE_CHECKING:
    from groupstate.runtime.run import Run

T = TypeVar("T")

REPORTABLE = tuple(kind for kind in get_args(FailureKind) if kind != "spare")
"""What a session can be reported as. That it isn't needed any more is for the ledger to say."""


@attrs.define(eq=False)
class Attempt:
    """One try of a session, open until `finish` or `fail`."""

    group_id: str
    session: int
    number: int
    _run: "Run" = attrs.field(repr=False)
    _ended: str = ""

    def finish(self, trajectories: Any) -> bool:
        """Record the result: a `Trajectory`, a list of them, or None.

        Returns:
            False if it came too late and was fenced.

        Raises:
            UnusableResult: it can't be recorded; the session's failure is.
            SessionStateError: this attempt was ended by this handle before.
        """

        def record() -> bool:
            self._need_open("finish")
            self._ended = "finish"
            return self._run.ledger.finish(self.group_id, self.session, self.number, trajectories) is None

        return self._run.in_loop(record)

    def fail(self, error: BaseException | str, *, kind: FailureKind = "error", retryable: bool | None = None) -> bool:
        """Record that the attempt ended without a result.

        Args:
            retryable: None means: if the error is a `RetryableError`.

        Returns:
            False if it came too late and was fenced.

        Raises:
            SessionStateError: this attempt was ended by this handle before.
        """
        if kind not in REPORTABLE:
            raise SessionStateError(f"a failure is of kind {', '.join(REPORTABLE)}, not {kind!r}")
        again = isinstance(error, RetryableError) if retryable is None else boolean("retryable", retryable)
        text = describe(error) if isinstance(error, BaseException) else str(error)

        def record() -> bool:
            self._need_open("fail")
            self._ended = "fail"
            ledger = self._run.ledger
            return ledger.fail(self.group_id, self.session, self.number, kind, text, retryable=again) is None

        return self._run.in_loop(record)

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for this attempt any more; its result would be fenced."""
        group = self._run.book.groups.get(self.group_id)
        if group is None or not group.in_flight:
            return True
        session = group.sessions[self.session]
        return session.attempt != self.number or session.state != "open"

    def _need_open(self, what: str) -> None:
        if self._ended:
            raise SessionStateError(
                f"attempt {self.number} of session {self.session} of group {self.group_id!r} was ended by "
                f"{self._ended}() on this handle, so {what}() cannot follow; one call ends an attempt"
            )


@attrs.frozen(eq=False)
class GroupHandle:
    """A submitted group."""

    id: str
    size: int
    prompt: Prompt
    _run: "Run" = attrs.field(repr=False)

    def start(self, session: int, *, worker: str = "") -> Attempt:
        """Begin the attempt of a session that is due.

        Raises:
            SessionStateError: the session is under way or has ended; or there is no such session.
            UnknownGroup: the group has left.
        """
        place = integer("session", session)
        string("worker", worker)
        number = self._run.in_loop(lambda: self._start(place, worker))
        return Attempt(self.id, place, number, self._run)

    def _start(self, session: int, worker: str) -> int:
        group = self._run.book.group(self.id, f"start session {session}")
        if 0 <= session < group.size and group.sessions[session].state != "waiting":
            state = group.sessions[session]
            raise SessionStateError(
                f"session {session} of group {self.id!r} is {state.state} in attempt {state.attempt}, so it cannot "
                "start; a session starts once per attempt"
            )
        number = self._run.ledger.start(self.id, session, worker=worker)
        assert number is not None, "a session that waits can be started"
        return number

    @property
    def phase(self) -> str:
        """Where the group is now; `evicted` or `committed` once it has left."""
        group = self._run.book.groups.get(self.id)
        return str(group.phase if group is not None else self._run.book.departed[self.id])
