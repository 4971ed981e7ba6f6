"""Where a run's groups, tokens and time went: one pass over its events."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import attrs

from groupstate.core import events as ev
from groupstate.core.arguments import integer_or_none
from groupstate.core.book import Book
from groupstate.errors import BadInput, LogError
from groupstate.inspect.histogram import Histogram
from groupstate.inspect.tallies import NO_VALUE, Fates, Interval, Stats
from groupstate.inspect.tally import Tally


def stats(
    records: Iterable[ev.Record], base: Book | None = None, *, by: int | None = None, metric: str | None = None
) -> Stats:
    """Count all records of a run, from the first that there is.

    Args:
        base: the book before the first of the records; None where they are all that there were.
        by: weight versions in an interval; None for as many as make 20 to 40 intervals.
        metric: of the trajectories, to tell as the reward; the rules' filter metric where they have one, else `reward`.

    Raises:
        BadInput: there are no records, `by` isn't a number of versions, or no session that has ended has the `metric`.
        LogError: they aren't those of a run.
    """
    integer_or_none("by", by, least=1, wanted="a number of weight versions, an integer", error=BadInput)
    tally = Tally(base, by, metric)
    take = tally.steps
    for record in records:
        if tally.waiting:
            tally.wait_until(record.at_ns)
        try:
            take[type(record.event)](record.event, record)
        except LookupError as error:
            kind = type(record.event).__name__
            raise LogError(
                f"event {record.seq} ({kind}) can't follow what the log says before it. "
                "`groupstate check` lists everything that is wrong with a log"
            ) from error
        tally.last = record
    return tally.result()


# As plain values ------------------------------------------------------------------------------------------


def as_object(seen: Stats) -> dict[str, Any]:
    """All of it for JSON: histograms as count, total, quantiles and maximum; buckets as `[from, below]`."""
    return {
        "first_seq": seen.first_seq,
        "last_seq": seen.last_seq,
        "metric": seen.metric,
        "by": seen.by,
        "live": dict(seen.live),
        "held_tokens": seen.held_tokens,
        "validation_live": dict(seen.validation_live),
        "validation_held_tokens": seen.validation_held_tokens,
        "owed": seen.owed,
        "whole": _interval(seen.whole),
        "intervals": [_interval(interval) for interval in seen.intervals],
        "survival": {name: [_kind(key, kinds[key]) for key in sorted(kinds)] for name, kinds in seen.survival.items()},
        "failures": [attrs.asdict(failure) for failure in seen.failures],
        "slowest": [attrs.asdict(slow) for slow in seen.slowest],
    }


def _interval(interval: Interval) -> dict[str, Any]:
    return {name: _plain(getattr(interval, name)) for name in (field.name for field in attrs.fields(Interval))}


def _plain(value: Any) -> Any:
    if isinstance(value, Histogram):
        return attrs.asdict(value.summary())
    return {str(key): value[key] for key in sorted(value)} if isinstance(value, Counter) else value


def _kind(key: Any, fates: Fates) -> dict[str, Any]:
    name = None if key == NO_VALUE else list(key) if isinstance(key, tuple) else key
    evicted = {reasons: fates.evicted[reasons] for reasons in sorted(fates.evicted)}
    return {"kind": name, "committed": fates.committed, "evicted": evicted, "survival": fates.survival}
