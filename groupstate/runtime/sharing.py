"""Whether a source has the datasets that the rules speak of, and can be drawn from by their shares.

Rule: what can't be known of a source (a plain iterable, one of a user's own) is not held against the rules, except
where they give shares, which are kept by choosing what to draw.
"""

from collections.abc import Sequence

from groupstate.core.book import Book
from groupstate.core.near import nearest
from groupstate.core.rules import Rules
from groupstate.core.supply import shares_of
from groupstate.errors import BadSettings
from groupstate.runtime.sources import ListSource, MixedSource, Source

NAMES_SHOWN_MAX = 8


def sharable(rules: Rules, book: Book, source: Source | None) -> Source | None:
    """The source to draw from: the same, or where there are shares to keep, prompts that are all at hand taken apart by
    their dataset.

    Raises:
        BadSettings: it lacks a dataset that the rules name, can't be asked for one, or could never be drawn from.
    """
    if source is None or not rules.datasets:
        return source
    if not isinstance(source, MixedSource | ListSource):
        return _unshared(rules, source)
    apart = source.by_dataset() if isinstance(source, ListSource) else source
    shared = _shared(rules)
    if isinstance(source, ListSource) and not any(apart.datasets):
        if shared and apart.datasets:
            raise BadSettings(
                f"the rules give shares to {_listed(shared)}, and no prompt of the source {source.name!r} names a "
                "dataset, so none of them could ever be drawn. Name it with each prompt, Prompt(..., dataset="
                f"{shared[0]!r}), or give open_run a mapping: source={{{shared[0]!r}: prompts, ...}}"
            )
        return source
    _check_names(rules, book, apart)
    if not shared:
        return source
    if not shares_of(rules, apart.datasets):
        raise BadSettings("the shares of all datasets of the source are 0, so no prompt could ever be drawn")
    return apart


def _unshared(rules: Rules, source: Source) -> Source:
    shared = _shared(rules)
    if shared:
        raise BadSettings(
            f"the rules give shares to {_listed(shared)}, and the source {source.name!r} can't be asked for one "
            "dataset; give open_run a mapping: source={'name': prompts, ...}"
        )
    return source


def _shared(rules: Rules) -> list[str]:
    return sorted(name for name, own in rules.datasets.items() if own.share is not None)


def _check_names(rules: Rules, book: Book, source: MixedSource) -> None:
    """Raises BadSettings where the rules name a dataset that the source lacks. One that was drawn before, from another
    source, may still have bounds of its own, but no share."""
    for name, own in sorted(rules.datasets.items()):
        if name in source.datasets or (own.share is None and name in book.uses):
            continue
        near = nearest(name, source.datasets)
        hint = f"did you mean {near[0]!r}? " if near else ""
        what = "give a share to" if own.share is not None else "have settings for"
        raise BadSettings(
            f"the rules {what} dataset {name!r}, which the source {source.name!r} doesn't have; {hint}it has "
            f"{_listed(sorted(source.datasets)) or 'none'}"
        )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN_MAX} more" if len(names) > NAMES_SHOWN_MAX else ""
    return ", ".join(map(repr, names[:NAMES_SHOWN_MAX])) + more
