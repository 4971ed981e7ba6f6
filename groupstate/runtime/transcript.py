"""A session of several turns as one row of tokens: what the model generated, and what came in between.

Rule 1: what was generated stays as it was generated, token by token; it is never made into text and back.
Rule 2: only texts that the model didn't write are encoded, each of them once, when it comes.
Rule 3: an answer is taken whole or not at all: a `generate` that is refused or cancelled leaves nothing behind.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from groupstate.core.events import VersionSpan
from groupstate.core.trajectory import Trajectory
from groupstate.engines.given import token_ids_of
from groupstate.engines.port import FinishReason, Generation
from groupstate.errors import EngineError, SessionStateError

if TYPE_CHECKING:
    from groupstate.runtime.session import SessionContext


class Transcript:
    """The tokens of one conversation so far: a prompt, and behind it the model's answers and what was observed.

    Made by `ctx.transcript(prompt)`. A session may keep several, one after the other or side by side.
    """

    def __init__(self, ctx: "SessionContext", prompt_ids: Sequence[int]) -> None:
        self._ctx = ctx
        self._prompt_ids = token_ids_of(prompt_ids, "the prompt")
        self._response_ids: list[int] = []
        self._log_probs: list[float] = []
        self._spans: list[VersionSpan] = []
        self._environment: list[tuple[int, int]] = []
        self._texts: list[str] = []
        self._finish_reasons: list[FinishReason] = []
        self._lacks_log_probs = False
        """The engine gave none for some answer, so the row has none at all."""
        self._generating = False

    # Looking -----------------------------------------------------------------------------------------

    @property
    def token_ids(self) -> list[int]:
        """All tokens so far: what the next `generate` goes on from."""
        return [*self._prompt_ids, *self._response_ids]

    @property
    def prompt_ids(self) -> list[int]:
        return list(self._prompt_ids)

    @property
    def response_ids(self) -> list[int]:
        """All tokens behind the prompt, those that were observed included."""
        return list(self._response_ids)

    @property
    def text(self) -> str:
        """Everything behind the prompt as text: answers as the engine gave them, observations as they came."""
        return "".join(self._texts)

    @property
    def finish_reasons(self) -> tuple[FinishReason, ...]:
        """Why each answer ended; `length` and `abort` are those that were cut off."""
        return tuple(self._finish_reasons)

    def __len__(self) -> int:
        """Tokens so far, the prompt's included."""
        return len(self._prompt_ids) + len(self._response_ids)

    # Going on ----------------------------------------------------------------------------------------

    async def generate(self, **params: Any) -> Generation:
        """Have the engine go on from all tokens so far, and append exactly what it generated.

        An answer that was aborted, or that ended at `max_tokens` or where the context ends, is appended as far as it
        came; its `finish_reason` says so, and the next `generate` goes on from there.

        Args:
            params: as of `ctx.generate`.

        Raises:
            RequestRefused: the engine can't serve it, now or later; such as when the context is full.
            EngineError: the engine can't serve it, or its answer has no tokens to keep.
            SessionStateError: an answer is under way already.
        """
        self._need_quiet("generate")
        self._generating = True
        try:
            generation = await self._ctx.generate(self.token_ids, **params)
        finally:
            self._generating = False
        self._append(generation)
        return generation

    def observe(self, observation: str | Sequence[int]) -> None:
        """Append what the environment says: a tool's result, a user's turn, with the markers of the chat template.

        These tokens are not trained on: response mask 0, log-probability 0.0. An empty one changes nothing.

        Args:
            observation: a text, for an engine with a tokenizer, or token ids. A text is encoded by itself and without
                the special tokens that a tokenizer puts around whole texts.

        Raises:
            BadInput: it is neither.
            EngineError: a text, and the engine has no tokenizer.
            SessionStateError: an answer is under way.
        """
        self._need_quiet("observe")
        if isinstance(observation, str):
            observed, text = self._encoded(observation), observation
        else:
            observed = token_ids_of(observation, "the observation")
            text = self._decoded(observed)
        if not observed:
            return
        start = len(self._response_ids)
        self._response_ids += observed
        self._log_probs += [0.0] * len(observed)
        if self._environment and self._environment[-1][1] == start:
            start = self._environment.pop()[0]
        self._environment.append((start, len(self._response_ids)))
        self._texts.append(text)

    def fork(self, *, as_prompt: bool = False) -> "Transcript":
        """An independent copy, for a sub-agent or another way to go on.

        Args:
            as_prompt: all tokens so far become the copy's prompt. Take it where this transcript and the copy both
                become rows: what they have in common is then trained on once.
        """
        if as_prompt:
            return Transcript(self._ctx, self.token_ids)
        copy = Transcript(self._ctx, self._prompt_ids)
        copy._response_ids += self._response_ids
        copy._log_probs += self._log_probs
        copy._spans += self._spans
        copy._environment += self._environment
        copy._texts += self._texts
        copy._finish_reasons += self._finish_reasons
        copy._lacks_log_probs = self._lacks_log_probs
        return copy

    def trajectory(
        self,
        *,
        reward: float | None = None,
        metrics: Mapping[str, float] | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> Trajectory:
        """The row so far. Its `info` has why the last answer ended, and all of them in their order."""
        reasons = self._finish_reasons
        ends = {"finish_reason": reasons[-1], "finish_reasons": list(reasons)} if reasons else {}
        return Trajectory(
            prompt_ids=tuple(self._prompt_ids),
            response_ids=tuple(self._response_ids),
            log_probs=() if self._lacks_log_probs else tuple(self._log_probs),
            spans=tuple(self._spans),
            environment=tuple(self._environment),
            reward=reward,
            metrics=dict(metrics or {}),
            text=self.text,
            info={**ends, **(info or {})},
        )

    # Inside ------------------------------------------------------------------------------------------

    def _need_quiet(self, tried: str) -> None:
        if self._generating:
            raise SessionStateError(
                f"cannot {tried}: an answer of this transcript is under way, and its tokens come next; await it, or "
                "fork() before it for a second one beside it"
            )

    def _append(self, generation: Generation) -> None:
        count, given = len(generation.token_ids), len(generation.log_probs)
        if not count and generation.text:
            raise EngineError(
                "the engine answered with a text and no token ids, so the turns can't be put together token by token; "
                "use an engine that gives them, or ctx.generate and a trajectory for each turn"
            )
        if given not in (0, count):
            raise EngineError(
                f"the engine gave {given} log-probabilities for {count} tokens; it must give one for each"
            )
        start = len(self._response_ids)
        self._response_ids += generation.token_ids
        self._log_probs += generation.log_probs
        self._lacks_log_probs |= given < count
        for span in generation.spans:
            self._append_span(VersionSpan(start + span.start, start + span.stop, span.weight_version))
        self._texts.append(generation.text)
        self._finish_reasons.append(generation.finish_reason)

    def _append_span(self, span: VersionSpan) -> None:
        last = self._spans[-1] if self._spans else None
        if last is not None and (last.stop, last.weight_version) == (span.start, span.weight_version):
            self._spans[-1] = VersionSpan(last.start, span.stop, span.weight_version)
        else:
            self._spans.append(span)

    def _encoded(self, text: str) -> list[int]:
        """Token ids of a text in the middle of a row."""
        tokenizer = self._ctx.engine.tokenizer if self._ctx.engine is not None else None
        if tokenizer is not None and _takes(tokenizer.encode, "add_special_tokens"):
            # The tokenizers of Hugging Face would begin each text as if it were a whole one.
            return list(tokenizer.encode(text, add_special_tokens=False))  # type: ignore[call-arg]
        return self._ctx.prompt_ids(text)

    def _decoded(self, token_ids: Sequence[int]) -> str:
        tokenizer = self._ctx.engine.tokenizer if self._ctx.engine is not None else None
        return "" if tokenizer is None else tokenizer.decode(token_ids)


def _takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has such an argument; False where it can't be told, as of some that aren't Python's."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
