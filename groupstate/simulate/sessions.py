"""What the sessions of a simulated run do: take their time, end in one of many ways, and say who they are."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from groupstate.core.trajectory import Trajectory
from groupstate.engines.scripted import ScriptedEngine
from groupstate.runtime.session import RetryableError, SessionContext, SessionResult
from groupstate.simulate.drawn import FILTER_METRIC
from groupstate.simulate.lots import Lots
from groupstate.simulate.plan import Plan
from groupstate.simulate.prompts import number_of, text_of
from groupstate.simulate.witness import Breach

if TYPE_CHECKING:
    from groupstate.simulate.life import Life

_SESSION, _PROMPT = 501, 502
FATES = ("error", "retryable", "empty", "refused", "hangs", "missing")
_NOTHING = Trajectory()
TOKEN_S = 1.0
LINGER_S = ((0.05, 4.0), (4.0, 90.0))
"""How long a session goes on that ignores its cancellation: half of them within the grace of the run, half beyond."""


def engine_of(plan: Plan, weight_version: int) -> ScriptedEngine:
    assert plan.engine is not None
    return ScriptedEngine(
        lambda prompt_ids: [1] * prompt_ids[0],
        token_s=TOKEN_S,
        in_flight=plan.engine.in_flight,
        slots_max=plan.engine.slots,
        weight_version=weight_version,
        fits=lambda weights: weights != "misfit",
    )


def session_of(life: "Life") -> Callable[[SessionContext], Awaitable[SessionResult]]:
    """The session function of a life."""
    plan, sessions = life.plan, life.plan.sessions
    slow = plan.source.slow
    fates = [(name, part) for name in FATES if (part := getattr(sessions, name)) > 0.0]
    prompts: dict[str, _Known] = {}

    async def session(ctx: SessionContext) -> SessionResult:
        key = str(ctx.prompt.content)
        try:
            life.witness.begins(ctx.group_id, ctx.session, ctx.attempt)
        except Breach as breach:
            life.breached(breach)
            raise
        known = prompts.get(key)
        if known is None:
            known = prompts[key] = _Known(plan, key)
        lots = known.lots.of(ctx.session, ctx.attempt)
        fate = _fate(life, fates, lots)
        delay_s = sessions.delay.draw(lots) * slow.get(ctx.prompt.dataset, 1.0)
        generated: list[Trajectory] = []
        try:
            if fate == "hangs":
                await life.calmed.wait()
            await asyncio.sleep(delay_s)
            if ctx.engine is not None:
                generated = await _generated(life, ctx, lots)
        except asyncio.CancelledError:
            if life.over or not lots.chance(sessions.stubborn):
                raise
            await _linger(life, lots)
        if fate == "error":
            raise RuntimeError("the tool broke")
        if fate == "retryable":
            raise RetryableError("the sandbox is busy")
        if fate == "empty":
            return None
        return _rows(life, ctx, known, lots, fate, generated)

    return session


class _Known:
    """What the sessions of a prompt have in common."""

    __slots__ = ("flat", "key", "lots")

    def __init__(self, plan: Plan, key: str) -> None:
        number = number_of(key)
        self.key = key
        self.lots = Lots(plan.seed, _SESSION, number)
        self.flat = Lots(plan.seed, _PROMPT, number).chance(plan.sessions.flat)


def _fate(life: "Life", fates: list[tuple[str, float]], lots: Lots) -> str:
    drawn = lots.unit()
    if life.calm:
        return ""
    for name, part in fates:
        if drawn < part:
            return name
        drawn -= part
    return ""


async def _generated(life: "Life", ctx: SessionContext, lots: Lots) -> list[Trajectory]:
    engine = life.plan.engine
    assert engine is not None
    rows = []
    for _ in range(engine.turns):
        prompt_ids = [1 + lots.below(engine.tokens_most)]
        rows.append(ctx.trajectory(prompt_ids, await ctx.generate(prompt_ids)))
    return rows


async def _linger(life: "Life", lots: Lots) -> None:
    """Go on for a while although cancelled; half of these give up then, the others return what they have."""
    gives_up = lots.chance(0.5)
    try:
        await asyncio.sleep(lots.between(*lots.pick(LINGER_S)))
    except asyncio.CancelledError:
        gives_up = True
    if gives_up or life.over:
        raise asyncio.CancelledError


def _rows(
    life: "Life",
    ctx: SessionContext,
    known: _Known,
    lots: Lots,
    fate: str,
    generated: list[Trajectory],
) -> list[Trajectory]:
    sessions = life.plan.sessions
    flat = known.flat
    text = text_of(known.key, ctx.group_id, ctx.session, ctx.attempt)
    rows = []
    for index in range(max(len(generated), 1 + lots.below(sessions.rows_most))):
        metrics = {} if fate == "missing" else {FILTER_METRIC: 1.0 if flat else float(lots.below(4))}
        reward = float("nan") if fate == "refused" else metrics.get(FILTER_METRIC, 0.0)
        made = generated[index] if index < len(generated) else _NOTHING
        rows.append(
            Trajectory(
                prompt_ids=made.prompt_ids,
                response_ids=made.response_ids,
                log_probs=made.log_probs,
                spans=made.spans,
                reward=reward,
                metrics=metrics,
                text=text,
            )
        )
    return rows
