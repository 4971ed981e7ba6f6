"""How the sessions of a reported group ended, as events, told from a status and trajectories.

Rule 1: the ends of all sessions are recorded at once, in order.
Rule 2: in a failed group a session without trajectories has failed: whether it ended well with none can't be told from
a status.
Rule 3: a trajectory that can't be recorded costs its session, as that of any other session does.
"""

from collections.abc import Mapping

from groupstate.core import events as ev
from groupstate.core.group import SETTLED, Group
from groupstate.errors import LogError, LogFailed, UnusableResult
from groupstate.logs import Logger
from groupstate.runtime.ledger import MESSAGE_CHARS_MAX, Ledger
from groupstate.runtime.reported import Reported, ReportedRow, record_of_row

log = Logger("groupstate.observed")


def record_starts(ledger: Ledger, group: Group) -> None:
    """Open the attempts of all sessions that have none open."""
    for number, session in enumerate(group.sessions):
        if session.state == "waiting":
            ledger.record(ev.SessionStarted(group.group_id, number, session.attempt, observed=True))


def record_ends(ledger: Ledger, group: Group, report: Reported) -> None:
    """Record how every session ended, as far as the status and the trajectories tell."""
    record_starts(ledger, group)
    by_session: dict[int, dict[int, ReportedRow]] = {}
    for session, index in sorted(report.rows):
        by_session.setdefault(session, {})[index] = report.rows[session, index]
    more = max(report.size or 0, max(by_session, default=-1) + 1)
    if more > group.size or report.size not in (None, group.size):
        text = "trajectories of sessions beyond are left out"
        log.warning("a group has another size than it was submitted with", group=group.group_id,
                    submitted=group.size, reported=more, consequence=text)  # fmt: skip
    ends = [
        _ending(ledger, group, number, by_session.get(number, {}), report.status)
        for number, session in enumerate(group.sessions)
        if session.state not in SETTLED
    ]
    failed = any(session.state == "failed" for session in group.sessions)
    if report.status == "failure" and not failed and all(isinstance(end, ev.SessionFinished) for end in ends):
        text = "its group is reported as failed, and every session has trajectories: the last one is taken to have"
        log.warning("a failed group has trajectories of every session", group=group.group_id, consequence=text)
        ends[-1] = _failure(group, ends[-1].session, "error", text)
    for end in ends:
        _record_end(ledger, group, end)


def record_loss(ledger: Ledger, group: Group, text: str) -> None:
    """Record that no session of it will end any more."""
    for number, session in enumerate(group.sessions):
        if session.state not in SETTLED:
            ledger.record(_failure(group, number, "lost", text))


def _ending(
    ledger: Ledger, group: Group, number: int, rows: Mapping[int, ReportedRow], status: str
) -> ev.SessionFinished | ev.SessionFailed:
    if not rows and status == "failure":
        return _failure(group, number, "error", "its group is reported as failed, and it has no trajectory")
    if not rows and ledger.rules.empty_session == "fail":
        return _failure(group, number, "empty", "its group is reported as finished, and it has no trajectory")
    who = f"of session {number} of group {group.group_id!r}"
    try:
        records = tuple(record_of_row(index, row, f"trajectory {index} {who}") for index, row in rows.items())
    except UnusableResult as error:
        log.warning(
            "a reported trajectory is unusable",
            group=group.group_id,
            session=number,
            attempt=group.sessions[number].attempt,
            error=str(error),
        )
        return _failure(group, number, "refused", str(error))
    return ev.SessionFinished(group.group_id, number, group.sessions[number].attempt, records, observed=True)


def _record_end(ledger: Ledger, group: Group, end: ev.SessionFinished | ev.SessionFailed) -> None:
    try:
        ledger.record(end)
    except LogFailed:
        raise
    except LogError as error:
        # Nothing was written: what got past the door can't be kept, and that is this session's failure alone.
        log.warning(
            "a reported session can't be kept",
            group=group.group_id,
            session=end.session,
            attempt=end.attempt,
            error=str(error),
        )
        ledger.record(_failure(group, end.session, "refused", str(error)))


def _failure(group: Group, number: int, failure: ev.FailureKind, message: str) -> ev.SessionFailed:
    text, attempt = message[:MESSAGE_CHARS_MAX], group.sessions[number].attempt
    return ev.SessionFailed(group.group_id, number, attempt, failure, text, observed=True)
