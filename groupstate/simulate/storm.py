"""What goes on around the trainer while faults go on: somebody cancels and requeues, validates, kills the engine."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import anyio
import anyio.abc

from groupstate.core.phases import Phase
from groupstate.errors import (
    GroupstateError,
    LogFailed,
    RolloutDied,
    RunIsClosed,
    SampleError,
    SampleTimeout,
)
from groupstate.simulate.lots import Lots
from groupstate.simulate.prompts import OWN, VALIDATION, sized
from groupstate.simulate.witness import Breach

if TYPE_CHECKING:
    from groupstate.simulate.life import Life

Act = Callable[["Life", Lots], Awaitable[None]]

_CANCEL, _REQUEUE, _SUBMIT, _WATCH, _VALIDATE, _ENGINE = range(801, 807)


def begin(life: "Life", tasks: anyio.abc.TaskGroup) -> None:
    """Start what the plan asks for, in a task each."""
    user, validation, engine = life.plan.user, life.plan.validation, life.plan.engine
    acts: list[tuple[int, float, Act]] = [
        (_CANCEL, user.cancel_every_s, _cancel),
        (_REQUEUE, user.requeue_every_s, _requeue),
        (_SUBMIT, user.submit_every_s, _submit),
        (_WATCH, user.watch_every_s, _watch),
        (_VALIDATE, validation.every_s if validation is not None else 0.0, _validate),
        (_ENGINE, engine.death_every_s if engine is not None else 0.0, _engine_dies),
    ]
    for purpose, every_s, act in acts:
        if every_s:
            tasks.start_soon(life.strikes, _again_and_again, life, life.lots(purpose), every_s, act)


async def _again_and_again(life: "Life", lots: Lots, every_s: float, act: Act) -> None:
    while True:
        await anyio.sleep(lots.waiting_s(every_s))
        try:
            await act(life, lots)
        except LogFailed as error:
            life.log_failed(error)
            return
        except RunIsClosed:
            return
        except Breach as breach:
            life.breached(breach)
            return
        except GroupstateError as error:
            life.unexpected(act.__name__.strip("_"), error)
            return


def _one_in_flight(life: "Life", lots: Lots) -> str | None:
    book = life.run.book
    ids = [group.group_id for phase in (Phase.RUNNING, Phase.PENDING) for group in book.in_phase(phase)]
    return lots.pick(ids) if ids else None


async def _cancel(life: "Life", lots: Lots) -> None:
    if (group_id := _one_in_flight(life, lots)) is not None:
        life.run.cancel(group_id)
        life.count("cancelled groups")


async def _requeue(life: "Life", lots: Lots) -> None:
    if (group_id := _one_in_flight(life, lots)) is not None:
        life.run.requeue(group_id)
        life.count("requeued groups")


async def _submit(life: "Life", lots: Lots) -> None:
    # The number of the event is one that no other submission has had.
    key = f"{OWN}:{life.number * 1_000_000_000 + life.run.book.last_seq}"
    life.run.submit(sized(life.plan, key))


async def _watch(life: "Life", lots: Lots) -> None:
    count = 1 + lots.below(2 * life.plan.trainer.batch_size)
    try:
        await life.run.wait_sampleable(count, timeout_s=lots.waiting_s(100.0))
    except SampleTimeout:
        life.count("watches timed out")
    except RolloutDied as error:
        _told_of_death(life, error)
    except SampleError:
        life.count("watches refused")


async def _validate(life: "Life", lots: Lots) -> None:
    validation = life.plan.validation
    assert validation is not None
    base = life.number * 1_000_000_000 + life.run.book.last_seq
    prompts = [sized(life.plan, f"{VALIDATION}:{base * 10 + number}") for number in range(validation.prompts)]
    timeout_s = lots.waiting_s(60.0) if lots.chance(validation.timeout) else None
    cancel_s = lots.waiting_s(40.0) if lots.chance(validation.cancel) else 1e9
    with anyio.move_on_after(cancel_s):
        try:
            batch = await life.run.validate(prompts, timeout_s=timeout_s)
        except SampleTimeout:
            life.count("validation timed out")
            return
        except RolloutDied as error:
            _told_of_death(life, error)
            return
        keys = [group.prompt.content for group in batch.groups if group.prompt is not None]
        if sorted(keys) != sorted(str(prompt.content) for prompt in prompts) and not life.over:
            raise Breach("account", f"a validation of {len(prompts)} prompts gave {keys}")
        life.count("validations")


def _told_of_death(life: "Life", error: RolloutDied) -> None:
    if not life.engine_died:
        raise Breach("error RolloutDied", f"the rollout died: {error}") from error
    life.finish("died")


async def _engine_dies(life: "Life", lots: Lots) -> None:
    assert life.engine is not None
    life.engine_died = True
    life.count("engine deaths")
    life.engine.die(RuntimeError("out of memory"))
    # Whoever waits has to hear of it: nothing else happens in this life.
    life.stop_striking()
