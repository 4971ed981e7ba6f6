"""A validation round: prompts in, one batch of all their groups out.

Rule: a round leaves nothing behind. Given up at whatever point, its sessions are ended, and its groups leave the book;
those of a process that died leave once the run is opened again, and so do those of a round that is undone since the
run goes back to a mark before it. Whoever asked for the round asks again.
"""

from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from groupstate.batch import Batch
from groupstate.core.arguments import boolean, integer_or_none, shown
from groupstate.core.events import VALIDATION
from groupstate.core.prompt import GROUP_SIZE_MAX, Prompt, as_prompt, check_prompt
from groupstate.engines.port import SamplingParams
from groupstate.errors import BadInput, BadSettings, LogFailed
from groupstate.runtime.sampler import Patience
from groupstate.runtime.sources import as_source

if TYPE_CHECKING:
    from groupstate.runtime.run import Run


async def validated(
    run: "Run", prompts: Any, *, n: int | None, params: SamplingParams | None, greedy: bool, timeout_s: float | None
) -> Batch:
    """See `Run.validate`, which is this function."""
    n = integer_or_none("n", n, least=1, most=GROUP_SIZE_MAX)
    Patience.of(timeout_s)
    sampling = _sampling(run, params, greedy=boolean("greedy", greedy))
    fresh = _drawn(prompts)
    size = 1 if greedy and n is None else n
    groups: list[str] = []
    try:
        # In one step until the request for them is open: another sampler of the partition would be given some else.
        for prompt in fresh:
            groups.append(run._submit(prompt, n=size, partition=VALIDATION, validation_round=True).id)
            if sampling is not None and run._rollout is not None:
                # In time: its sessions start in tasks of their own, once this one waits.
                run._rollout.params_of[groups[-1]] = sampling
        wanted = frozenset(groups)
        batch = await run._sampler.sample(len(groups), partition=VALIDATION, timeout_s=timeout_s, wanted=wanted)
        await run.commit(batch)
    except BaseException:
        if not run.book.closed:
            run._controller.abandoned.add(groups)
            await _gone(run, groups)
        raise
    return batch


async def _gone(run: "Run", groups: list[str]) -> None:
    """Wait until the groups have left: their cancelled sessions end, or are given up as lost."""
    left = groups[::-1]
    with anyio.CancelScope(shield=True):
        while left and not (run.book.closed or isinstance(run._controller.dead, LogFailed)):
            if left[-1] in run.book.groups:
                await run._controller.changed.wait()
            else:
                left.pop()


def _sampling(run: "Run", params: SamplingParams | None, *, greedy: bool) -> SamplingParams | None:
    """How the round's sessions generate; None for the run's own way.

    Raises:
        BadSettings: both are given, or there is nobody to heed them.
    """
    if params is None and not greedy:
        return None
    if params is not None and greedy:
        raise BadSettings(
            "greedy is the run's own sampling parameters at temperature 0, so params beside it would not be heeded; "
            "give one of the two"
        )
    if params is not None and not isinstance(params, SamplingParams):
        raise BadSettings(f"params is {shown(params)}; it must be SamplingParams")
    if run._rollout is None:
        raise BadSettings(
            "params and greedy are for ctx.generate, and this run has no session function; whoever dispatches its "
            "sessions decides how they generate"
        )
    return msgspec.structs.replace(run._rollout.params, temperature=0.0) if params is None else params


def _drawn(prompts: Any) -> list[Prompt]:
    """All of them, as they are submitted, checked before the first is.

    Raises:
        BadInput: one can't be stored, or there are none.
    """
    source = as_source(prompts)
    drawn = [as_prompt(prompt) for prompt in iter(source.draw, None)]
    if not drawn:
        raise BadInput(f"there are no prompts to validate on: {source.name!r} gives none")
    return [_fresh(prompt, f"prompt {place} of the validation round") for place, prompt in enumerate(drawn, start=1)]


def _fresh(prompt: Prompt, called: str) -> Prompt:
    """Without the id that it brings along: the same prompts are used again and again, and an id is taken once.

    Raises:
        BadInput: it can't be stored.
    """
    check_prompt(prompt, called)
    if prompt.group_id is None:
        return Prompt(prompt.content, prompt.dataset, prompt.n, None, dict(prompt.extra))
    fresh = Prompt(prompt.content, prompt.dataset, prompt.n, None, {**prompt.extra, "group_id": prompt.group_id})
    check_prompt(fresh, called)
    return fresh
