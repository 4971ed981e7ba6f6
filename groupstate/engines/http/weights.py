"""Weights on their way to servers: what can't fit is refused before a server sees it, live tensors become a folder.

Rule: a server that begins to load what doesn't fit is broken by it, so everything that can be looked at here is.
"""

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio.to_thread
import attrs

from groupstate.engines.checkpoint import (
    DTYPES,
    Checkpoint,
    Header,
    folder_named,
    need_finite,
    need_fit,
    read_checkpoint,
    write_checkpoint,
)
from groupstate.engines.port import Weights
from groupstate.errors import EngineError

HAS_TORCH = importlib.util.find_spec("torch") is not None
"""Without it the numbers in a folder aren't looked at."""

FOLDER_MODE = 0o755
"""Servers may run as another user."""


@attrs.frozen
class Given:
    """Weights that are published."""

    version: int
    weights: Weights
    """As they were given, or the folder that they were written to."""
    checkpoint: Checkpoint | None = None
    """What is in that folder, where it is seen here."""

    @property
    def can_be_given_again(self) -> bool:
        """Live tensors can't: by then training may have changed them."""
        return not isinstance(self.weights, Mapping)


class Checkpoints:
    """What servers are to load, and what they have."""

    def __init__(self, weights_dir: str | os.PathLike[str] | None) -> None:
        self._weights_dir = None if weights_dir is None else folder_named("weights_dir", weights_dir).absolute()
        self._known: Checkpoint | None = None
        """One that the servers took; None as long as none is known."""
        self._given: Given | None = None

    async def prepare(self, weights: Weights, weight_version: int, root: str | None) -> Given:
        """
        Args:
            root: The checkpoint that the servers were started from, as they name it.

        Raises:
            EngineError: weights that can't fit, or that there is no way to a server for.
        """
        return await anyio.to_thread.run_sync(self._prepare, weights, weight_version, root)

    def _prepare(self, weights: Weights, weight_version: int, root: str | None) -> Given:
        what = f"version {weight_version}"
        if self._known is None:
            self._known = _read_if_here(root)
        if isinstance(weights, Mapping):
            written = self._write(weights, what)
            return Given(weight_version, str(written.folder), written)
        if not isinstance(weights, str | os.PathLike):
            raise EngineError(f"{what} is {type(weights).__name__}; give tensors by name, or a checkpoint's folder")
        folder = os.fspath(weights)
        if not os.path.isdir(folder):
            return Given(weight_version, folder)  # Seen by the servers alone, or a name that they know.
        found = read_checkpoint(folder)
        if self._known is not None:
            need_fit(found, self._known, what)
        if HAS_TORCH:
            need_finite(found, self._known or found, what)
        return Given(weight_version, os.path.abspath(folder), found)

    def _write(self, weights: Mapping[str, Any], what: str) -> Checkpoint:
        if self._weights_dir is None:
            raise EngineError(
                f"{what} is tensors, and servers read folders; give the engine weights_dir, a folder that they see "
                "too, or publish the folder of a checkpoint"
            )
        self._weights_dir.mkdir(parents=True, exist_ok=True)
        written = write_checkpoint(weights, self._known or _as_they_are(weights, what), what, self._weights_dir)
        written.folder.chmod(FOLDER_MODE)
        return written

    async def taken(self, given: Given) -> None:
        """Servers have them: what was written for earlier versions isn't needed any more."""
        before, self._given = self._given, given
        if self._known is None:
            self._known = given.checkpoint
        if before is not None and before.weights != given.weights:
            await self.refused(before)

    async def aclose(self) -> None:
        """What was written goes: servers have read it, and nobody is left to give it to them again."""
        if self._given is not None:
            await self.refused(self._given)

    async def refused(self, given: Given) -> None:
        """Nobody needs them: what was written for them goes."""
        if given.checkpoint is not None:
            await anyio.to_thread.run_sync(given.checkpoint.discard)


def _read_if_here(root: str | None) -> Checkpoint | None:
    """The servers' own checkpoint, where its path leads somewhere here too; one that is relative is theirs alone."""
    if root is None or not os.path.isabs(root) or not os.path.isdir(root):
        return None
    try:
        return read_checkpoint(root)
    except EngineError:
        return None  # In another format; then there is nothing to compare with.


def _as_they_are(weights: Mapping[str, Any], what: str) -> Checkpoint:
    """The shape of a checkpoint of which nothing is known but the tensors themselves."""
    names = {f"torch.{name}": stored for stored, (name, _) in DTYPES.items()}
    headers = {}
    for name, tensor in weights.items():
        dtype = names.get(str(getattr(tensor, "dtype", "")))
        if dtype is None:
            kind = getattr(tensor, "dtype", type(tensor).__name__)
            raise EngineError(f"{name!r} of {what} is {kind}; it must be a tensor of floating-point numbers")
        headers[name] = Header(dtype, tuple(tensor.shape))
    return Checkpoint(Path(), headers)
