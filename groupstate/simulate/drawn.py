"""From a seed to a whole configuration: features are drawn one by one, each off in a good part of the seeds.

Rule: rules that contradict each other are drawn again, so every seed gives a run that can be opened.
"""

from typing import Any

import msgspec

from groupstate.core.rules import Rules
from groupstate.errors import BadSettings
from groupstate.simulate import plan as p
from groupstate.simulate.lots import Law, LawName, Lots

LIFETIMES = (80, 700)
"""Groups that a run is meant to come to, from and to; the hours follow from it and from the pace of the rest."""

_RULES, _SESSIONS, _SOURCE, _TRAINER, _ENGINE, _VALIDATION, _USER, _CRASH, _STORAGE, _HOURS = range(10)
_PURPOSE = 101

FILTER_METRIC = "acc"
LAWS: tuple[LawName, ...] = ("constant", "exponential", "exponential", "lognormal", "pareto")
DATASETS = ("math", "code", "web")


def drawn_plan(seed: int, *, hours: float | None = None) -> p.Plan:
    """The plan of a seed.

    Args:
        hours: virtual hours with faults, in place of what the seed says.
    """

    def lots(purpose: int) -> Lots:
        return Lots(seed, _PURPOSE, purpose)

    group_size = lots(_SESSIONS).pick((1, 2, 4, 4, 4, 4, 6, 8))
    source = _source(lots(_SOURCE))
    trainer = _trainer(lots(_TRAINER))
    rules = _rules(lots(_RULES), trainer.batch_size, group_size, source)
    engine = _engine(lots(_ENGINE))
    sessions = _sessions(lots(_SESSIONS), rules, group_size)
    if engine is None or trainer.workers > 1:
        # One trainer takes turns with one engine.
        trainer = msgspec.structs.replace(trainer, turns=False)
    pace = _groups_a_second(rules, sessions, trainer)
    target = lots(_HOURS).between(*LIFETIMES)
    span_s = target / pace
    return p.Plan(
        seed=seed,
        hours=round(span_s / 3600, 4) if hours is None else hours,
        lifetimes=3 * LIFETIMES[1] if hours is None else p.Plan().lifetimes,
        group_size=group_size,
        rules=rules,
        sessions=sessions,
        source=source,
        trainer=trainer,
        storage=_storage(lots(_STORAGE)),
        engine=engine,
        validation=_validation(lots(_VALIDATION), span_s),
        user=_user(lots(_USER), span_s),
        crash=_crash(lots(_CRASH), span_s, target),
    )


def _some(lots: Lots, chance: float, low: float, high: float) -> float:
    """Off, or something from and to."""
    on, value = lots.chance(chance), lots.between(low, high)
    return round(value, 4) if on else 0.0


def _law(lots: Lots, mean_s: float) -> Law:
    return Law(law=lots.pick(LAWS), mean_s=round(mean_s, 3))


# Rules ------------------------------------------------------------------------------------------------


def _rules(lots: Lots, batch_size: int, group_size: int, source: p.SourcePlan) -> dict[str, Any]:
    while True:
        rules = _some_rules(lots, batch_size, source)
        try:
            Rules(**rules)
        except BadSettings:
            continue
        single = group_size == 1 and "filter_metric" in rules and rules.get("on_singleton") == "evict"
        if not (single and rules.get("per", "session") == "session"):
            return rules


def _some_rules(lots: Lots, batch_size: int, source: p.SourcePlan) -> dict[str, Any]:
    rules: dict[str, Any] = {"batch_size": batch_size}
    if lots.chance(0.3):
        rules["mode"] = "sync"
        rules |= _sync_rules(lots)
    else:
        rules |= _async_rules(lots, batch_size)
    if lots.chance(0.6):
        rules["filter_metric"] = FILTER_METRIC
        rules["per"] = lots.pick(("session", "session", "trajectory"))
        rules["spread"] = lots.pick(("range", "range", "std"))
        rules["tolerance"] = lots.pick((0.0, 0.0, 0.3))
        rules["on_missing"] = lots.pick(("keep", "evict"))
        rules["on_singleton"] = lots.pick(("keep", "keep", "evict"))
    if lots.chance(0.3):
        rules["survivors_min"] = lots.pick((1, 2))
    if lots.chance(0.5):
        rules["attempts_max"] = lots.pick((2, 3))
        rules["retry_delay_s"] = lots.pick((0.0, 1.0, 30.0))
    if lots.chance(0.3):
        rules["requeues_max"] = lots.pick((1, 2))
    if lots.chance(0.4):
        rules["session_deadline_s"] = lots.pick((30.0, 60.0, 300.0))
    if lots.chance(0.3):
        rules["group_deadline_s"] = lots.pick((120.0, 400.0, 2_000.0))
    if lots.chance(0.25):
        rules["oversample"] = lots.pick((1, 2))
    if lots.chance(0.2):
        rules["empty_session"] = "allow"
    if lots.chance(0.05):
        rules["generated_groups_max"] = batch_size * 12
    if source.datasets and lots.chance(0.7):
        share = round(1.0 / len(source.datasets), 3)
        rules["datasets"] = {name: {"share": share} for name in source.datasets}
        rules["share_tolerance"] = lots.pick((0.0, 0.1, 0.5))
    if lots.chance(0.3):
        rules["starvation_versions"] = lots.pick((2, 5))
    rules["eviction_streak_max"] = lots.pick((16 * batch_size, 1_000))
    return rules


def _sync_rules(lots: Lots) -> dict[str, Any]:
    return {
        "failure": lots.pick(("keep", "refill")),
        "empty": lots.pick(("refill", "refill", "drop")),
        "in_flight_batches_max": lots.pick((1, 2, 3)),
    }


def _async_rules(lots: Lots, batch_size: int) -> dict[str, Any]:
    rules: dict[str, Any] = {}
    kind = lots.pick(("per_batch", "per_batch", "slots", "slots", "capacity"))
    if kind == "per_batch":
        rules["admission"] = {"kind": kind, "warmup": lots.pick((0, 1, 2, 3))}
    elif kind == "slots":
        rules["admission"] = {"kind": kind, "n": batch_size * lots.pick((1, 2, 4)), "ready_max": lots.pick((0, 8, 32))}
    else:
        rules["admission"] = {"kind": kind, "lag_max": lots.pick((0, 1, 3))}
    if lots.chance(0.15):
        rules |= {"selection": "exact_version", "basis": "target_version", "lag_max": 0}
        rules["admission"] = {"kind": "per_batch", "warmup": lots.pick((1, 2))}
        return rules
    rules["selection"] = lots.pick(("oldest_first", "oldest_first", "freshest_first"))
    if lots.chance(0.7):
        rules["lag_max"] = lots.pick((0, 1, 2, 4))
        rules["on_stale"] = lots.pick(("drop", "drop", "wait"))
        rules["basis"] = lots.pick(("dispatch", "dispatch", "first_token", "oldest_token", "newest_token"))
        if rules["on_stale"] == "wait":
            rules["wait_gates"] = lots.pick(("training", "each"))
    if lots.chance(0.3):
        rules["cancel_doomed"] = True
    if lots.chance(0.2):
        rules["refill_multiple"] = 2
    return rules


# The rest ---------------------------------------------------------------------------------------------


def _sessions(lots: Lots, rules: dict[str, Any], group_size: int) -> p.SessionPlan:
    bad = lots.chance(0.7)
    sizes = (1, 2, group_size, 5) if lots.chance(0.25) and rules.get("on_singleton") != "evict" else ()
    return p.SessionPlan(
        delay=_law(lots, lots.pick((2.0, 10.0, 20.0, 40.0))),
        error=_some(lots, 0.5 * bad, 0.01, 0.15),
        retryable=_some(lots, 0.5 * bad, 0.01, 0.2),
        empty=_some(lots, 0.4 * bad, 0.01, 0.1),
        refused=_some(lots, 0.3 * bad, 0.01, 0.05),
        hangs=_some(lots, 0.3 * bad, 0.001, 0.01),
        stubborn=_some(lots, 0.4, 0.05, 0.5),
        missing=_some(lots, 0.2, 0.01, 0.1),
        flat=_some(lots, 0.7, 0.05, 0.4),
        rows_most=lots.pick((1, 1, 1, 2, 3)),
        sizes=sizes,
    )


def _source(lots: Lots) -> p.SourcePlan:
    datasets = DATASETS[: lots.pick((2, 3))] if lots.chance(0.35) else ()
    dry = lots.chance(0.25)
    prompts = int(lots.between(20, 300)) if dry else None
    slow = {name: lots.pick((1.0, 5.0, 20.0)) for name in datasets[1:]}
    return p.SourcePlan(
        prompts=prompts, datasets=datasets, slow={name: times for name, times in slow.items() if times > 1.0}
    )


def _trainer(lots: Lots) -> p.TrainerPlan:
    return p.TrainerPlan(
        batch_size=lots.pick((1, 2, 4, 4, 8, 16)),
        workers=lots.pick((1, 1, 2, 3)),
        train=_law(lots, lots.pick((0.0, 1.0, 5.0, 15.0))),
        commit_every=lots.pick((1, 1, 1, 2, 4)),
        publish_every=lots.pick((1, 1, 2)),
        version_jump=_some(lots, 0.3, 0.02, 0.2),
        tells_version=_some(lots, 0.3, 0.1, 1.0),
        release=_some(lots, 0.4, 0.02, 0.2),
        cancel=_some(lots, 0.4, 0.05, 0.4),
        cancel_at_claim=_some(lots, 0.4, 0.05, 0.3),
        timeout=_some(lots, 0.3, 0.05, 0.4),
        other_size=_some(lots, 0.3, 0.05, 0.5),
        checkpoint_every=lots.pick((0, 1, 3, 10)),
        rewind=_some(lots, 0.5, 0.2, 0.8),
        rewind_evicts=lots.chance(0.4),
        turns=lots.chance(0.3),
    )


def _engine(lots: Lots) -> p.EnginePlan | None:
    if lots.chance(0.55):
        return None
    return p.EnginePlan(
        in_flight=lots.pick(("keep", "continue", "restart")),
        slots=lots.pick((None, None, 16, 64)),
        tokens_most=lots.pick((1, 2, 4)),
        turns=lots.pick((1, 1, 2)),
        death_every_s=_some(lots, 0.4, 200.0, 3_000.0),
        refuses_weights=_some(lots, 0.2, 0.02, 0.2),
    )


def _validation(lots: Lots, span_s: float) -> p.ValidationPlan | None:
    if lots.chance(0.6):
        return None
    return p.ValidationPlan(
        every_s=round(span_s / lots.between(2, 10), 1),
        prompts=lots.pick((1, 2, 4)),
        cancel=_some(lots, 0.4, 0.1, 0.5),
        timeout=_some(lots, 0.3, 0.1, 0.5),
    )


def _user(lots: Lots, span_s: float) -> p.UserPlan:
    def every(chance: float) -> float:
        return round(_some(lots, chance, span_s / 60, span_s / 3), 1)

    return p.UserPlan(
        cancel_every_s=every(0.4), requeue_every_s=every(0.5), submit_every_s=every(0.3), watch_every_s=every(0.3)
    )


def _crash(lots: Lots, span_s: float, target: float) -> p.CrashPlan:
    ends = lots.pick((0, 1, 1, 2, 3, 5))
    faults = lots.chance(0.3)
    return p.CrashPlan(
        every_s=round(span_s / ends, 1) if ends else 0.0,
        power=lots.pick((0.0, 0.5, 1.0)),
        closes=lots.pick((0.0, 0.0, 0.3)),
        disk_fault_every=int(target * lots.between(6, 20)) if faults else 0,
        fault_once=lots.pick((0.0, 0.5)),
        in_recovery=_some(lots, 0.3, 0.1, 0.5),
    )


def _storage(lots: Lots) -> p.StoragePlan:
    return p.StoragePlan(
        commit=Law(
            law=lots.pick(("constant", "exponential", "pareto")), mean_s=lots.pick((0.002, 0.01, 0.1)), most_s=20.0
        ),
        segment_bytes=lots.pick((20_000, 200_000, 1 << 20)),
        payload_file_bytes=lots.pick((5_000, 100_000)),
        snapshot_events=lots.pick((200, 1_000, 3_000, 100_000)),
        keep=lots.pick(("all", "all", "all", "archive", 1, 2)),
    )


def _groups_a_second(rules: dict[str, Any], sessions: p.SessionPlan, trainer: p.TrainerPlan) -> float:
    """About how many groups end, from how many are in flight and how long the slowest of their sessions take, and from
    how many are trained on."""
    admission = rules.get("admission", {"kind": "per_batch", "warmup": 0 if rules.get("mode") == "sync" else 1})
    ahead = {
        "per_batch": trainer.batch_size * (admission.get("warmup", 1) + trainer.workers),
        "slots": admission.get("n", 1),
        "capacity": trainer.batch_size * (admission.get("lag_max", 0) + 1),
    }[admission["kind"]]
    generated = ahead / (2.5 * sessions.delay.mean_s)
    trained = trainer.batch_size * trainer.workers / (trainer.train.mean_s + 2.0)
    return float(max(0.01, min(generated, 2.0 * trained)))
