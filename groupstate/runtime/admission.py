"""How many prompts are drawn, and when none is: refills, admission, and the credit that is forfeited.

Rule 1: refills go first; they take the places that the evicted groups gave back.
Rule 2: where want of room or a group at the lag bound holds admission, the log says from when on, and until when.
"""

from typing import TYPE_CHECKING

from groupstate.core import events as ev
from groupstate.core.rules import PerBatch
from groupstate.core.select import why_held
from groupstate.core.supply import admissible, forfeits, refills_now, short_of, shortage
from groupstate.logs import Logger
from groupstate.runtime import refusals
from groupstate.runtime.drawing import Drawing

if TYPE_CHECKING:
    from groupstate.runtime.controller import Controller

log = Logger("groupstate.controller")


class Admission:
    """Its steps return whether anything was recorded, as those of the controller do."""

    def __init__(self, controller: "Controller", drawing: Drawing) -> None:
        self._controller = controller
        self._drawing = drawing
        self._ledger = controller.ledger
        self._book = controller.book
        self._rules = controller.rules
        self.refills_outside = False
        """Somebody outside finds the prompts for refills, so that credit is kept for him though there is no source."""

    def forfeit(self) -> bool:
        found = forfeits(self._book, self._rules)
        if found is None and self._book.credits and not self._drawing.possible and not self.refills_outside:
            found = len(self._book.credits), "no source" if self._drawing.source is None else "source failed"
        if found is None:
            return False
        self._ledger.record(ev.RefillForfeited(*found))
        return True

    def refill(self) -> bool:
        if not self.may_draw() or self._no_room():
            return False
        count = refills_now(self._book, self._rules)
        for _ in range(count):
            if not self._drawing.draw("refill"):
                return True
        return count > 0

    def admit(self) -> bool:
        controller, book, rules = self._controller, self._book, self._rules
        if controller.closing:
            return False
        held = why_held(book, rules) is not None
        reason = self._no_room() if self._drawing.possible else ""
        if reason and reason != book.held_reason:
            log.warning("nothing is drawn for want of room; see `groupstate disk`", reason=reason)
        if not reason and held and controller.admits and self._drawing.possible:
            reason = "a group in flight is at the lag bound"
        self._hold(reason)
        if reason or held or not self.may_draw():
            return False
        urgent = max(shortage(book, rules), self._watched_shortage())
        count = max(urgent, admissible(book, rules) if controller.admits else 0)
        for number in range(count):
            target = book.weight_version if rules.targets_versions and number < urgent else None
            if not self._drawing.draw("admission", target_version=target):
                return True
        return count > 0

    def may_draw(self) -> bool:
        return not self._controller.closing and self._drawing.possible and not self._is_streak()

    def _is_streak(self) -> bool:
        """Group after group was evicted: nothing more is drawn until a sampler has been told."""
        controller = self._controller
        return controller.streak > 0 and controller.streak >= self._rules.streak_bound(
            controller.demand() or max(controller.watched, default=1)
        )

    def _no_room(self) -> str:
        space = self._controller.space
        return "" if space is None else space.problem

    def _watched_shortage(self) -> int:
        """What `wait_sampleable` looks out for is drawn too, as far as admission's bounds allow."""
        watched = self._controller.watched
        if not watched or refusals.unjudged_streak(self._controller):
            return 0
        short = short_of(self._book, self._rules, max(watched))
        if isinstance(self._rules.admission_rule, PerBatch):
            return short
        return min(short, admissible(self._book, self._rules))

    def _hold(self, reason: str) -> None:
        """Write down where a hold begins and where it ends, once."""
        if reason != self._book.held_reason:
            self._ledger.record(ev.AdmissionHeld(reason))
