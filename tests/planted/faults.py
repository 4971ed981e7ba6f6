"""Faults that are planted into the library, each as somebody could have written it; what tests the library has to find
them. Each takes pytest's `monkeypatch`, or what is like it."""

from msgspec.structs import replace

from groupstate.core import events as ev
from groupstate.core import evict, group, snapshot
from groupstate.core.phases import Phase
from groupstate.errors import LogFailed
from groupstate.log.commit import GroupCommit
from groupstate.log.snapshots import SnapshotInfo
from groupstate.runtime import controller, keeping, ledger, refusals, run
from groupstate.runtime.controller import Controller
from groupstate.simulate.faults import FaultyDisk
from groupstate.testing.exhaustive import stage


def cancelled_sampler_keeps_its_groups(patch):
    """Cancelled between its claim and its answer, a sampler gives nothing back."""
    whole = Controller._take_back

    def take_back(self, waiter, reason):
        if waiter.claim is None:
            whole(self, waiter, reason)

    patch.setattr(Controller, "_take_back", take_back)


def lost_wake_up(patch):
    """Now and then a sampler that was served isn't woken."""
    whole = Controller._answer

    def answer(self, waiter):
        if waiter.request % 10:
            whole(self, waiter)
        else:
            del self.waiters[waiter.request]

    patch.setattr(Controller, "_answer", answer)


def waiter_on_a_dead_rollout(patch):
    """Nobody tells samplers that the rollout is gone."""
    whole = refusals.refusal

    def refusal(controller, request):
        gone = controller.dead is not None and not isinstance(controller.dead, LogFailed)
        return None if gone else whole(controller, request)

    patch.setattr(refusals, "refusal", refusal)


def fence_ignored(patch):
    """A result of an attempt that is over is taken for one of the attempt that runs."""
    whole = ledger.fence_reason

    def fence_reason(group, session, attempt, result):
        reason = whole(group, session, attempt, result)
        return None if reason == "attempt" else reason

    finish = ledger.Ledger.finish

    def finish_any(self, group_id, session, attempt, result):
        group = self.book.groups.get(group_id)
        open_ = group is not None and group.sessions[session].state == "open"
        return finish(self, group_id, session, group.sessions[session].attempt if open_ else attempt, result)

    patch.setattr(ledger, "fence_reason", fence_reason)
    patch.setattr(ledger.Ledger, "finish", finish_any)


def requeue_keeps_old_trajectories(patch):
    """A group that starts over keeps what its sessions had yielded, and doesn't replace it."""
    requeued, finished = group._requeued, group._finished

    def requeue(before, event, phase, seq, at_ns):
        after = requeued(before, event, phase, seq, at_ns)
        kept = tuple(
            replace(new, trajectories=old.trajectories, payload=old.payload)
            for old, new in zip(before.sessions, after.sessions, strict=True)
        )
        return replace(after, kept=kept)

    def finish(before, event, phase, seq, at_ns):
        after = finished(before, event, phase, seq, at_ns)
        old = before.sessions[event.session]
        if old.payload is None:
            return after
        sessions = list(after.sessions)
        new = sessions[event.session]
        sessions[event.session] = replace(new, trajectories=old.trajectories, payload=old.payload)
        return replace(after, kept=tuple(sessions))

    for cells in group._STEPS.values():
        for kind, own in ((ev.GroupRequeued, requeue), (ev.SessionFinished, finish)):
            if kind in cells:
                patch.setitem(cells, kind, (own, cells[kind][1]))


def fsync_skipped(patch):
    """The disk is told to flush, and nobody does."""

    def fdatasync(self, fd):
        self._due(f"flush {self._name_of(fd)}")

    patch.setattr(FaultyDisk, "fdatasync", fdatasync)


def acknowledged_before_it_is_written(patch):
    """Events count as durable when they are posted."""
    whole = GroupCommit.wait

    async def wait(self, seq):
        if seq > self.last_seq:
            await whole(self, seq)

    patch.setattr(GroupCommit, "wait", wait)


def commit_not_awaited(patch):
    """`run.commit` returns before the commit is durable."""

    async def commit(self, batch):
        self.ledger.commit(*run._named(batch))
        self._controller.settle()

    patch.setattr(run.Run, "commit", commit)


def credited_twice(patch):
    """An eviction earns one refill more than it should."""
    whole = evict.credit_of

    def credit_of(reasons, rules, *, unmet):
        credit = whole(reasons, rules, unmet=unmet)
        return credit + bool(credit)

    for module in (evict, controller):
        patch.setattr(module, "credit_of", credit_of)


def terminal_published_early(patch):
    """A group ends with the last but one of its sessions."""
    whole = ledger.terminal_event

    def terminal_event(after, *, survivors_min, cancelled):
        if after.settled_count == after.size - 1 and after.finished_count:
            return ev.GroupFinished(after.group_id)
        return whole(after, survivors_min=survivors_min, cancelled=cancelled)

    def unchecked(before, event, phase, seq, at_ns):
        return replace(before, phase=Phase.FINISHED, terminal=Phase.FINISHED, terminal_seq=seq, last_seq=seq)

    patch.setattr(ledger, "terminal_event", terminal_event)
    cells = group._STEPS[Phase.RUNNING]
    patch.setitem(cells, ev.GroupFinished, (unchecked, Phase.FINISHED))


def boundary_off_by_one(patch):
    """A lag of exactly the bound counts as stale: `>=` for `>`."""

    def is_stale(group, lag, rules):
        bound = rules.lag_bound(group.dataset) if rules.drops_stale else None
        return bound is not None and lag >= bound

    patch.setattr(evict, "is_stale", is_stale)


def snapshot_off_by_one(patch):
    """A snapshot says that it holds one event more than it does, so that going on from it leaves that one out."""

    def capture(book):
        taken = snapshot.capture(book)
        taken.state.last_seq += 1
        return taken

    def info(seq, *rest):
        return SnapshotInfo(seq + 1, *rest)

    patch.setattr(keeping, "capture", capture)
    patch.setattr(keeping, "SnapshotInfo", info)
    patch.setattr(stage, "capture", capture)


def stale_groups_stay(patch):
    """Nobody looks for groups that a new weight version has made too old."""
    patch.setattr(controller, "newly_stale", lambda book, rules: [])


TEN = {
    "terminal published early": terminal_published_early,
    "lost wake-up": lost_wake_up,
    "credit twice": credited_twice,
    "snapshot off by one": snapshot_off_by_one,
    "fsync skipped": fsync_skipped,
    "a cancelled sampler keeps its groups": cancelled_sampler_keeps_its_groups,
    "requeue keeps old trajectories": requeue_keeps_old_trajectories,
    "boundary off by one": boundary_off_by_one,
    "a waiter on a dead rollout": waiter_on_a_dead_rollout,
    "fence ignored": fence_ignored,
}
"""Those that every tool is tried on."""
