"""The trainer's checkpoint: weights, optimizer and the run's mark in one file that is there whole or not at all."""

import io
import os
from pathlib import Path
from typing import Any

import torch

from groupstate import CheckpointMark
from groupstate.errors import BadInput

FILE = "checkpoint.pt"


class Checkpoint:
    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE

    def save(self, state: dict[str, Any], mark: CheckpointMark) -> None:
        """Write beside, flush, then put in place."""
        buffer = io.BytesIO()
        torch.save({**state, "mark": mark.to_json()}, buffer)
        beside = self.path.with_suffix(".tmp")
        with beside.open("wb") as file:
            file.write(buffer.getvalue())
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self.path)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def load(self) -> tuple[dict[str, Any], CheckpointMark] | None:
        """The last checkpoint; None if there is none.

        Raises:
            BadInput: the file is damaged.
        """
        if not self.path.exists():
            return None
        try:
            state = torch.load(self.path, weights_only=True)
            return state, CheckpointMark.from_json(state.pop("mark"))
        except (RuntimeError, KeyError, OSError) as error:
            raise BadInput(f"{self.path} can't be read as a checkpoint of the demo: {error}") from error
