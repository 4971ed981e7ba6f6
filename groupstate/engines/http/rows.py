"""One request under way: what it has so far, and why its stream was closed.

Rule: tokens are kept by the piece, with the weight version that the piece was asked for under; a piece that failed
leaves nothing behind.
"""

import hashlib
from typing import Literal, TypeAlias

import anyio
import attrs

from groupstate.core.events import VersionSpan
from groupstate.engines.http.answers import Piece
from groupstate.engines.http.dialects import STRUCTURED
from groupstate.engines.http.routing import Replica
from groupstate.engines.port import FinishReason, Generation, Request, Tokenizer

Why: TypeAlias = Literal["abort", "again"]
"""`abort`: it ends with what it has. `again`: it goes on, or begins anew, once it may."""

SEED_BITS = 31
"""What every server takes."""


@attrs.define(eq=False)
class Row:
    request: Request
    prompt_ids: tuple[int, ...]
    has_ids: bool
    scope: anyio.CancelScope = attrs.field(factory=anyio.CancelScope)
    """Cancelled to close its stream, or to end its wait."""
    why: Why | None = None
    replica: Replica | None = None
    """Where its stream is."""
    piece: Piece | None = None
    """What that stream has given."""
    version: int = 0
    """The weights that the piece was asked for under."""
    token_ids: list[int] = attrs.field(factory=list)
    log_probs: list[float] = attrs.field(factory=list)
    spans: list[VersionSpan] = attrs.field(factory=list)
    texts: list[str] = attrs.field(factory=list)
    pieces_kept: int = 0
    refused_since: float | None = None
    """When servers began to say that they are busy."""
    asked_twice: bool = False
    """A connection failed before the answer began, and the request was sent once more."""

    def begin(self) -> None:
        """Another piece; what was aborted between two of them stays so."""
        self.scope = anyio.CancelScope()
        if self.why == "abort":
            self.scope.cancel()
        else:
            self.why = None

    def close(self, why: Why) -> None:
        """Close its stream, or end its wait."""
        if self.why is None or why == "abort":
            self.why = why
        self.scope.cancel()

    def keep(self) -> FinishReason | None:
        """Take over what the piece gave; says why the answer ends with it, if it does."""
        piece, self.piece = self.piece, None
        if piece is None:
            return None
        if piece.token_ids:
            start = len(self.token_ids)
            self.token_ids += piece.token_ids
            self.log_probs += piece.log_probs
            self.pieces_kept += 1
            stop = len(self.token_ids)
            if self.spans and self.spans[-1].weight_version == self.version:
                start = self.spans.pop().start
            self.spans.append(VersionSpan(start, stop, self.version))
        self.texts += piece.texts
        return piece.finish or self._end(piece)

    def _end(self, piece: Piece) -> FinishReason | None:
        """A stream that was closed between its last token and the word of its end."""
        if piece.token_ids and piece.token_ids[-1] in self.request.params.stop_token_ids:
            return "stop"
        return "length" if piece.token_ids and len(piece.token_ids) == piece.tokens_max else None

    @property
    def can_go_on(self) -> bool:
        """Whether it may be asked for from where it is; a text or a grammar has no such place."""
        return self.has_ids and not STRUCTURED & self.request.params.extra.keys()

    def restart(self) -> None:
        """Begin anew, with the request's own seed."""
        self.piece = None
        self.pieces_kept = 0
        for kept in (self.token_ids, self.log_probs, self.spans, self.texts):
            kept.clear()

    @property
    def seed(self) -> int | None:
        """Of the next piece. The same seed again would draw the same numbers for other tokens."""
        seed = self.request.params.seed_bits
        if seed is None or not self.pieces_kept:
            return seed
        digest = hashlib.blake2b(f"{seed}/{self.pieces_kept}".encode(), digest_size=8).digest()
        return int.from_bytes(digest) >> (64 - SEED_BITS)

    def generation(self, finish_reason: FinishReason, tokenizer: Tokenizer | None) -> Generation:
        token_ids = tuple(self.token_ids)
        text = "".join(self.texts) if tokenizer is None else tokenizer.decode(token_ids)
        return Generation(token_ids, tuple(self.log_probs), tuple(self.spans), finish_reason, text)
