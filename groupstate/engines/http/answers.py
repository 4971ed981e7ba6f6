"""What a stream says, event by event, and the checks that keep a wrong answer from becoming a row.

Rule: an answer is taken only if it is whole: every token with its log-probability where they were asked for, no more
tokens than were asked for, the counts as the server says, and an end that was said.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import attrs
import msgspec

from groupstate.core.arguments import shown
from groupstate.engines.port import FinishReason

FINISHES: dict[str, FinishReason] = {"stop": "stop", "length": "length", "tool_calls": "stop"}
"""A server's reason -> ours. Any other isn't an end that a row may have."""

ROUNDING = 1e-4
"""A log-probability so little above zero is one of a certain token, computed as a logarithm of its probability."""


class Garbage(Exception):
    """What the server sent can't be an answer to what was asked."""


class Lacking(Exception):
    """The answer lacks what this server or dialect doesn't give; asking again doesn't help."""


class Failed(Exception):
    """The server says, in the middle of a stream, that the request failed."""

    def __init__(self, text: str, code: int | None) -> None:
        self.code = code
        super().__init__(text)


@attrs.frozen
class Chunk:
    """What one event adds."""

    token_ids: Sequence[int] = ()
    log_probs: Sequence[float] = ()
    text: str = ""
    text_so_far: str | None = None
    """In place of `text`, from a server that repeats what it has said."""
    finish: str | None = None
    total: int | None = None
    """Tokens of the whole answer, where the event says."""


@attrs.define
class Piece:
    """What one stream has given so far."""

    tokens_max: int
    has_ids: bool
    log_probs_wanted: bool
    vocabulary_size: int | None = None
    token_ids: list[int] = attrs.field(factory=list)
    log_probs: list[float] = attrs.field(factory=list)
    texts: list[str] = attrs.field(factory=list)
    finish: FinishReason | None = None

    def take(self, chunk: Chunk) -> None:
        """
        Raises:
            Garbage: it doesn't fit.
        """
        self._check_tokens(chunk)
        self.token_ids += chunk.token_ids
        self.log_probs += [min(value, 0.0) for value in chunk.log_probs]
        if chunk.text_so_far is None:
            self.texts.append(chunk.text)
        else:
            self.texts = [chunk.text_so_far]
        if len(self.token_ids) > self.tokens_max:
            raise Garbage(f"{len(self.token_ids)} tokens, and {self.tokens_max} were asked for")
        if chunk.finish is not None:
            if chunk.finish not in FINISHES:
                raise Garbage(f"the answer ended by {chunk.finish!r}")
            self.finish = FINISHES[chunk.finish]
        if chunk.total is not None and self.has_ids and self.finish and chunk.total != len(self.token_ids):
            raise Garbage(f"{len(self.token_ids)} tokens, and the server counted {chunk.total}")

    def _check_tokens(self, chunk: Chunk) -> None:
        if self.finish is not None and (chunk.token_ids or chunk.text):
            raise Garbage("more after the end of the answer")
        if self.log_probs_wanted and len(chunk.log_probs) != len(chunk.token_ids):
            raise Garbage(f"{len(chunk.token_ids)} tokens with {len(chunk.log_probs)} log-probabilities")
        for value in chunk.log_probs:
            if not (math.isfinite(value) and value <= ROUNDING):
                raise Garbage(f"a log-probability of {value!r}")
        for token in chunk.token_ids:
            if token < 0 or (self.vocabulary_size is not None and token >= self.vocabulary_size):
                size = "" if self.vocabulary_size is None else f" of a vocabulary of {self.vocabulary_size}"
                raise Garbage(f"a token {token}{size}")


# OpenAI's events, with what vLLM adds ------------------------------------------------------------------


class _LogProbs(msgspec.Struct):
    token_logprobs: list[float | None] | None = None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    logprobs: _LogProbs | None = None
    prompt_token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None


class Completion(msgspec.Struct):
    """An event of /v1/completions or /v1/chat/completions."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None

    @property
    def choice(self) -> _Choice | None:
        if len(self.choices) > 1 or any(choice.index for choice in self.choices):
            raise Garbage("more than one answer")
        return self.choices[0] if self.choices else None

    @property
    def total(self) -> int | None:
        return None if self.usage is None else self.usage.completion_tokens


class _Meta(msgspec.Struct):
    finish_reason: dict[str, Any] | None = None
    completion_tokens: int | None = None
    output_token_logprobs: list[list[Any]] | None = None


class Generated(msgspec.Struct):
    """An event of SGLang's /generate."""

    text: str = ""
    meta_info: _Meta | None = None
    error: Any = None


E = TypeVar("E", Completion, Generated)

_completions = msgspec.json.Decoder(Completion)
_generated = msgspec.json.Decoder(Generated)


def completion(data: bytes) -> Completion:
    return _decoded(_completions, data)


def generated(data: bytes) -> Generated:
    return _decoded(_generated, data)


def _decoded(decoder: "msgspec.json.Decoder[E]", data: bytes) -> E:
    try:
        event = decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Garbage(f"an event that can't be read ({error}): {data[:80]!r}") from error
    if event.error is not None:
        raise _failed(event.error)
    return event


def _failed(error: Any) -> Failed:
    """A server may put anything there."""
    message, code = (error.get("message", error), error.get("code")) if isinstance(error, dict) else (error, None)
    return Failed(message if isinstance(message, str) else shown(message), code if isinstance(code, int) else None)
