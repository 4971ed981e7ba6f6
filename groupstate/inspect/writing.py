"""Files and folders that are there whole or not at all: made beside their place, flushed, then named."""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from groupstate.errors import BadInput


class Taken(BadInput):
    """Something lies already where something is to be written, and may not be replaced."""

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(f"{path} is there already; name another, or pass overwrite=True")


@contextlib.contextmanager
def whole_file(path: Path, *, overwrite: bool) -> Iterator[Path]:
    """A path to write to; what is there at the end of the block comes to be `path`.

    Raises:
        BadInput: something lies at `path` and may not be overwritten, or its folder can't be written to.
    """
    if path.is_dir() and not path.is_symlink():
        raise BadInput(f"{path} is a directory; name a file")
    if os.path.lexists(path) and not overwrite:
        raise Taken(path)
    remove_left_over(path)
    beside = beside_of(path)
    try:
        with as_bad_input(path):
            beside.touch()
        yield beside
        _flush(beside)
        if overwrite:
            beside.replace(path)
        else:
            try:
                # Unlike a rename, a link doesn't replace what has come to lie there meanwhile.
                os.link(beside, path)
            except FileExistsError as error:
                raise Taken(path) from error
            except OSError:
                # A file system without hard links.
                beside.rename(path)
        _flush(path.parent)
    finally:
        with contextlib.suppress(NotADirectoryError):
            beside.unlink(missing_ok=True)


@contextlib.contextmanager
def whole_folder(path: Path, marker: str, *, overwrite: bool) -> Iterator[Path]:
    """An empty folder to write to; at the end of the block it comes to be `path`.

    Args:
        marker: a file that every folder of this kind has. Only a folder with it is ever replaced.

    Raises:
        BadInput: something lies at `path` that may not be replaced, or the folder around it can't be written to.
    """
    _check_folder(path, marker, overwrite=overwrite)
    remove_left_over(path, folders=True)
    beside = beside_of(path)
    try:
        with as_bad_input(path):
            beside.mkdir()
        yield beside
        for file in sorted(beside.rglob("*")):
            _flush(file)
        _flush(beside)
        _check_folder(path, marker, overwrite=overwrite)
        _put_in_place(beside, path)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _put_in_place(beside: Path, path: Path) -> None:
    if not path.exists():
        beside.rename(path)
    elif not any(path.iterdir()):
        path.rmdir()
        beside.rename(path)
    else:
        old = path.with_name(f".{path.name}.{os.getpid()}.old")
        path.rename(old)
        beside.rename(path)
        shutil.rmtree(old)
    _flush(path.parent)


def _check_folder(path: Path, marker: str, *, overwrite: bool) -> None:
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_dir():
        raise BadInput(f"{path} is there already and is no directory; name another")
    if not any(path.iterdir()):
        return
    if not (path / marker).is_file():
        raise BadInput(
            f"{path} holds something else (it has no {marker}), and nothing of it is overwritten; "
            "name a directory that is new or empty"
        )
    if not overwrite:
        raise Taken(path)


def beside_of(path: Path) -> Path:
    """Where this process writes what comes to be `path`."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def remove_left_over(path: Path, *, folders: bool = False) -> None:
    """Remove what processes that were killed while they wrote `path` left beside it: files, or folders."""
    name = re.compile(rf"\.{re.escape(path.name)}\.([1-9][0-9]{{0,8}})\.tmp")
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(path.parent)):
            match = name.fullmatch(entry.name)
            if match is None or _runs(int(match[1])):
                continue
            with contextlib.suppress(OSError):
                if folders and entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                elif not folders and entry.is_file(follow_symlinks=False):
                    os.unlink(entry.path)


def _runs(pid: int) -> bool:
    """Whether there is such a process; another one with a number that came round counts too."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's
    return True


@contextlib.contextmanager
def as_bad_input(path: Path) -> Iterator[None]:
    """Turn what the system says into an error about the path that was named.

    Raises:
        BadInput: the path can't be written.
    """
    try:
        yield
    except OSError as error:
        raise BadInput(f"{path} can't be written: {error.strerror}") from error


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
