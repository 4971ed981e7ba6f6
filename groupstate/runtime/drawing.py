"""Draws prompts from the source and submits them as groups.

Rule 1: which dataset a prompt is drawn from, and which weight version its group is made for, follow from the book.
Rule 2: what the source raises, or gives wrongly, is kept for whoever waits for it, and nothing more is drawn.
"""

from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.group import Group
from groupstate.core.prompt import GROUP_SIZE_MAX, Prompt, as_prompt, decoded_prompt, encoded_prompt, prompt_length
from groupstate.core.supply import next_dataset, next_target, refill_target
from groupstate.errors import BadInput, DuplicateGroup, LogFailed
from groupstate.logs import Logger
from groupstate.runtime.ledger import Ledger
from groupstate.runtime.session import describe
from groupstate.runtime.sources import MixedSource, Source

log = Logger("groupstate.drawing")


class Drawing:
    def __init__(self, ledger: Ledger, source: Source | None, *, group_size: int) -> None:
        self.ledger = ledger
        self.book: Book = ledger.book
        self.rules = ledger.rules
        self.source = source
        self.group_size = group_size
        """Sessions of a group whose prompt doesn't say."""
        self.error: Exception | None = None
        """What the source raised; nothing is drawn from it any more."""
        self.failed_at = 0
        """Index of the prompt at which it did."""
        self.prompts: dict[str, Prompt] = {}
        """Prompts of the groups in flight."""

    @property
    def possible(self) -> bool:
        return self.source is not None and not self.book.source_exhausted and self.error is None

    def seek(self) -> None:
        """Bring the source behind the last prompt that was submitted."""
        if isinstance(self.source, MixedSource):
            self.source.seek_each(self.book.source_positions)
        elif self.source is not None and self.book.source_position:
            self.source.seek(self.book.source_position)

    def draw(self, cause: ev.Cause, *, target_version: int | None = None) -> bool:
        """Submit the source's next prompt; False once there is none.

        Args:
            target_version: the weight version that an admitted group is made for, under rules that select by it;
                None: the next one that isn't full.
        """
        assert self.source is not None
        position = -1
        try:
            position = self.source.position
            drawn = self._next()
            if drawn is None:
                seq = self.ledger.record(ev.SourceExhausted(self.source.name, position))
                log.info("source exhausted", source=self.source.name, position=position, seq=seq)
                return False
            prompt, position = drawn
            n = None
            if cause == "refill":
                n = self.book.credits[0].size
                target_version = refill_target(self.book, self.rules) if self.rules.targets_versions else None
            self.submit(prompt, cause=cause, n=n, source_position=position, target_version=target_version)
        except LogFailed:
            raise
        except Exception as error:
            # The source is user code: what it raises, or gives wrongly, must reach whoever waits for it.
            log.error("the source failed", position=position, error=describe(error))
            self.error = error
            self.failed_at = position
            return False
        return True

    def _next(self) -> tuple[Prompt, int] | None:
        """The next prompt, and its index in the source or, of several, in its dataset's own."""
        source = self.source
        assert source is not None
        if not isinstance(source, MixedSource):
            position = source.position
            prompt = source.draw()
            return None if prompt is None else (as_prompt(prompt), position)
        while (name := next_dataset(self.book, self.rules, source.datasets)) is not None:
            position = source.position_of(name)
            prompt = source.draw_from(name)
            if prompt is not None:
                return prompt, position
            log.info("dataset exhausted", source=source.name, dataset=name, position=position)
        return None

    def submit(
        self,
        prompt: Prompt,
        *,
        cause: ev.Cause = "submit",
        n: int | None = None,
        partition: ev.Partition = ev.TRAIN,
        source_position: int = -1,
        weight_version: int | None = None,
        target_version: int | None = None,
        validation_round: bool = False,
    ) -> str:
        """Record a new group; returns its id.

        Args:
            n: finished sessions that the group needs; None takes the prompt's, then the run's.
        """
        group_id = self._free_id() if prompt.group_id is None else prompt.group_id
        encoded = encoded_prompt(prompt, group_id)
        where = self.book.is_taken(group_id)
        if where is not None:
            raise DuplicateGroup(group_id, where)
        target = self._target(partition, target_version)
        spare = self.rules.oversample if partition == ev.TRAIN else 0
        size = (n or prompt.n or self.group_size) + spare
        if size > GROUP_SIZE_MAX:
            raise BadInput(f"group {group_id!r} would have {size} sessions; it may have {GROUP_SIZE_MAX} at most")
        ref = self.ledger.log.payloads.put(encoded) if prompt.content is not None or prompt.extra else None
        self.ledger.record(
            ev.GroupSubmitted(
                group_id,
                size,
                partition,
                self.book.weight_version if weight_version is None else weight_version,
                self.book.lineage,
                cause,
                prompt.dataset,
                source_position,
                ref,
                prompt_length(prompt),
                target,
                spare,
                validation_round,
            )
        )
        self.prompts[group_id] = prompt
        return group_id

    def prompt_of(self, group: Group) -> Prompt:
        """The prompt of a group in flight.

        Raises:
            DamagedPayload: it can't be read.
        """
        known = self.prompts.get(group.group_id)
        if known is not None:
            return known
        if group.prompt is None:
            return Prompt(None, group.dataset, group.needed, group.group_id)
        data = self.ledger.log.payloads.get(group.prompt)
        return decoded_prompt(data, dataset=group.dataset, n=group.needed, group_id=group.group_id)

    def _target(self, partition: ev.Partition, asked: int | None) -> int | None:
        """The weight version that a group is made for; None where the rules select by nothing of the kind.

        Raises:
            BadInput: a version that nobody will sample by.
        """
        if not self.rules.targets_versions or partition != ev.TRAIN:
            if asked is not None:
                raise BadInput(
                    f"target_version {asked} has no effect here; it is for training groups under selection "
                    "'exact_version'"
                )
            return None
        if asked is None:
            return next_target(self.book, self.rules)
        if asked < self.book.weight_version:
            raise BadInput(f"target_version {asked} is over: the current weight version is {self.book.weight_version}")
        return asked

    def _free_id(self) -> str:
        number = self.book.totals["submitted"] + 1
        while self.book.is_taken(f"g{number}") is not None:
            number += 1
        return f"g{number}"
