"""Numbers of many mini-batches as one number each, for instance of all between two weight versions.

Rule 1: what becomes of a metric is said by its name, by the first pattern that it matches; a name that matches none is
a mean.
Rule 2: sums and means are exact and rounded once, so that the order of mini-batches changes nothing.
Rule 3: what a rule of the user's own raises costs its metric alone, and is told with the metric's name and the rule's.
Rule 4: a value that is not finite would make a mean say nothing about all others. It is left out and counted, under
`NAME/not_finite`, or refused.
"""

import fnmatch
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Any, Final, Literal, Protocol, get_args

from groupstate.core.arguments import shown, string
from groupstate.core.near import meant
from groupstate.errors import BadInput, BadSettings, GroupstateError

Kind = Literal["mean", "sum", "max", "min", "last", "histogram"]

NotFinite = Literal["count", "refuse"]

RULES: Final[Mapping[str, Kind]] = {
    "*/max": "max",
    "*_max": "max",
    "*/min": "min",
    "*_min": "min",
    "*/sum": "sum",
    "*_sum": "sum",
    "*/total": "sum",
    "*_total": "sum",
    "*/count": "sum",
    "*_count": "sum",
    "*/last": "last",
    "*_last": "last",
    "*/lr": "last",
    "*_lr": "last",
    "lr": "last",
    "*_version": "last",
    "*/hist": "histogram",
    "*_hist": "histogram",
    "*": "mean",
}
"""Pattern -> what becomes of the metrics whose whole name it fits; the first one counts. `*` stands for anything."""

BUCKETS_PER_DOUBLING: Final = 8
"""Of a histogram: a bucket is 9 % wide, so that a quantile is within 4.5 % of a value that was there."""

LAST_BUCKET: Final = 1024 * BUCKETS_PER_DOUBLING - 1
"""Of the largest numbers that there are; their logarithm is rounded up to 1024."""

NO_NUMBERS: Final = (str, bytes, bytearray, memoryview, Mapping)
"""What `float` would read as the text of a number, and what holds no list of numbers."""

QUANTILES: Final = {"p10": 0.1, "p50": 0.5, "p90": 0.9}


class Accumulator(Protocol):
    """Gathers one metric over one interval. One of your own goes into `Aggregator(rules=...)` as its class."""

    def add(self, value: float, weight: float) -> None:
        """A finite value, and the weight that its mini-batch was given."""
        ...

    def value(self) -> float | Mapping[str, float] | None:
        """What the interval comes to: a number, several by what is put behind `NAME/`, or None if there is none. Asked
        for once, after the last `add`; there was at least one."""
        ...


class AggregationError(GroupstateError):
    """A rule of the user's own raised, or gave what is no number. All other metrics are as if it hadn't."""

    def __init__(self, text: str, metrics: Mapping[str, float]) -> None:
        self.metrics = dict(metrics)
        """What the interval comes to without it; empty where `add` raises."""
        super().__init__(text)


class Aggregator:
    def __init__(
        self,
        rules: Mapping[str, Kind | Callable[[], Accumulator]] | None = None,
        *,
        on_not_finite: NotFinite = "count",
    ) -> None:
        """
        Args:
            rules: patterns of your own, looked at before `RULES`: what becomes of such metrics, by a word or as a
                class of your own.
            on_not_finite: `count` such values and leave them out, or `refuse` the mini-batch.

        Raises:
            BadSettings: no such rule.
        """
        if on_not_finite not in get_args(NotFinite):
            words = f"{', '.join(get_args(NotFinite))}{meant(on_not_finite, get_args(NotFinite))}"
            raise BadSettings(f"on_not_finite is {shown(on_not_finite)}; it is one of {words}")
        if rules is not None and not isinstance(rules, Mapping):
            raise BadSettings(f"rules is {shown(rules)}; it must be a dict of patterns and what becomes of them")
        self._rules = [(pattern, _factory(pattern, rule)) for pattern, rule in (rules or {}).items()]
        self._rules += [(pattern, _KINDS[kind]) for pattern, kind in RULES.items()]
        self._refuses = on_not_finite == "refuse"
        self._makers: dict[str, tuple[str, Callable[[], Accumulator]]] = {}
        """Which pattern a name has, and its rule: patterns are looked through once for each name."""
        self._gathered: dict[str, Accumulator] = {}
        self._not_finite: Counter[str] = Counter()
        self._given_up: set[str] = set()
        """Metrics whose rule raised in `add`: what it has of the interval can't be told from what it lacks."""

    def add(self, metrics: Mapping[str, Any], *, weight: float = 1.0) -> None:
        """Take in one mini-batch.

        Args:
            metrics: by name a number, or several: a list, an array, a tensor. Each of these counts as one value.
            weight: of this mini-batch in means, for instance its tokens. A value of weight 0 is none for a mean.

        Raises:
            BadInput: a name, a value or a weight that can't be; nothing of the mini-batch was taken.
            AggregationError: a rule of your own raised. All other metrics of the mini-batch were taken, and this one
                is left out of the interval.
        """
        if not isinstance(metrics, Mapping):
            raise BadInput(f"metrics is {shown(metrics)}; it must be a dict of names and numbers")
        whole_weight = _weight(weight)
        values = {string("the name of a metric", name): _values(name, value) for name, value in metrics.items()}
        if self._refuses:
            _refuse(values)
        failed: dict[str, Exception] = {}
        for name, numbers in values.items():
            finite = [number for number in numbers if math.isfinite(number)]
            if len(finite) < len(numbers):
                self._not_finite[name] += len(numbers) - len(finite)
            if name in self._given_up:
                continue
            try:
                for number in finite:
                    self._accumulator(name).add(number, whole_weight)
            except Exception as error:
                failed[name] = error
                self._given_up.add(name)
                self._gathered.pop(name, None)
        self._tell(failed, {})

    def take(self) -> dict[str, float]:
        """What the interval comes to, by name; the next one begins empty. A metric without a value isn't in it.

        Raises:
            AggregationError: a rule of your own raised, or gave what is no number. The interval is over all the same,
                and the error's `metrics` are all others.
        """
        found: dict[str, float] = {}
        failed: dict[str, Exception] = {}
        for name, accumulator in self._gathered.items():
            try:
                found |= _numbers(name, accumulator.value())
            except Exception as error:
                failed[name] = error
        found |= {f"{name}/not_finite": float(count) for name, count in self._not_finite.items()}
        self._gathered, self._not_finite = {}, Counter()
        self._given_up.clear()
        self._tell(failed, found)
        return found

    def _accumulator(self, name: str) -> Accumulator:
        if name not in self._gathered:
            if name not in self._makers:
                self._makers[name] = next(rule for rule in self._rules if fnmatch.fnmatchcase(name, rule[0]))
            self._gathered[name] = self._makers[name][1]()
        return self._gathered[name]

    def _tell(self, failed: Mapping[str, Exception], metrics: Mapping[str, float]) -> None:
        """Say which rules failed, if some did."""
        if not failed:
            return
        texts = []
        for name, error in failed.items():
            pattern, make = self._makers[name]
            rule = getattr(make, "__qualname__", shown(make))
            texts.append(f"metric {name!r}: its rule {rule} (for {pattern!r}) failed: {type(error).__name__}: {error}")
        raise AggregationError("; ".join(texts), metrics) from next(iter(failed.values()))


def _numbers(name: str, value: Any) -> dict[str, float]:
    """What a rule gave, by name; none for None."""
    if isinstance(value, Mapping):
        return {f"{name}/{part}": float(number) for part, number in value.items()}
    return {} if value is None else {name: float(value)}


class Mean:
    """Weighted. Exact: each weight and value is a fraction, and only their quotient is rounded."""

    def __init__(self) -> None:
        self._total = Fraction()
        self._weight = Fraction()

    def add(self, value: float, weight: float) -> None:
        self._total += Fraction(value) * Fraction(weight)
        self._weight += Fraction(weight)

    def value(self) -> float | None:
        return float(self._total / self._weight) if self._weight else None


class Sum:
    """Weights don't matter to it."""

    def __init__(self) -> None:
        self._total = Fraction()

    def add(self, value: float, weight: float) -> None:
        self._total += Fraction(value)

    def value(self) -> float:
        try:
            return float(self._total)
        except OverflowError:
            return math.inf if self._total > 0 else -math.inf


class Last:
    def __init__(self) -> None:
        self._value: float | None = None

    def add(self, value: float, weight: float) -> None:
        self._value = value

    def value(self) -> float | None:
        return self._value


class Max(Last):
    def add(self, value: float, weight: float) -> None:
        self._value = value if self._value is None else max(self._value, value)


class Min(Last):
    def add(self, value: float, weight: float) -> None:
        self._value = value if self._value is None else min(self._value, value)


class Histogram:
    """How values lie, in buckets that grow with them; a value counts once, whatever its weight."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[int, int]] = Counter()
        """By sign and bucket. They sort as the values do."""
        self._low, self._high = math.inf, -math.inf

    def add(self, value: float, weight: float) -> None:
        sign = (value > 0) - (value < 0)
        bucket = min(math.floor(math.log2(abs(value)) * BUCKETS_PER_DOUBLING), LAST_BUCKET) if sign else 0
        self._counts[sign, sign * bucket] += 1
        self._low, self._high = min(self._low, value), max(self._high, value)

    def value(self) -> Mapping[str, float]:
        count = self._counts.total()
        quantiles = {name: self._quantile(share * count) for name, share in QUANTILES.items()}
        return {"count": count, "min": self._low, **quantiles, "max": self._high}

    def _quantile(self, rank: float) -> float:
        """The middle of the bucket in which the rank-th value lies."""
        seen, places = 0, iter(sorted(self._counts.items()))
        while seen < rank:
            (sign, place), count = next(places)
            seen += count
        middle = sign * 2.0 ** ((sign * place + 0.5) / BUCKETS_PER_DOUBLING) if sign else 0.0
        return min(max(middle, self._low), self._high)


_KINDS: Final[dict[str, Callable[[], Accumulator]]] = {
    "mean": Mean,
    "sum": Sum,
    "max": Max,
    "min": Min,
    "last": Last,
    "histogram": Histogram,
}


def _factory(pattern: str, rule: Any) -> Callable[[], Accumulator]:
    string("the pattern of a rule", pattern, error=BadSettings)
    if isinstance(rule, str) and rule in _KINDS:
        return _KINDS[rule]
    if callable(rule):
        try:
            made = rule()
        except Exception as error:
            text = f"no object of it can be made: {type(error).__name__}: {error}"
            raise BadSettings(f"the rule for {pattern!r} is {shown(rule)}; {text}") from error
        if all(callable(getattr(made, part, None)) for part in ("add", "value")):
            return rule  # type: ignore[no-any-return]
    raise BadSettings(
        f"the rule for {pattern!r} is {shown(rule)}; it is one of {', '.join(_KINDS)}{meant(rule, _KINDS)}, or a class "
        "whose objects have add(value, weight) and value()"
    )


def _weight(weight: Any) -> float:
    number = _number(weight)
    if number is None or not math.isfinite(number) or number < 0:
        raise BadInput(f"weight is {shown(weight)}; it must be a finite number of at least 0")
    return number


def _values(name: str, value: Any) -> list[float]:
    number = _number(value)
    if number is not None:
        return [number]
    try:
        inner = value.tolist() if hasattr(value, "tolist") else value
        if isinstance(inner, Iterable) and not isinstance(inner, NO_NUMBERS):
            return [found for one in inner for found in _values(name, one)]
    except (RuntimeError, TypeError):
        # A tensor without data, or a list without an end.
        pass
    raise BadInput(f"metric {shown(name)} is {shown(value)}; it must be a number or a list of numbers")


def _number(value: Any) -> float | None:
    if isinstance(value, NO_NUMBERS):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def _refuse(values: Mapping[str, list[float]]) -> None:
    for name, numbers in values.items():
        for number in numbers:
            if not math.isfinite(number):
                raise BadInput(
                    f"metric {name!r} is {number}, which is not finite; leave it out, or take on_not_finite='count', "
                    "which does so and counts it"
                )
