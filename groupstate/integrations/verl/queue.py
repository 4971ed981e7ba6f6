"""One partition of TransferQueue: what its listing says of groups, and what changed since the listing before.

Rule 1: what is listed is read here and nowhere else, and nothing of it is trusted: a key that fits nowhere is passed
over with one warning.
Rule 2: behind the listing itself a look costs one comparison for each key, and work for what changed.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import attrs

from groupstate.errors import BadInput
from groupstate.logs import Logger
from groupstate.runtime.reported import ENDED, ReportedRow, split_key

log = Logger("groupstate.verl")

REWARD: Final = "reward"
"""The metric that verl reads from `rm_scores`; every other one is looked for in `reward_extra_info`."""

Place = tuple[int, int]
"""Session and index of a trajectory."""


@attrs.define
class Listed:
    """What is listed of one group."""

    tag: Mapping[str, Any] | None = None
    """The prompt's; None while only trajectories are listed, or once the prompt was taken out."""
    rows: dict[Place, str] = attrs.field(factory=dict)
    """Keys of its trajectories."""

    @property
    def ended(self) -> bool:
        return self.tag is not None and self.tag.get("status") in ENDED

    @property
    def in_flight(self) -> bool:
        return self.tag is not None and self.tag.get("status") in ("pending", "running")


@attrs.frozen
class Changes:
    changed: list[str]
    """Groups that are new or different, in the order of the listing."""
    removed: list[str]
    """Groups whose prompt isn't listed any more."""


class Partition:
    def __init__(self, name: str, *, split_left: bool = False, unordered: bool = False) -> None:
        """
        Args:
            split_left: the uid ends at a key's first underscore.
            unordered: groups that are first seen together come in the order of a set.
        """
        self.name = name
        self.groups: dict[str, Listed] = {}
        self.tags: Mapping[str, Any] = {}
        """The latest listing."""
        self.seen = False
        """Somebody has taken in what is listed."""
        self._split = _split_left if split_left else _split_right
        self._unordered = unordered
        self._strange: dict[str, Any] = {}
        """Keys that fit nowhere, with their tags as they were last seen."""

    # Looking -----------------------------------------------------------------------------------------

    def look(self) -> Changes:
        """List the partition, and say what changed."""
        before, self.tags = self.tags, listing(self.name)
        tags = self.tags
        changed = [
            uid for uid, group in self.groups.items() if group.tag is not None and _differs(tags, uid, group.tag)
        ]
        for uid in changed:
            self._take_prompt(uid, tags[uid])
        again = [key for key, tag in self._strange.items() if _differs(tags, key, tag)]
        new = [key for key in tags if key not in before]
        touched: dict[str, None] = dict.fromkeys(changed)
        for key in (*again, *new):
            if (touches := self._take(key, tags[key])) is not None:
                touched[touches] = None
        removed = []
        if len(before) + len(new) > len(tags):
            removed = [key for key in before if key not in tags and self._drop(key, touched)]
        found = [uid for uid in touched if uid in self.groups and self.groups[uid].tag is not None]
        return Changes(self._in_order(found), removed)

    def _take(self, key: str, tag: Any) -> str | None:
        """Take in a key that is new; the group that it changes, if it does."""
        self._strange.pop(key, None)
        if not isinstance(tag, Mapping):
            self._pass_over(key, tag, f"its tag is {type(tag).__name__}")
            return None
        if tag.get("is_prompt", False):
            self._take_prompt(key, tag)
            return key
        try:
            uid, place = self._split(key)
        except BadInput as error:
            self._pass_over(key, tag, str(error))
            return None
        group = self.groups.setdefault(uid, Listed())
        group.rows[place] = key
        # Nobody needs to know of the trajectories of a group that hasn't ended.
        return uid if group.ended else None

    def _take_prompt(self, uid: str, tag: Any) -> None:
        self.groups.setdefault(uid, Listed()).tag = tag if isinstance(tag, Mapping) else {}

    def _pass_over(self, key: str, tag: Any, problem: str) -> None:
        if not self._strange:
            log.warning("a key of TransferQueue is passed over", partition=self.name, key=key, problem=problem)
        self._strange[key] = tag

    def _drop(self, key: str, touched: dict[str, None]) -> bool:
        """Forget a key that isn't listed any more; True if it was a prompt's."""
        if key in self._strange:
            del self._strange[key]
            return False
        group = self.groups.get(key)
        if group is not None and group.tag is not None:
            group.tag = None
            self._forget_empty(key)
            return True
        uid, place = self._split(key)
        group = self.groups.get(uid)
        if group is not None and group.rows.get(place) == key:
            # Else another key stands for the same trajectory, which this one was taken to be.
            del group.rows[place]
            touched[uid] = None
            self._forget_empty(uid)
        return False

    def _forget_empty(self, uid: str) -> None:
        group = self.groups[uid]
        if group.tag is None and not group.rows:
            del self.groups[uid]

    def listed(self) -> list[str]:
        """Groups whose prompt is listed."""
        return self._in_order([uid for uid in self.tags if uid in self.groups and self.groups[uid].tag is not None])

    def _in_order(self, uids: list[str]) -> list[str]:
        return list(set(uids)) if self._unordered else uids

    def row(self, key: str, metrics: Mapping[str, float], not_finite: tuple[str, ...] = ()) -> ReportedRow:
        """A trajectory as its tag tells it."""
        tag = self.tags[key]
        oldest, newest = _count(tag, "min_global_steps"), _count(tag, "max_global_steps")
        known = oldest is not None and newest is not None and oldest <= newest
        return ReportedRow(
            metrics=metrics,
            not_finite=not_finite,
            prompt_tokens=_count(tag, "prompt_len") or 0,
            response_tokens=_count(tag, "response_len") or 0,
            versions=(oldest, newest) if known else None,  # type: ignore[arg-type]
        )

    # Doing -------------------------------------------------------------------------------------------

    def keys_of(self, uid: str) -> list[str]:
        """All keys of a group that are listed."""
        group = self.groups.get(uid)
        if group is None:
            return []
        return [*([uid] if group.tag is not None else []), *group.rows.values()]

    def clear(self, keys: Iterable[str]) -> None:
        """Take keys out of TransferQueue."""
        listed = list(keys)
        if listed:
            transfer_queue().kv_clear(keys=listed, partition_id=self.name)

    def values(self, keys: list[str], metric: str) -> dict[str, float]:
        """A metric of trajectories, as far as they have it."""
        if metric == REWARD:
            scores = zip(keys, self._column(keys, "rm_scores"), strict=True)
            return {key: float(each.sum().item()) for key, each in scores if each is not None}
        infos = self.infos(keys)
        return {key: value for key, info in infos.items() if (value := number(info.get(metric))) is not None}

    def infos(self, keys: list[str]) -> dict[str, Mapping[Any, Any]]:
        """What trajectories have as `reward_extra_info`; nothing for those that lack it."""
        return {key: _extra_info(each) for key, each in zip(keys, self._column(keys, "extra_fields"), strict=True)}

    def _column(self, keys: list[str], field: str) -> list[Any]:
        """A field of trajectories; None for those that lack it."""
        if not keys:
            return []
        try:
            return list(transfer_queue().kv_batch_get(keys=keys, partition_id=self.name, select_fields=[field])[field])
        except (KeyError, ValueError):
            # Some lack the field, and TransferQueue doesn't say which.
            if len(keys) == 1:
                return [None]
            half = len(keys) // 2
            return self._column(keys[:half], field) + self._column(keys[half:], field)


def listing(partition: str) -> Mapping[str, Any]:
    """Keys and tags of a partition."""
    found = (transfer_queue().kv_list(partition_id=partition) or {}).get(partition, {})
    return found if isinstance(found, Mapping) else {}


def transfer_queue() -> Any:
    """TransferQueue's interface, which the trainer has started."""
    import transfer_queue

    return transfer_queue


def _differs(tags: Mapping[str, Any], key: str, tag: Any) -> bool:
    """Whether a key is listed with another tag."""
    now = tags.get(key, tag)
    return bool(now is not tag and now != tag)


def _split_right(key: str) -> tuple[str, Place]:
    found = split_key(key)
    return found.group_id, (found.session, found.index)


def _split_left(key: str) -> tuple[str, Place]:
    return key.split("_")[0], _split_right(key)[1]


def _count(tag: Mapping[str, Any], name: str) -> int | None:
    value = tag.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62 else None


def _extra_info(fields: Any) -> Mapping[Any, Any]:
    whole = getattr(fields, "data", fields)
    info = whole.get("reward_extra_info", {}) if isinstance(whole, Mapping) else {}
    return info if isinstance(info, Mapping) else {}


def number(value: Any) -> float | None:
    """A value as verl takes it for a number; None for one that is none."""
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
