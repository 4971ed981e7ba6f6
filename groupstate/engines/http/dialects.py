"""How a kind of server is asked, what its answers look like, and how it is given weights.

Rule 1: sampling is what the request says. A server fills what isn't said from the model's own settings (top-k,
penalties), which no log-probability would show; so what is off is sent as off.
Rule 2: a parameter that the server doesn't know is refused here, since servers ignore it without a word.
Rule 3: weights are given by `load` in one go, and what it raises says whether the old ones are still whole.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

import attrs

from groupstate.core.typed_settings import unknown_key
from groupstate.engines.http import answers
from groupstate.engines.http.answers import Chunk, Garbage, Lacking, Piece
from groupstate.engines.http.client import Answer, Client
from groupstate.engines.port import SamplingParams
from groupstate.errors import EngineError, RequestRefused
from groupstate.logs import Logger

log = Logger("groupstate.engines.openai")

DialectName: TypeAlias = Literal["vllm", "sglang", "text", "chat"]

ASK_S = 60.0
"""For an answer that takes a server no work."""

LOAD_S = 1800.0
"""For weights: a checkpoint of a terabyte from a network file system."""

REPEATED_MAX = 1_000
"""Tokens that a server may say again with each event before that is warned of. What an answer costs grows with the
square of its length then: one of 8,192 tokens takes 18 s of this process, one of 32,768 takes 300 s."""

STRUCTURED = frozenset(
    {"structured_outputs", "response_format", "json_schema", "regex", "ebnf", "structural_tag", "guided_json"}
)
"""Parameters under which an answer can't be gone on with: the server would begin its grammar anew in the middle."""


@attrs.frozen
class Ask:
    """What one stream is asked for."""

    model: str
    prompt_ids: tuple[int, ...]
    text: str
    tokens_max: int
    params: SamplingParams
    seed: int | None
    log_probs: bool
    tokens_before: int = 0
    """Tokens of the answer that earlier streams gave; they are at the end of `prompt_ids`."""


@attrs.frozen
class Met:
    """What a server says of itself."""

    models: Mapping[str, int | None]
    """Name -> tokens of prompt and answer together, where it says."""
    root: str | None = None
    """The checkpoint that the first model was started from, as the server names it."""


class Untouched(EngineError):
    """Weights that didn't get as far as to change anything."""


class Dialect:
    """Texts over /v1/completions: what any server knows. The others differ from it."""

    name: ClassVar[DialectName] = "text"
    has_ids: ClassVar[bool] = False
    takes_weights: ClassVar[bool] = False
    path: ClassVar[str] = "/v1/completions"
    own: ClassVar[frozenset[str]] = frozenset(
        {"model", "prompt", "messages", "max_tokens", "temperature", "top_p", "seed", "stream", "stream_options", "n"}
    )
    """What the engine sets itself."""
    known: ClassVar[frozenset[str] | None] = None
    """Parameters that may be passed on; None: any."""

    def check(self, request_id: str, params: SamplingParams) -> None:
        """
        Raises:
            RequestRefused: a parameter that the dialect lacks.
        """
        if params.stop_token_ids and not self.has_ids:
            raise RequestRefused(
                f"request {request_id} has stop_token_ids, and the dialect {self.name!r} knows no tokens; "
                "use stop, which takes texts"
            )
        for key in params.extra:
            if key in self.own:
                raise RequestRefused(f"request {request_id} has {key!r} among its extra parameters; the engine sets it")
            if self.known is not None and key not in self.known:
                where = f"request {request_id}: the dialect {self.name!r}"
                raise RequestRefused(unknown_key(key, sorted(self.known), where))

    def body(self, ask: Ask) -> dict[str, Any]:
        return {"model": ask.model, "prompt": ask.text, **self._common(ask), **ask.params.extra}

    def _common(self, ask: Ask) -> dict[str, Any]:
        seed = {} if ask.seed is None else {"seed": ask.seed}
        params = ask.params
        return {
            "max_tokens": ask.tokens_max,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "stream": True,
            **seed,
        }

    def chunk(self, data: bytes, piece: Piece, ask: Ask) -> Chunk:
        """
        Raises:
            Garbage: it can't be read.
            Lacking: it has no tokens or log-probabilities where they are needed.
            Failed: it says that the request failed.
        """
        event = answers.completion(data)
        choice = event.choice
        if choice is None:
            return Chunk(total=event.total)
        return Chunk(text=choice.text or "", finish=choice.finish_reason, total=event.total)

    # The server ------------------------------------------------------------------------------------

    async def meet(self, client: Client) -> Met:
        """
        Raises:
            EngineError: it is no such server, or the key is wrong.
        """
        answer = await client.get("/v1/models", timeout_s=ASK_S)
        if answer.status in (401, 403):
            raise EngineError(f"it refuses the API key: {answer.words}")
        if answer.missing:
            return Met({})
        listed = answer.json().get("data")
        if not answer.ok or not isinstance(listed, list):
            raise EngineError(f"/v1/models answers {answer.words}")
        models = [model for model in listed if isinstance(model, dict) and isinstance(model.get("id"), str)]
        root = models[0].get("root") if models else None
        return Met(
            {model["id"]: _whole(model.get("max_model_len")) for model in models},
            root if isinstance(root, str) else None,
        )

    async def label(self, client: Client) -> str | None:
        """What the server calls the weights it has; None if it doesn't say."""
        return None

    async def load(self, client: Client, folder: str, label: str, *, stay_paused: bool) -> None:
        """Take the weights of a folder that the server can read.

        Raises:
            Untouched: it can't, and the old ones are whole.
            EngineError: it failed, and nobody knows what it has now.
        """
        raise Untouched(f"the dialect {self.name!r} can't give a server weights")

    async def freeze(self, client: Client) -> bool:
        """Stop all work and keep the requests; False if the server can't."""
        return False

    async def thaw(self, client: Client) -> None:
        """Go on."""

    async def sleep(self, client: Client) -> None:
        """Give the memory back.

        Raises:
            EngineError: the server can't.
        """
        raise EngineError(f"the dialect {self.name!r} can't make a server sleep")

    async def wake(self, client: Client, part: str | None = None) -> None:
        """Take the memory again: all of it, or that of `weights` or `kv_cache`."""

    async def rouse(self, client: Client) -> None:
        """Undo a pause or sleep that somebody who is gone left it in."""


class Chat(Dialect):
    """Texts over /v1/chat/completions: the prompt is what the user says."""

    name = "chat"
    path = "/v1/chat/completions"

    def body(self, ask: Ask) -> dict[str, Any]:
        body = {"model": ask.model, "messages": [{"role": "user", "content": ask.text}], **self._common(ask)}
        if "max_completion_tokens" in ask.params.extra:
            del body["max_tokens"]  # Its name of late; servers want one of the two.
        return {**body, **ask.params.extra}

    def chunk(self, data: bytes, piece: Piece, ask: Ask) -> Chunk:
        event = answers.completion(data)
        choice = event.choice
        if choice is None:
            return Chunk(total=event.total)
        text = choice.delta.content if choice.delta is not None else None
        return Chunk(text=text or "", finish=choice.finish_reason, total=event.total)


class Vllm(Dialect):
    """vLLM's server: token ids in and out, and the endpoints of VLLM_SERVER_DEV_MODE."""

    name = "vllm"
    has_ids = True
    takes_weights = True
    own = Dialect.own | {"stop_token_ids", "logprobs", "return_token_ids", "echo", "use_beam_search", "prompt_logprobs"}
    known = frozenset(
        {
            *("top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias"),
            *("stop", "include_stop_str_in_output", "ignore_eos", "min_tokens", "bad_words", "allowed_token_ids"),
            *("skip_special_tokens", "spaces_between_special_tokens", "response_format", "structured_outputs"),
            *("guided_json", "priority", "cache_salt", "stream_interval", "vllm_xargs", "kv_transfer_params"),
            *("thinking_token_budget", "repetition_detection", "user", "session_id", "request_id", "logits_processors"),
        }
    )
    off: ClassVar[dict[str, Any]] = {
        "top_k": 0,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
    }

    def body(self, ask: Ask) -> dict[str, Any]:
        extra = dict(ask.params.extra)
        if isinstance(extra.get("min_tokens"), int):
            extra["min_tokens"] = max(0, extra["min_tokens"] - ask.tokens_before)
        return {
            "model": ask.model,
            "prompt": ask.prompt_ids,
            **self._common(ask),
            "stop_token_ids": ask.params.stop_token_ids,
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
            **({"logprobs": 0} if ask.log_probs else {}),
            **self.off,
            **extra,
        }

    def chunk(self, data: bytes, piece: Piece, ask: Ask) -> Chunk:
        event = answers.completion(data)
        choice = event.choice
        if choice is None:
            return Chunk(total=event.total)
        if choice.prompt_token_ids is not None and choice.prompt_token_ids != list(ask.prompt_ids):
            raise Lacking("it changed the prompt; leave it as it is, without truncation or special tokens of its own")
        if choice.token_ids is None:
            if choice.text:
                raise Lacking(
                    "it gives no token ids; the dialect 'vllm' needs a vLLM server that knows return_token_ids, "
                    "the dialect 'text' needs none"
                )
            return Chunk(finish=choice.finish_reason, total=event.total)
        log_probs = self._log_probs(choice.logprobs, len(choice.token_ids)) if ask.log_probs else ()
        return Chunk(choice.token_ids, log_probs, choice.text or "", finish=choice.finish_reason, total=event.total)

    def _log_probs(self, given: Any, token_count: int) -> Sequence[float]:
        values = None if given is None else given.token_logprobs
        if values is None and token_count:
            raise Lacking(
                "it gives no log-probabilities; start the server without what forbids them, or the engine with "
                "log_probs=False"
            )
        if values is not None and None in values:
            raise Garbage("a token without a log-probability")
        return values or ()

    async def label(self, client: Client) -> str | None:
        answer = await client.get("/weight_info", timeout_s=ASK_S)
        label = answer.json().get("weight_version") if answer.ok else None
        return label if isinstance(label, str) else None

    async def load(self, client: Client, folder: str, label: str, *, stay_paused: bool) -> None:
        paused = await client.post("/pause", params={"mode": "abort"}, timeout_s=ASK_S)
        if not (paused.ok or paused.missing):
            raise Untouched(f"/pause answers {paused.words}")
        call = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        loaded = await client.post("/collective_rpc", call, timeout_s=LOAD_S)
        if loaded.missing:
            if not stay_paused:
                await self.thaw(client)
            raise Untouched(
                "it takes no weights: /collective_rpc is not there. Start the server with VLLM_SERVER_DEV_MODE=1, or "
                "give the engine publish=..., which brings them by a way of your own"
            )
        if not loaded.ok:
            raise EngineError(
                f"reload_weights: {loaded.words} (the server must see the folder {folder} under this path)"
            )
        # What is in the cache was computed under the old weights.
        reset = await client.post("/reset_prefix_cache", timeout_s=ASK_S)
        if not reset.ok or reset.json().get("success") is False:
            raise EngineError(f"/reset_prefix_cache: {reset.words}")
        named = await client.post("/update_weight_version", {"new_version": label}, timeout_s=ASK_S)
        if not (named.ok or named.missing):
            raise EngineError(f"/update_weight_version: {named.words}")
        if not stay_paused:
            await self.thaw(client)

    async def freeze(self, client: Client) -> bool:
        return (await client.post("/pause", params={"mode": "keep"}, timeout_s=ASK_S)).ok

    async def thaw(self, client: Client) -> None:
        _need(await client.post("/resume", timeout_s=ASK_S), "/resume", or_missing=True)

    async def sleep(self, client: Client) -> None:
        slept = await client.post("/sleep", params={"level": "1"}, timeout_s=LOAD_S)
        if slept.missing:
            raise EngineError(
                "it can't sleep: /sleep is not there. Start the server with VLLM_SERVER_DEV_MODE=1 and "
                "--enable-sleep-mode"
            )
        _need(slept, "/sleep")

    async def wake(self, client: Client, part: str | None = None) -> None:
        params = None if part is None else {"tags": part}
        _need(await client.post("/wake_up", params=params, timeout_s=LOAD_S), "/wake_up")

    async def rouse(self, client: Client) -> None:
        if (await client.get("/is_sleeping", timeout_s=ASK_S)).json().get("is_sleeping") is True:
            await self.wake(client)
        if (await client.get("/is_paused", timeout_s=ASK_S)).json().get("is_paused") is True:
            await self.thaw(client)


class SGLang(Dialect):
    """SGLang's own /generate, which gives tokens and log-probabilities by themselves."""

    name = "sglang"
    has_ids = True
    takes_weights = True
    path = "/generate"
    _warned = False
    own = Dialect.own | {"stop_token_ids", "max_new_tokens", "sampling_seed"}
    known = frozenset(
        {
            *("top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens"),
            *("stop", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"),
            *("json_schema", "regex", "ebnf", "structural_tag", "custom_params", "logit_bias", "stop_regex"),
        }
    )
    off: ClassVar[dict[str, Any]] = {
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
    }

    def body(self, ask: Ask) -> dict[str, Any]:
        params, extra = ask.params, dict(ask.params.extra)
        if isinstance(extra.get("min_new_tokens"), int):
            extra["min_new_tokens"] = max(0, extra["min_new_tokens"] - ask.tokens_before)
        sampling = {
            "max_new_tokens": ask.tokens_max,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "stop_token_ids": params.stop_token_ids,
            **({} if ask.seed is None else {"sampling_seed": ask.seed}),
            **self.off,
            **extra,
        }
        # The tokens come with the log-probabilities, so these are asked for in any case.
        return {"input_ids": ask.prompt_ids, "sampling_params": sampling, "return_logprob": True, "stream": True}

    def chunk(self, data: bytes, piece: Piece, ask: Ask) -> Chunk:
        event = answers.generated(data)
        meta = event.meta_info
        if meta is None or meta.completion_tokens is None:
            raise Garbage(f"an event without meta_info.completion_tokens: {data[:80]!r}")
        pairs = meta.output_token_logprobs
        if pairs is None:
            if meta.completion_tokens:
                raise Lacking("it gives no output_token_logprobs, which the dialect 'sglang' reads the tokens from")
            pairs = []
        whole = len(pairs) == meta.completion_tokens
        pairs = self._added(pairs, len(piece.token_ids), meta.completion_tokens)
        if not all(_is_pair(pair) for pair in pairs):
            raise Garbage(f"output_token_logprobs of {pairs[:2]!r}")
        finish = None if meta.finish_reason is None else str(meta.finish_reason.get("type"))
        return Chunk(
            [pair[1] for pair in pairs],
            [float(pair[0]) for pair in pairs],
            text=event.text,
            text_so_far=event.text if whole else None,
            finish=finish,
            total=meta.completion_tokens,
        )

    def _added(self, pairs: list[Any], before: int, total: int) -> list[Any]:
        """What is new: an event has all tokens so far, or with --incremental-streaming-output only those since."""
        if len(pairs) == total:
            if before > REPEATED_MAX and not self._warned:
                self._warned = True
                log.warning("SGLang repeats long answers; start it with --incremental-streaming-output", count=before)
            return pairs[before:]
        if before + len(pairs) == total:
            return pairs
        raise Garbage(f"{len(pairs)} tokens after {before}, and the server counted {total}")

    async def label(self, client: Client) -> str | None:
        answer = await client.get("/get_model_info", timeout_s=ASK_S)
        label = answer.json().get("weight_version") if answer.ok else None
        return label if isinstance(label, str) else None

    async def load(self, client: Client, folder: str, label: str, *, stay_paused: bool) -> None:
        paused = await client.post("/pause_generation", {"mode": "abort"}, timeout_s=ASK_S)
        if not (paused.ok or paused.missing):
            raise Untouched(f"/pause_generation answers {paused.words}")
        what = {"model_path": folder, "weight_version": label, "flush_cache": True, "abort_all_requests": True}
        loaded = await client.post("/update_weights_from_disk", what, timeout_s=LOAD_S)
        if loaded.missing:
            if not stay_paused:
                await self.thaw(client)
            raise Untouched("it takes no weights: /update_weights_from_disk is not there")
        if not loaded.ok or loaded.json().get("success") is not True:
            raise EngineError(f"/update_weights_from_disk: {loaded.words}")
        if not stay_paused:
            await self.thaw(client)

    async def thaw(self, client: Client) -> None:
        _need(await client.post("/continue_generation", {}, timeout_s=ASK_S), "/continue_generation", or_missing=True)

    async def sleep(self, client: Client) -> None:
        path = "/release_memory_occupation"
        _need(await client.post(path, {}, timeout_s=LOAD_S), path)

    async def wake(self, client: Client, part: str | None = None) -> None:
        path = "/resume_memory_occupation"
        _need(await client.post(path, {} if part is None else {"tags": [part]}, timeout_s=LOAD_S), path)


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def _is_pair(pair: list[Any]) -> bool:
    return len(pair) >= 2 and isinstance(pair[0], (int, float)) and type(pair[1]) is int


def _need(answer: Answer, path: str, *, or_missing: bool = False) -> None:
    if not (answer.ok or (or_missing and answer.missing)):
        raise EngineError(f"{path}: {answer.words}")


DIALECTS: dict[str, type[Dialect]] = {dialect.name: dialect for dialect in (Vllm, SGLang, Dialect, Chat)}
