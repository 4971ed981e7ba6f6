"""An OpenAIEngine from the `[engine]` table of a settings file.

Rule: a key never stands in a file; the file names the variable of the environment that has it.
"""

import os
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from groupstate.core.typed_settings import Settings, unknown_key
from groupstate.engines.port import Engine, InFlight, Tokenizer
from groupstate.errors import BadSettings


class Options(Settings, frozen=True):
    """The arguments of `OpenAIEngine` that a file can say."""

    url: str | None = None
    urls: tuple[str, ...] = ()
    model: str | None = None
    dialect: Literal["vllm", "sglang", "text", "chat"] = "vllm"
    tokenizer: str | None = None
    """A name or folder that the package transformers knows."""
    api_key_env: str | None = None
    """The variable that has the key."""
    in_flight: InFlight | None = None
    weight_version: int = 0
    log_probs: bool = True
    context: int | None = None
    vocabulary_size: int | None = None
    slots_max: int | None = None
    stall_s: float = 600.0
    reconnect_s: float = 300.0


async def engine_from_options(options: Mapping[str, Any], where: str) -> Engine:
    """An engine whose servers are up.

    Raises:
        BadSettings: an option that can't be.
        EngineError: a server that isn't up.
        MissingExtra: httpx isn't installed.
    """
    from groupstate.engines.openai import OpenAIEngine

    given = _checked(options, where)
    arguments = msgspec.structs.asdict(given)
    for name in ("url", "urls", "tokenizer", "api_key_env"):
        del arguments[name]
    engine = OpenAIEngine(
        given.urls if given.url is None else given.url,
        tokenizer=None if given.tokenizer is None else _tokenizer(given.tokenizer, where),
        api_key=None if given.api_key_env is None else os.environ[given.api_key_env],
        **arguments,
    )
    try:
        await engine.start()
    except BaseException:
        await engine.aclose()
        raise
    return engine


def _checked(options: Mapping[str, Any], where: str) -> Options:
    for key in options:
        if key not in Options.__struct_fields__:
            raise BadSettings(unknown_key(key, Options.__struct_fields__, where))
    try:
        given = Options(**options)
    except BadSettings as error:
        raise BadSettings(f"{where}: {error}") from error
    if (given.url is None) == (not given.urls):
        raise BadSettings(f"{where}: the engine 'openai' needs its servers: url = \"http://localhost:8000\", or urls")
    if given.api_key_env is not None and given.api_key_env not in os.environ:
        raise BadSettings(f"{where}: api_key_env names {given.api_key_env}, which isn't set")
    return given


def _tokenizer(name: str, where: str) -> Tokenizer:
    from groupstate.engines.tokenizer import TransformersTokenizer

    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise BadSettings(f"{where}: a tokenizer needs the package transformers: pip install transformers") from error
    try:
        return TransformersTokenizer(AutoTokenizer.from_pretrained(name))
    except Exception as error:
        # Whatever it raises on a name that leads to none.
        raise BadSettings(f"{where}: the tokenizer {name!r} can't be loaded: {error}") from error
