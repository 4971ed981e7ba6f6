"""Weights as a folder of safetensors files: what is in one, whether weights fit it, and how to write another.

Rule: whatever is wrong with weights is found before an engine is touched: by names, shapes and types from the headers
of the files that it was loaded from, and by a look at every number.
"""

import json
import math
import mmap
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Annotated, Any

import attrs
import msgspec

from groupstate.core.arguments import shown
from groupstate.errors import EngineError

HEADER_BYTES_MAX = 100_000_000
"""The format's own bound."""

NAMES_SHOWN_MAX = 4

DTYPES = {"F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2)}
"""Name in a header -> torch's name, and bytes. What is stored otherwise is quantized: no trainer's state fits it."""

OUTPUT = "lm_head.weight"
"""The tensor that a model with tied weights leaves out, or has twice."""


@attrs.frozen
class Header:
    """One tensor of a checkpoint."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def is_plain(self) -> bool:
        """Numbers as they are, and not quantized."""
        return self.dtype in DTYPES


@attrs.frozen
class Checkpoint:
    """A folder of safetensors files."""

    folder: Path
    headers: Mapping[str, Header]
    tied: bool = False
    """Whether its output layer is its input layer, so that one of the two is left out."""
    is_ours: bool = False
    """Whether it was written here, and goes when it is replaced."""

    def discard(self) -> None:
        if self.is_ours:
            shutil.rmtree(self.folder, ignore_errors=True)


def folder_named(name: str, value: Any) -> Path:
    """
    Raises:
        EngineError: it isn't what names a folder.
    """
    if not isinstance(value, str | os.PathLike) or not isinstance(os.fspath(value), str) or not os.fspath(value):
        raise EngineError(f"{name} is {shown(value)}; it must be the name of a folder")
    return Path(value)


def model_folder(model: str, revision: str | None, cache: str | None) -> Path:
    """Where the files of a model are that was loaded by its path, or by its name on the hub.

    Raises:
        EngineError: nowhere on this machine.
    """
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True))
    except Exception as error:
        # Whatever the hub's client raises where its cache lacks the model.
        raise EngineError(f"the files of {model!r} aren't in the hub's cache: {error}") from error


def read_checkpoint(folder: str | os.PathLike[str]) -> Checkpoint:
    """What a folder holds, from the headers alone.

    Raises:
        EngineError: it isn't one, or can't be read, or a file in it is cut short.
    """
    path = Path(folder)
    try:
        if not path.is_dir():
            raise EngineError(f"{path} is no folder; weights are a folder with safetensors files, or tensors by name")
        headers: dict[str, Header] = {}
        for file in _files(path):
            headers |= {name: header for name, (header, _) in _read_headers(file).items()}
        config = _read_json(path / "config.json") if (path / "config.json").exists() else {}
        return Checkpoint(path.resolve(), headers, tied=bool(config.get("tie_word_embeddings", False)))
    except (OSError, ValueError) as error:
        # A path with a NUL is a ValueError.
        raise EngineError(f"{path} can't be read: {error}") from error


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    names = _names(index) if index.exists() else None
    files = [folder / name for name in names] if names else list(folder.glob("*.safetensors"))
    if not files:
        raise EngineError(f"{folder} has no *.safetensors")
    if missing := sorted(file.name for file in files if not file.exists()):
        raise EngineError(f"{folder} lacks {_shown(missing)}, which its {index.name} names")
    return sorted(files)


def _names(index: Path) -> set[str]:
    """Files that an index names."""
    by_tensor = _read_json(index).get("weight_map", {})
    if not isinstance(by_tensor, dict) or not all(isinstance(name, str) for name in by_tensor.values()):
        raise EngineError(f"{index} has a weight_map that isn't one from tensors to files")
    return set(by_tensor.values())


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise EngineError(f"{path} is no JSON: {error}") from error
    if not isinstance(data, dict):
        raise EngineError(f"{path} holds {type(data).__name__}; it must be a JSON object")
    return data


def _read_headers(file: Path) -> dict[str, tuple[Header, int]]:
    """Name -> its header, and where its numbers begin in the file."""
    bytes_total = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(HEADER_BYTES_MAX, bytes_total):
                raise EngineError(f"{file} is no safetensors file, or is cut short in its header")
            table = msgspec.convert(json.loads(stream.read(length)), dict[str, Any])
        table.pop("__metadata__", None)
        entries = msgspec.convert(table, dict[str, _Entry])
    except (struct.error, ValueError, RecursionError, msgspec.ValidationError) as error:
        raise EngineError(f"{file} is no safetensors file: its header can't be read ({error!r})") from error
    end = max((entry.data_offsets[1] for entry in entries.values()), default=0)
    headers = {}
    for name, entry in entries.items():
        header, (start, stop) = Header(entry.dtype, entry.shape), entry.data_offsets
        if header.is_plain and stop - start != math.prod(entry.shape) * DTYPES[entry.dtype][1]:
            raise EngineError(
                f"{file} has {stop - start:,} bytes for {name!r}, which don't make {list(entry.shape)} {entry.dtype}"
            )
        headers[name] = header, 8 + length + start
    if bytes_total < 8 + length + end:
        raise EngineError(f"{file} is cut short: it has {bytes_total:,} bytes of {8 + length + end:,}")
    return headers


class _Entry(msgspec.Struct):
    """One tensor in the header of a file."""

    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    data_offsets: tuple[Annotated[int, msgspec.Meta(ge=0)], Annotated[int, msgspec.Meta(ge=0)]]


def need_finite(found: Checkpoint, needed: Checkpoint, what: str) -> None:
    """Reads all of it, which whoever loads it does once more: numbers that aren't finite can't be taken back, since
    what an engine computes with them stays in its cache.

    Raises:
        EngineError: a number isn't finite, or wouldn't be in the type that the model has it in.
    """
    import torch

    for file in _files(found.folder):
        with file.open("rb") as stream:
            numbers = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        for name, (header, start) in _read_headers(file).items():
            own = needed.headers.get(name, header)
            count = math.prod(header.shape)
            if not count or not header.is_plain or not own.is_plain:
                continue
            dtype, own_dtype = (getattr(torch, DTYPES[each.dtype][0]) for each in (header, own))
            tensor = torch.frombuffer(numbers, dtype=dtype, count=count, offset=start)
            # A sum is finite only if all of them are, and takes no memory.
            if dtype is not own_dtype or not bool(tensor.sum(dtype=torch.float64).isfinite()):
                plain_tensor(name, tensor, own_dtype, what)


def need_fit(found: Checkpoint, needed: Checkpoint, what: str) -> None:
    """
    Raises:
        EngineError: other tensors than those needed.
    """
    _need_names(found.headers.keys(), needed, what)
    for name, own in needed.headers.items():
        if name in found.headers:
            _need_shape(name, found.headers[name].shape, own, what)
            stored = found.headers[name].dtype
            if stored != own.dtype and not (own.is_plain and stored in DTYPES):
                raise EngineError(f"{name!r} of {what} is stored as {stored}, and the model has {own.dtype}")


def write_checkpoint(weights: Mapping[str, Any], like: Checkpoint, what: str, scratch: Path | None) -> Checkpoint:
    """Tensors as a new folder, in the names and types of another one.

    Raises:
        EngineError: they don't fit, or aren't finite, or there is no room for them.
    """
    chosen = _fitting(weights, like, what)
    folder = None
    try:
        folder = Path(tempfile.mkdtemp(prefix="groupstate-weights-", dir=scratch))
        with (folder / "model.safetensors").open("wb") as stream:
            stream.write(_header_bytes({name: like.headers[name] for name in chosen}))
            for name, tensor in chosen.items():
                stream.write(_tensor_bytes(name, tensor, like.headers[name].dtype, what))
    except BaseException as error:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise EngineError(f"{what} can't be written: {error}") from error
        raise
    return Checkpoint(folder, like.headers, tied=like.tied, is_ours=True)


def _fitting(weights: Mapping[str, Any], like: Checkpoint, what: str) -> dict[str, Any]:
    """The tensors that a checkpoint like that one has."""
    import torch

    for name, tensor in weights.items():
        if not isinstance(tensor, torch.Tensor):
            raise EngineError(f"{name!r} of {what} is a {type(tensor).__name__}; it must be a tensor")
        if hasattr(tensor, "full_tensor"):
            raise EngineError(f"{name!r} of {what} is a shard; give its full_tensor()")
        _need_plain(name, tensor, what)
    chosen = {name: tensor for name, tensor in weights.items() if not _is_second_name(name, weights, like)}
    _need_names(chosen.keys(), like, what)
    for name, tensor in chosen.items():
        own = like.headers[name]
        _need_shape(name, tuple(tensor.shape), own, what)
        if own.dtype not in DTYPES:
            raise EngineError(
                f"{name!r} is stored as {own.dtype}, so the model is quantized, and no tensor of {what} fits it; "
                "give a folder with weights that are quantized in the same way"
            )
    return chosen


def _is_second_name(name: str, weights: Mapping[str, Any], like: Checkpoint) -> bool:
    """Whether a tensor has another name, by which the checkpoint has it, as tied weights do."""
    if name in like.headers:
        return False
    place = _place(weights[name])
    return (like.tied and name == OUTPUT) or any(
        _place(weights[own]) == place for own in like.headers if own in weights
    )


def _place(tensor: Any) -> tuple[int, tuple[int, ...]]:
    return tensor.data_ptr(), tuple(tensor.shape)


def _header_bytes(headers: Mapping[str, Header]) -> bytes:
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, header in headers.items():
        start, end = end, end + math.prod(header.shape) * DTYPES[header.dtype][1]
        table[name] = {"dtype": header.dtype, "shape": list(header.shape), "data_offsets": [start, end]}
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _tensor_bytes(name: str, tensor: Any, dtype: str, what: str) -> memoryview:
    """One at a time, so that a model is never in memory once more."""
    import torch

    stored = plain_tensor(name, tensor, getattr(torch, DTYPES[dtype][0]), what).to("cpu").contiguous().reshape(-1)
    return memoryview(stored.view(torch.uint8).numpy())


def plain_tensor(name: str, tensor: Any, dtype: Any, what: str) -> Any:
    """A tensor of a trainer's as one of the type that the model has it in.

    Raises:
        EngineError: it has no numbers that could stand there: integers, a layout of its own, not finite.
    """
    import torch

    _need_plain(name, tensor, what)
    as_stored = tensor.detach().to(dtype)
    if not bool(as_stored.isfinite().all()):
        if bool(tensor.to(torch.float64).isfinite().all()):
            short = str(dtype).removeprefix("torch.")
            raise EngineError(
                f"{name!r} of {what} has values that are too large for {short}, in which the model has it"
            )
        raise EngineError(f"{name!r} of {what} has values that are not finite")
    return as_stored


def _need_plain(name: str, tensor: Any, what: str) -> None:
    import torch

    if not tensor.is_floating_point() or tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
        kind = "on no device" if tensor.is_meta else f"of {tensor.dtype} and {tensor.layout}"
        raise EngineError(f"{name!r} of {what} is {kind}; it must be a plain tensor of floating-point numbers")


def _need_names(found: Set[str], needed: Checkpoint, what: str) -> None:
    optional = {OUTPUT} if needed.tied else set()
    unknown = sorted(found - needed.headers.keys() - optional, key=str)
    stranger = f"has {_shown(unknown)}, which the model doesn't have" if unknown else ""
    if missing := sorted(needed.headers.keys() - found - optional):
        # Both, since wrappers, such as torch.compile's, put something before every name.
        raise EngineError(f"{what} lacks {_shown(missing)}" + (f", and {stranger}" if stranger else ""))
    if stranger:
        raise EngineError(f"{what} {stranger}")


def _need_shape(name: str, shape: tuple[int, ...], own: Header, what: str) -> None:
    if shape != own.shape:
        raise EngineError(
            f"{name!r} of {what} has shape {list(shape)} ({math.prod(shape):,} values); the model's has "
            f"{list(own.shape)}"
        )


def _shown(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:NAMES_SHOWN_MAX]))
    more = len(names) - NAMES_SHOWN_MAX
    return f"{shown} and {more} more" if more > 0 else shown


class WeightFiles:
    """The files of the weights that an engine generates with, which say what others must be like."""

    def __init__(self, find_model: Callable[[], Path], scratch: str | os.PathLike[str] | None) -> None:
        """
        Args:
            find_model: The folder that the engine was started from; called when first needed, and may raise
                `EngineError`.
            scratch: Where tensors are written; None is the system's folder for temporary files.
        """
        self._find_model = find_model
        self._scratch = None if scratch is None else folder_named("scratch", scratch)
        self._model: Checkpoint | None = None
        self._loaded: Checkpoint | None = None

    @property
    def loaded(self) -> Checkpoint:
        """The weights in force, to go back to. There are some once others were checked."""
        assert self._loaded is not None
        return self._loaded

    def checked(self, weights: Any, what: str) -> Checkpoint:
        """A folder that fits, which for tensors is written now.

        Raises:
            EngineError: there is none.
        """
        if self._model is None:
            self._model = self._loaded = read_checkpoint(self._find_model())
        if isinstance(weights, Mapping):
            return write_checkpoint(weights, self._model, what, self._scratch)
        if not isinstance(weights, str | os.PathLike):
            raise EngineError(f"{what} are {type(weights).__name__}; give tensors by name, or a checkpoint's folder")
        checkpoint = read_checkpoint(weights)
        need_fit(checkpoint, self._model, what)
        need_finite(checkpoint, self._model, what)
        return checkpoint

    def replace(self, checkpoint: Checkpoint) -> None:
        self.loaded.discard()
        self._loaded = checkpoint

    def discard_other(self, checkpoint: Checkpoint) -> None:
        """Remove one that did not come into force."""
        if checkpoint is not self._loaded:
            checkpoint.discard()

    def close(self) -> None:
        if self._loaded is not None:
            self._loaded.discard()
