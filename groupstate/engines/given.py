"""What engines are given, checked before anything is done with it: settings, requests, token ids.

A message says what was given, and how one comes to what it must be.
"""

import operator
from collections.abc import Mapping, Set
from typing import Any

from groupstate.core.arguments import integer, integer_or_none, shown
from groupstate.core.near import meant
from groupstate.engines.port import IN_FLIGHT, InFlight, Request, Tokenizer
from groupstate.errors import BadInput, EngineError, GroupstateError, RequestRefused


def need_in_flight(in_flight: str) -> InFlight:
    """The same, checked.

    Raises:
        EngineError: it is none of the three.
    """
    if in_flight not in IN_FLIGHT:
        words = f"{', '.join(map(repr, IN_FLIGHT))}{meant(in_flight, IN_FLIGHT)}"
        raise EngineError(f"in_flight is {in_flight!r}; it must be one of {words}")
    return in_flight


def need_version(weight_version: Any) -> int:
    """A weight version as a Python integer.

    Raises:
        EngineError: it is none.
    """
    return integer("weight_version", weight_version, error=EngineError)


def need_count(name: str, value: Any) -> int:
    """A setting that counts something.

    Raises:
        EngineError: it isn't an integer of at least 1.
    """
    return integer(name, value, least=1, error=EngineError)


def need_count_or_none(name: str, value: Any) -> int | None:
    return integer_or_none(name, value, least=1, error=EngineError)


def need_tokenizer(tokenizer: Any) -> Tokenizer | None:
    """The same, checked.

    Raises:
        EngineError: it can't encode and decode.
    """
    if tokenizer is not None and not (callable(getattr(tokenizer, "encode", None)) and hasattr(tokenizer, "decode")):
        raise EngineError(f"tokenizer is {shown(tokenizer)}; it must be an object with encode and decode, or None")
    return tokenizer  # type: ignore[no-any-return]


def need_request(request: Any) -> None:
    """
    Raises:
        BadInput: it is something else.
    """
    if not isinstance(request, Request):
        raise BadInput(f"generate is given {shown(request)}; it must be a Request")


def need_no_extra(request: Request, engine: str) -> None:
    """For engines that know only the named parameters.

    Raises:
        RequestRefused: it has others.
    """
    if request.params.extra:
        raise RequestRefused(
            f"request {request.id} has {', '.join(map(repr, sorted(request.params.extra)))}; the engine {engine!r} "
            f"knows only temperature, top_p, max_tokens, stop_token_ids and seed"
        )


def token_ids_of(given: Any, what: str, error: type[GroupstateError] = BadInput) -> list[int]:
    """Token ids as Python's own integers, whatever they came in: a list, an array, a tensor of one dimension.

    Args:
        what: what they are, for the text of the error.

    Raises:
        BadInput, or `error`: it is something else, such as a text or chat messages.
    """
    if type(given) in (list, tuple) and set(map(type, given)) == {int}:
        return list(given)  # What they mostly are; all that follows would come to the same.
    try:
        if isinstance(given, str | bytes | Mapping | Set):
            raise TypeError
        values = list(given)
        if bool in set(map(type, values)):
            raise TypeError  # A truth value is an index too, but no token.
        return list(map(operator.index, values))
    except (TypeError, ValueError, RuntimeError):
        # What lists raise, and tensors and arrays of another shape or kind.
        raise error(f"{what} is {_kind(given)}; it must be token ids{_way(given)}") from None


def _kind(given: Any) -> str:
    if isinstance(given, str):
        return f"the text {shown(given)}"
    if _is_chat(given):
        return "a list of messages"
    return f"{type(given).__name__} {shown(given)}"


def _way(given: Any) -> str:
    """How one comes to token ids from there."""
    if isinstance(given, str):
        return ", such as tokenizer.encode(text)"
    if isinstance(given, Mapping) and "input_ids" in given:
        return "; give its 'input_ids'"
    if _is_chat(given):
        return ", such as your tokenizer's apply_chat_template(messages, add_generation_prompt=True, return_dict=False)"
    return ""


def _is_chat(given: Any) -> bool:
    return isinstance(given, list | tuple) and bool(given) and all(isinstance(one, Mapping) for one in given)


def checked_prompt(request: Request, *, context: int, vocabulary_size: int) -> list[int]:
    """The prompt's token ids.

    Raises:
        RequestRefused: none, or too many, or one that isn't in the vocabulary.
    """
    prompt_ids = token_ids_of(request.prompt_ids, f"the prompt of request {request.id}", RequestRefused)
    if not prompt_ids:
        raise RequestRefused(f"request {request.id} has an empty prompt; give at least one token, such as bos")
    if len(prompt_ids) >= context:
        raise RequestRefused(
            f"the prompt of request {request.id} has {len(prompt_ids)} tokens; the context of {context} "
            "needs room for at least one more"
        )
    if bad := [token for token in prompt_ids if not 0 <= token < vocabulary_size]:
        raise RequestRefused(f"request {request.id} has token {bad[0]}; the vocabulary has 0 to {vocabulary_size - 1}")
    return prompt_ids
