"""The running batch of the torch engine: slots, their key-value cache, and one step of them all.

Rule 1: rows lie in slots 0 to n-1 without a gap, so a step reads plain views and gathers nothing. When rows
leave, the last ones move into their places.
Rule 2: outside `step` the rows either are all in the cache or, after `forget_cache`, none is.
Rule 3: no work per row inside the model: Python touches each row once a step, to hand out its token.
"""

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from groupstate.engines.port import Request
from groupstate.engines.transformer import Transformer, attend_causally, attention


class Sequenced(Protocol):
    """A row as the batch needs it."""

    request: Request
    prompt_ids: tuple[int, ...]
    token_ids: list[int]
    uniforms: Tensor


RowT = TypeVar("RowT", bound=Sequenced)


class SlotBatch(Generic[RowT]):
    def __init__(self, model: Transformer, slots_max: int) -> None:
        config = model.config
        device = model.head.weight.device
        self._model = model
        self.rows: list[RowT] = []
        self._cached_count = 0
        """Rows 0 to this one (not included) are in the cache; the others are computed whole in the next step."""
        self._cache_shape = (config.layers, slots_max, config.context, config.heads, config.width // config.heads)
        self._keys = self._values = torch.empty(0, device=device)
        """Made by the first step, and by the first after `free`."""
        self._uniforms = torch.zeros(slots_max, config.context, device=device)
        # Per slot: last token, its position, tokens drawn so far; temperature and top-p.
        self._counts = torch.zeros(slots_max, 3, dtype=torch.long, device=device)
        self._settings = torch.ones(slots_max, 2, dtype=torch.float64, device=device)
        self._longest = 0
        """Upper bound on the tokens of any row, kept on the host so that a step needn't ask the device."""

    def keep(self, live: Sequence[bool]) -> None:
        """Let the others go; the last rows move into the gaps."""
        count = sum(live)
        if count == len(live):
            return
        gaps = [slot for slot in range(count) if not live[slot]]
        movers = [slot for slot in range(count, len(live)) if live[slot]]
        if movers:
            self._move(movers, gaps)
        for gap, mover in zip(gaps, movers, strict=True):
            self.rows[gap] = self.rows[mover]
        del self.rows[count:]
        self._cached_count = min(self._cached_count, count)
        self._longest = max((len(row.prompt_ids) + len(row.token_ids) for row in self.rows), default=0)

    def join(self, joining: Sequence[RowT]) -> None:
        first = len(self.rows)
        for slot, row in enumerate(joining, start=first):
            self._uniforms[slot, : len(row.uniforms)] = row.uniforms
        if joining:
            settings = [(row.request.params.temperature, row.request.params.top_p) for row in joining]
            self._settings[first : first + len(joining)] = torch.tensor(settings, dtype=torch.float64)
            self.rows.extend(joining)

    def forget_cache(self) -> None:
        """The weights are new: compute every row again in the next step, its tokens stay."""
        self._cached_count = 0

    def free(self) -> None:
        """Give the cache's memory back."""
        self.forget_cache()
        self._keys = self._values = torch.empty(0, device=self._keys.device)

    def step(self) -> list[tuple[RowT, int, float]]:
        """Draw one token for every row: (row, token, log-probability)."""
        count, cached = len(self.rows), self._cached_count
        if not self._keys.numel():
            self._keys = torch.zeros(self._cache_shape, dtype=self._model.dtype, device=self._counts.device)
            self._values = torch.zeros_like(self._keys)
        parts = []
        if cached:
            self._longest += 1
            parts.append(self._decode(cached))
        if cached < count:
            parts.append(self._prefill(cached, count))
        logits = torch.cat(parts) if len(parts) > 1 else parts[0]
        self._cached_count = count
        counts = self._counts[:count]
        uniforms = self._uniforms[:count].gather(1, counts[:, 2:]).squeeze(1)
        tokens, log_probs = draw(logits, self._settings[:count, 0], self._settings[:count, 1], uniforms)
        counts[:, 0] = tokens
        counts[:, 1:] += 1
        return list(zip(self.rows, tokens.tolist(), log_probs.tolist(), strict=True))

    def _decode(self, count: int) -> Tensor:
        """Logits after the last token of rows 0 to `count`, which joins the cache."""
        positions = self._counts[:count, 1]
        rows = torch.arange(count, device=positions.device)
        longest = self._longest
        mask = (torch.arange(longest, device=positions.device) <= positions[:, None])[:, None, None]

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self._keys[layer], self._values[layer]
            keys[rows, positions] = key[:, 0]
            values[rows, positions] = value[:, 0]
            return attention(query, keys[:count, :longest], values[:count, :longest], mask)

        hidden = self._model.hidden(self._counts[:count, :1], positions[:, None], attend)
        return self._model.logits(hidden[:, 0])

    def _prefill(self, start: int, stop: int) -> Tensor:
        """Logits after all tokens of rows `start` to `stop`, which join the cache."""
        texts = [(*row.prompt_ids, *row.token_ids) for row in self.rows[start:stop]]
        # Siblings of a group have the same prompt: compute it once.
        unique = {text: number for number, text in enumerate(dict.fromkeys(texts))}
        longest = max(map(len, unique))
        device = self._counts.device
        input_ids = torch.tensor([text + (0,) * (longest - len(text)) for text in unique], device=device)
        where = torch.tensor([unique[text] for text in texts], device=device)
        lengths = torch.tensor([len(text) for text in unique], device=device)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            self._keys[layer, start:stop, :longest] = key[where]
            self._values[layer, start:stop, :longest] = value[where]
            return attend_causally(layer, query, key, value)

        positions = torch.arange(longest, device=device).expand_as(input_ids)
        hidden = self._model.hidden(input_ids, positions, attend)
        last = hidden[torch.arange(len(unique), device=device), lengths - 1]
        # `step` counts the token it draws next: the last one here stands one place before it.
        self._counts[start:stop, 1] = lengths[where] - 1
        drawn = [len(row.token_ids) for row in self.rows[start:stop]]
        self._counts[start:stop, 2] = torch.tensor(drawn, device=device)
        self._longest = max(self._longest, longest)
        return self._model.logits(last)[where]

    def _move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        source, target = torch.tensor(sources), torch.tensor(targets)
        longest = self._longest
        if self._keys.numel():
            self._keys[:, target, :longest] = self._keys[:, source, :longest]
            self._values[:, target, :longest] = self._values[:, source, :longest]
        for tensor in (self._uniforms, self._counts, self._settings):
            tensor[target] = tensor[source]


def draw(logits: Tensor, temperature: Tensor, top_p: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and their log-probabilities before temperature and top-p.

    Each row's own uniform number picks its token off the cumulative distribution, in double precision.
    """
    greedy = temperature == 0
    scaled = (logits - logits.amax(-1, keepdim=True)).double() / torch.where(greedy, 1.0, temperature)[:, None]
    probabilities = scaled.softmax(-1)
    if bool((top_p < 1).any()):
        probabilities = _nucleus(probabilities, top_p)
    cumulative = probabilities.cumsum(-1)
    beyond = cumulative > uniforms.double()[:, None] * cumulative[:, -1:]
    tokens = torch.where(greedy, logits.argmax(-1), beyond.to(torch.uint8).argmax(-1))
    return tokens, logits.log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)


def _nucleus(probabilities: Tensor, top_p: Tensor) -> Tensor:
    """Zero all but the fewest tokens that hold `top_p` of the probability."""
    ranked, order = probabilities.sort(dim=-1, descending=True, stable=True)
    outside = ranked.cumsum(-1) - ranked >= top_p[:, None]
    return torch.zeros_like(probabilities).scatter(-1, order, ranked.masked_fill(outside, 0.0))
