"""One session: what the user's function is given, and the boundary around it.

Rule 1: whatever user code or an engine raises becomes that session's recorded failure; cancellation passes.
Rule 2: a session that ignores its cancellation is given up after a grace: recorded as lost, its results fenced.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs

from groupstate.core.events import VersionSpan
from groupstate.core.prompt import Prompt
from groupstate.core.trajectory import Trajectory
from groupstate.engines.given import token_ids_of
from groupstate.engines.port import Engine, Generation, Request, SamplingParams
from groupstate.errors import BadSettings, EngineError, SessionStateError
from groupstate.runtime.functions import call_problem, named
from groupstate.runtime.transcript import Transcript


class RetryableError(Exception):
    """Raise it (or a subclass) from a session to have the session tried again, as `attempts_max` allows."""


class Encoded:
    """The text that sessions of a group encoded last, with its token ids.

    They begin with the same prompt, all in one turn of the event loop, and need its tokens again as they end: a long
    one takes tens of milliseconds each time.
    """

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: tuple[str | None, tuple[int, ...]] = None, ()

    def ids(self, text: str, encode: Callable[[str], Iterable[int]]) -> tuple[int, ...]:
        known, ids = self._last
        if text != known:
            ids = tuple(encode(text))
            self._last = text, ids
        return ids


@attrs.define(eq=False, on_setattr=attrs.setters.frozen)
class SessionContext:
    """What a session function gets. It generates until the attempt has ended, and is given up with it."""

    group_id: str
    session: int
    attempt: int
    size: int
    """Sessions in the group."""
    prompt: Prompt
    weight_version: int
    """Current version when the attempt began."""
    engine: Engine | None
    params: SamplingParams
    _is_over: bool = attrs.field(default=False, init=False, repr=False, on_setattr=attrs.setters.NO_OP)
    """The attempt has ended, though its function may still have this."""
    _encoded: Encoded = attrs.field(factory=Encoded, repr=False)
    """Shared by the group's sessions."""

    @property
    def key(self) -> str:
        return f"{self.group_id}_{self.session}"

    async def generate(self, prompt: str | Sequence[int], **params: Any) -> Generation:
        """Generate one answer.

        Args:
            prompt: a text, for an engine with a tokenizer, or token ids.
            params: fields of `SamplingParams` that differ from the run's, and parameters of the engine's own.

        Raises:
            RequestRefused: the engine can't serve it, now or later.
            EngineError: the engine can't serve it.
            SessionStateError: the attempt has ended: whatever came of it nobody would take.
            BadInput, BadSettings: the prompt is no text and no token ids; a parameter of another kind than it must be.
        """
        if self._is_over:
            await asyncio.sleep(0)  # Who asks again and again must not keep the loop from everybody else.
            raise SessionStateError(
                f"session {self.session} of group {self.group_id!r} can't generate: its attempt {self.attempt} has "
                "ended, by its return, its deadline or a cancellation; end what goes on in its name"
            )
        sampling = self._params(params)
        if isinstance(prompt, str) and self._takes_text:
            request = Request((), sampling, text=prompt, affinity=self.key)
        else:
            request = Request(self.prompt_ids(prompt), sampling, affinity=self.key)
        return await self._engine.generate(request)

    def transcript(self, prompt: str | Sequence[int]) -> Transcript:
        """Begin a conversation of several turns, kept token by token.

        Args:
            prompt: a text, for an engine with a tokenizer, or token ids.

        Raises:
            EngineError: the engine takes this prompt as a text only, or not at all.
        """
        if isinstance(prompt, str) and self._takes_text:
            raise EngineError(
                "this engine takes texts and has no tokenizer, so turns can't be put together token by token; give it "
                "a tokenizer, begin from token ids, or use ctx.generate with the whole text and a trajectory for each "
                "turn"
            )
        return Transcript(self, self.prompt_ids(prompt))

    def prompt_ids(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a text by the engine's tokenizer; token ids as they are.

        Raises:
            BadInput: it is neither, such as a list of chat messages.
            EngineError: a text, and the engine has no tokenizer.
        """
        if not isinstance(prompt, str):
            return token_ids_of(prompt, "the prompt")
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise EngineError("this engine has no tokenizer, so it takes token ids and no text")
        return list(self._encoded.ids(prompt, tokenizer.encode))

    def end(self) -> None:
        """The attempt has ended, for the rollout to say."""
        self._is_over = True

    @property
    def _takes_text(self) -> bool:
        return self._engine.tokenizer is None and getattr(self._engine, "takes_text", False)

    def trajectory(
        self,
        prompt: str | Sequence[int],
        generation: Generation,
        *,
        reward: float | None = None,
        metrics: Mapping[str, float] | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> Trajectory:
        """A generation as a trajectory."""
        return Trajectory(
            prompt_ids=() if isinstance(prompt, str) and self._takes_text else tuple(self.prompt_ids(prompt)),
            response_ids=generation.token_ids,
            log_probs=generation.log_probs,
            spans=tuple(VersionSpan(s.start, s.stop, s.weight_version) for s in generation.spans),
            reward=reward,
            metrics=dict(metrics or {}),
            text=generation.text,
            info={"finish_reason": generation.finish_reason, **(info or {})},
        )

    @property
    def _engine(self) -> Engine:
        if self.engine is None:
            raise BadSettings("this run has no engine; give open_run(engine=...) one, or generate by yourself")
        return self.engine

    def _params(self, changes: Mapping[str, Any]) -> SamplingParams:
        if not changes:
            return self.params
        known = {name: getattr(self.params, name) for name in SamplingParams.__struct_fields__}
        named = {name: value for name, value in changes.items() if name in known}
        extra = {name: value for name, value in changes.items() if name not in known}
        whole = {**known, **named}
        return SamplingParams(**{**whole, "extra": {**whole["extra"], **extra}})


SessionResult: TypeAlias = Trajectory | list[Trajectory] | None
SessionFunction: TypeAlias = Callable[[SessionContext], Awaitable[SessionResult]]
RewardFunction: TypeAlias = Callable[..., Any]
"""`reward(prompt, text) -> float | dict[str, float]`, plain or async."""


def session_from_reward(reward: RewardFunction) -> SessionFunction:
    """The usual single-turn session: generate from the prompt's text, then score the answer.

    Args:
        reward: `reward(prompt: Prompt, text: str)`, plain or async; gives a number or a dict of metrics that
            has a `reward`. A plain one runs on the event loop, so a slow one should be async.

    Raises:
        BadSettings: it is no function, or can't be called with these two.
    """
    problem = call_problem(reward, "prompt", "text") if callable(reward) else "is no function"
    if problem:
        raise BadSettings(f"reward {named(reward)} {problem}; write: def reward(prompt, text): ...")

    async def session(ctx: SessionContext) -> Trajectory:
        text = ctx.prompt.content
        generation = await ctx.generate(text)
        score = reward(ctx.prompt, generation.text)
        if isinstance(score, Awaitable):
            score = await score
        metrics = dict(score) if isinstance(score, Mapping) else {"reward": score}
        return ctx.trajectory(text, generation, metrics=metrics)

    return session


def describe(error: BaseException) -> str:
    """An exception as a failure's text: its type and message, and what caused it."""
    text = _told(error)
    cause = error.__cause__
    # A cause that the text repeats, as that of a dead engine, isn't said twice.
    return text if cause is None or (told := _told(cause)) in text else f"{text} (from {told})"


def _told(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as broken:
        # An exception that can't say what it is must not take the rollout down with it.
        return f"{type(error).__name__}: (its text can't be had: {type(broken).__name__})"
