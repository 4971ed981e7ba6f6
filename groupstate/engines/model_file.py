"""A TorchEngine from a file of weights, such as the demo's checkpoint.

Rule: the file is loaded with weights_only, so that one from a stranger runs no code.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from groupstate.core.arguments import integer, string
from groupstate.core.typed_settings import unknown_key
from groupstate.engines.port import Engine
from groupstate.engines.tokenizer import CharTokenizer
from groupstate.errors import BadInput, BadSettings, MissingExtra

OPTIONS = ("alphabet", "device", "heads", "model", "seed", "slots_max", "threads")
OPTIONS_IN_WORDS = frozenset({"device", "model"})
COUNTS = frozenset({"heads", "seed", "slots_max", "threads"})


class PromptTokenizer(CharTokenizer):
    """Puts the beginning-of-sequence token before a text, as the models here were trained to see it."""

    def encode(self, text: str) -> list[int]:
        return [self.bos_id, *super().encode(text)]


def engine_from_file(
    model: str | Path,
    *,
    alphabet: str | None = None,
    heads: int | None = None,
    device: str = "cpu",
    slots_max: int | None = None,
    seed: int = 0,
    threads: int | None = None,
) -> Engine:
    """An engine with the weights of `model`.

    Args:
        model: what `torch.save` made of a dict with the weights under `model` (or `state_dict`), and maybe
            `alphabet` and, by itself or under `config` or `settings`, `heads`. Every other size is read off
            the weights.
        alphabet: characters in the order of their tokens, where the file doesn't say.
        heads: attention heads, where the file doesn't say.

    Raises:
        BadInput: not such a file.
        MissingExtra: torch isn't installed.
    """
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise MissingExtra("the engine 'torch'", "torch", "torch") from error
    from groupstate.engines.torch import SLOTS_MAX, TorchEngine
    from groupstate.engines.transformer import Transformer

    path = Path(model)
    state = _load(path)
    weights = state.get("model", state.get("state_dict"))
    if not isinstance(weights, Mapping):
        keys = ", ".join(sorted(map(str, state))) or "nothing"
        raise BadInput(f"{path} has no weights under 'model' or 'state_dict'; it has {keys}")
    network = Transformer(_config(path, weights, heads or _found(state, "heads")))
    try:
        network.load_state_dict(dict(weights))
    except RuntimeError as error:
        raise BadInput(f"{path}: the weights don't fit the model: {error}") from error
    tokenizer = _tokenizer(path, alphabet or _found(state, "alphabet"), network.config.vocabulary_size)
    return TorchEngine(
        network,
        tokenizer,
        slots_max=SLOTS_MAX if slots_max is None else slots_max,
        device=device,
        seed=seed,
        threads=threads,
    )


def engine_from_options(options: Mapping[str, Any], where: str) -> Engine:
    """The same from the `[engine]` table of a settings file.

    Raises:
        BadSettings: an option that doesn't exist or is of another type, or no model.
    """
    for key in options:
        if key not in OPTIONS:
            raise BadSettings(unknown_key(key, OPTIONS, where))
    if not options.get("model"):
        raise BadSettings(f"{where}: the engine 'torch' needs a file of weights: model = \"model.pt\" (--model)")
    for key in OPTIONS_IN_WORDS & options.keys():
        string(f"{where}: {key}", options[key], error=BadSettings)
    counts = {key: integer(f"{where}: {key}", options[key], error=BadSettings) for key in COUNTS & options.keys()}
    return engine_from_file(**{**options, **counts})


def _load(path: Path) -> dict[str, Any]:
    import torch

    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise BadInput(f"{path}: there is no such file") from error
    except Exception as error:
        # Whatever torch raises on a file that holds something else.
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BadInput(f"{path} can't be loaded as weights: {reason}") from error
    if not isinstance(state, dict):
        raise BadInput(f"{path} holds {type(state).__name__}; it must be a dict with the weights under 'model'")
    return state


def _found(state: Mapping[str, Any], name: str) -> Any:
    for place in (state, state.get("config"), state.get("settings")):
        if isinstance(place, Mapping) and place.get(name) is not None:
            return place[name]
    return None


def _config(path: Path, weights: Mapping[str, Any], heads: int | None) -> Any:
    from groupstate.engines.transformer import TransformerConfig

    try:
        vocabulary_size, width = weights["token.weight"].shape
        context = weights["position.weight"].shape[0]
    except (KeyError, AttributeError, ValueError) as error:
        raise BadInput(f"{path} holds other weights than those of groupstate's transformer ({error!r})") from error
    if heads is None:
        raise BadInput(f"{path} doesn't say how many attention heads the model has; give heads")
    layers = {name.split(".")[1] for name in weights if name.startswith("blocks.")}
    return TransformerConfig(
        vocabulary_size=vocabulary_size, context=context, width=width, layers=len(layers), heads=heads
    )


def _tokenizer(path: Path, alphabet: Sequence[str] | None, vocabulary_size: int) -> PromptTokenizer:
    if alphabet is None:
        raise BadInput(f"{path} doesn't say which characters its tokens are; give alphabet")
    tokenizer = PromptTokenizer("".join(alphabet))
    if tokenizer.vocabulary_size != vocabulary_size:
        raise BadInput(
            f"{path} has {vocabulary_size} tokens, but the alphabet {tokenizer.alphabet!r} makes "
            f"{tokenizer.vocabulary_size}: three special tokens and one for each character"
        )
    return tokenizer
