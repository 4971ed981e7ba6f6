"""Where output goes: tables and colours in a terminal, tabs and lines in a pipe, and nothing once nobody reads."""

import contextlib
import os
import select
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import attrs
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text


@attrs.frozen
class Section:
    """A table: its title, the names of its columns (none: names and values), its rows."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[str]]


def console() -> Console:
    return Console(file=sys.stdout, highlight=False, soft_wrap=True)


def write_sections(sections: Iterable[Section]) -> None:
    """Each section as a table, or as lines that begin with its title."""
    terminal = console()
    for section in sections:
        if not section.rows:
            continue
        if terminal.is_terminal:
            terminal.print(_table(section))
        else:
            _write_lines(section)


def _table(section: Section) -> Table:
    table = Table(title=section.title, title_justify="left", title_style="bold", show_header=bool(section.columns))
    for column in section.columns or ("", ""):
        table.add_column(column, overflow="fold")
    for row in section.rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def _write_lines(section: Section) -> None:
    if section.columns:
        write("\t".join((f"# {section.title}", *section.columns)))
    for row in section.rows:
        write("\t".join((section.title, *row)))


def write(line: str) -> None:
    sys.stdout.write(line + "\n")


def write_json(value: Any) -> None:
    """One line of JSON."""
    write(msgspec.json.encode(_plain(value)).decode())


def _plain(value: Any) -> Any:
    return attrs.asdict(value) if attrs.has(type(value)) else value


@contextlib.contextmanager
def while_read() -> Iterator[None]:
    """End the block quietly once whoever reads the output has gone, as `head` does."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _write_nowhere()


def _write_nowhere() -> None:
    """Python flushes once more when it ends, and must not find the broken pipe then."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def nobody_reads() -> bool:
    """Whether a broken pipe was standard output, which then goes nowhere from here on."""
    gone = reader_has_gone()
    if gone:
        _write_nowhere()
    return gone


def reader_has_gone() -> bool:
    """Whether standard output is a pipe that nobody reads any more."""
    try:
        fd = sys.stdout.fileno()
    except (OSError, ValueError):
        return False
    poll = select.poll()
    poll.register(fd, 0)
    return any(state & (select.POLLERR | select.POLLHUP) for _, state in poll.poll(0))
