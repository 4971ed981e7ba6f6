"""A small world: rules, a few groups, and what may happen to them, how often.

Rule: what isn't bounded by `at_most` may happen as often as it can. The search ends all the same, since the groups are
few and whatever comes back to where it was is known.
"""

import functools
from collections.abc import Mapping
from typing import Final

import attrs

from groupstate.core.arguments import integer, integer_or_none
from groupstate.core.custom import CustomRule
from groupstate.core.rules import Rules
from groupstate.errors import BadSettings
from groupstate.runtime.options import check_rules, check_selection
from groupstate.testing import attributes, said
from groupstate.testing.notation import Story

BOUNDED: Final = ("publish", "mark", "recover", "cancel", "requeue", "fail", "damage", "finish", "sample", "release")
"""Verbs that `at_most` may bound, as in `groupstate.testing.notation`."""

ALWAYS_BOUNDED: Final = frozenset({"publish", "mark", "recover", "cancel", "requeue", "fail", "damage"})
"""Those that don't happen at all where `at_most` doesn't name them; without an end they would lead on for ever."""


def _at_most(value: Mapping[str, int]) -> dict[str, int]:
    return dict(value)


@attrs.frozen(kw_only=True)
class World:
    rules: Rules = attrs.field(factory=Rules)
    groups: int = 2
    """Groups that the user submits, one after the other, at any time."""
    sessions: int = 2
    """Sessions that each group needs."""
    validation: int = 0
    """Groups of the validation partition, beside those."""
    source: int | None = None
    """Prompts of the source that refills and admission draw from; None: there is no source."""
    admits: bool = False
    """A rollout runs, so that admission starts new prompts."""
    outcomes: tuple[str, ...] = ("reward=1",)
    """What a session may bring, as in `finish ID.S ...`: metrics, or `nothing`."""
    failures: tuple[str, ...] = ("error",)
    """How a session may fail, as in `fail ID.S ...`: a kind, and `retryable`."""
    batch: int = 1
    """Groups per `sample()`."""
    waiting_max: int = 1
    """Calls of `sample()` that wait at the same time, per partition."""
    withdraws: bool = True
    """A `sample()` may be given up, before or after it was served."""
    late: bool = True
    """Results come twice, for attempts that are over, and for groups that have left."""
    runs: bool = False
    """Sessions run as tasks: a group that is given up ends only later, and its sessions may end otherwise till then."""
    torn: bool = True
    """A crash may fall between any two commits of one step, as well as between two steps."""
    rewinds: tuple[str, ...] = ()
    """What `recover at=MARK` may do with what ended behind the mark: `keep`, `evict`."""
    at_most: Mapping[str, int] = attrs.field(factory=dict, converter=_at_most)
    """How often each of these may happen in one history: publish, mark, recover (crashes), cancel, requeue, fail,
    damage; not at all where they aren't named. finish, sample and release may be bounded too."""
    selection: CustomRule | None = None
    """A function in place of the rules' own selection. Without it one that the rules name is loaded."""

    patient: bool = False
    """A selection of your own may keep a sampler waiting although enough groups are sampleable, nothing is in flight,
    and the user has submitted all that he does."""

    def __attrs_post_init__(self) -> None:
        """
        Raises:
            BadSettings: there can be no such world.
        """
        check_rules(self.rules)
        check_selection(self.selection)
        for name, least in (("groups", 0), ("sessions", 1), ("validation", 0), ("batch", 1), ("waiting_max", 0)):
            integer(name, getattr(self, name), least=least, error=BadSettings)
        integer_or_none("source", self.source, least=0, error=BadSettings)
        attributes.check_booleans("World", self, "admits", "withdraws", "late", "runs", "torn", "patient")
        attributes.check_ends("outcomes", self.outcomes)
        kinds = "kinds of failure, such as ('error', 'error retryable')"
        attributes.check_texts("failures", self.failures, kinds, may_be_empty=True)
        for verb, most in self.at_most.items():
            if verb not in BOUNDED:
                raise BadSettings(f"at_most names {verb!r}; it can bound {', '.join(BOUNDED)}")
            integer(f"at_most[{verb!r}]", most, least=0, error=BadSettings)
        for how in self.rewinds:
            if how not in ("keep", "evict"):
                raise BadSettings(f"rewinds names {how!r}; a rewind is 'keep' or 'evict'")

    def bound(self, verb: str) -> int | None:
        """How often a verb may occur; None: as often as it can."""
        return self.at_most.get(verb, 0 if verb in ALWAYS_BOUNDED else None)

    def submissions(self) -> list[str]:
        """The lines that submit the user's groups, in order. Which partition comes first makes no difference."""
        training = [f"submit g{number}/{self.sessions}" for number in range(1, self.groups + 1)]
        validating = [f"submit v{n}/{self.sessions} partition=val" for n in range(1, self.validation + 1)]
        return training + validating

    @property
    def rules_in_force(self) -> Rules:
        """The rules, which name a selection of your own as those of an opened run do."""
        return said.rules_in_force(self.rules, self.selection)

    @functools.cached_property
    def own_rule(self) -> CustomRule | None:
        """The selection of your own, given or named by the rules.

        Raises:
            BadSettings: it can't be found, or can't be called as a selection.
        """
        return said.rule_of(self.rules, self.selection)

    def told(self, *lines: str) -> Story:
        """A history of this world, told again; replayed after every event."""
        story = Story(
            rules=self.rules_in_force,
            source=self.prompts(),
            group_size=self.sessions,
            admits=self.admits,
            selection=self.own_rule,
            runs=self.runs,
        )
        return story.tell(*lines)

    def prompts(self) -> list[str] | None:
        """Ids of the source's groups."""
        return None if self.source is None else [f"r{number}" for number in range(1, self.source + 1)]
