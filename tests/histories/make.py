"""Makes golden logs: `python -m tests.histories.make` writes the stories that have none yet, and nothing over.

A golden log is a run directory as the version of then wrote it, with `expected.json` beside it; SHA256SUMS says what
all of it must be for ever. They are never made again. For a new kind, field or format add a story, and run this.
"""

import asyncio
import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from groupstate.core.book import Book
from groupstate.core.events import PayloadRef
from groupstate.core.prompt import decoded_prompt
from groupstate.core.trajectory import restored
from groupstate.errors import DamagedPayload
from groupstate.log.file import FileLog
from groupstate.log.payloads import FilePayloads
from groupstate.log.reading import beginning, read_log
from groupstate.log.upcasts import FORMAT
from groupstate.simulate.loop import run_virtual
from tests.histories.projection import NEWEST, digest
from tests.histories.stories import BY_HAND, STORIES

HERE = Path(__file__).parent
WORKSHOP = Path("/tmp/groupstate-histories")
"""Where logs are made before they are put in their place: the texts of some events name the run's path."""
SUMS = HERE / "SHA256SUMS"
EXPECTED = "expected.json"


def golden_logs() -> list[Path]:
    """All run directories that are kept, of all formats."""
    return sorted(marker.parent for marker in HERE.glob("v*/*/run.json"))


def facts(path: Path, number: int = NEWEST) -> dict[str, Any]:
    """What a golden log leads to."""
    base, start = beginning(path)
    book, digests = base or Book(), []
    for record in read_log(path, start):
        book.apply(record)
        book.released.clear()
        digests.append(digest(book, number))
    return {
        "projection": number,
        "invariants": "hold" if path.name not in BY_HAND else "broken by hand",
        "first_seq": start,
        "last_seq": book.last_seq,
        "phases": _phases(book),
        "totals": {name: count for name, count in sorted(book.totals.items()) if count},
        "weights": [book.weight_version, book.lineage],
        "payloads": payloads(path, book),
        "digests": digests,
    }


def _phases(book: Book) -> dict[str, int]:
    found: dict[str, int] = {}
    for phase in [group.phase for group in book.groups.values()] + list(book.departed.values()):
        found[str(phase)] = found.get(str(phase), 0) + 1
    return dict(sorted(found.items()))


def payloads(path: Path, book: Book) -> dict[str, Any]:
    """What the payloads say that the book's groups have: a digest over all values, or that one is damaged."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(path, Path(folder) / "copy"))
        log = FileLog.open(copy, inline=True)
        told = _told(log.payloads, book)
        asyncio.run(log.aclose())
    text = json.dumps(told, sort_keys=True)
    return {
        "groups": len(told),
        "damaged": [name for name, values in told.items() if "damaged" in values],
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
    }


def _told(store: FilePayloads, book: Book) -> dict[str, list[Any]]:
    told: dict[str, list[Any]] = {}
    for group in [*book.groups.values(), *book.aside.values()]:
        values: list[Any] = []
        for ref, read in _refs(group):
            try:
                values.append(read(store.get(ref)))
            except DamagedPayload:
                values.append("damaged")
        if values:
            told[group.group_id] = values
    return told


def _refs(group: Any) -> list[tuple[PayloadRef, Any]]:
    found = []
    if group.prompt is not None:
        found.append((group.prompt, _prompt))
    for session in group.sessions:
        if session.payload is not None:
            found.append((session.payload, lambda data, session=session: _rows(session.trajectories, data)))
    return found


def _prompt(data: bytes) -> list[Any]:
    prompt = decoded_prompt(data, dataset="", n=1, group_id="g")
    return [prompt.content, dict(prompt.extra)]


def _rows(records: Any, data: bytes) -> list[Any]:
    return [
        [list(row.prompt_ids), list(row.response_ids), list(row.log_probs), row.reward, row.text, dict(row.info)]
        for row in restored(records, data)
    ]


def files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


def sums() -> str:
    """As `sha256sum` writes it, and checks it with -c."""
    kept = [file for path in golden_logs() for file in files(path)]
    return "".join(
        f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.relative_to(HERE).as_posix()}\n" for file in kept
    )


def make(name: str, path: Path) -> None:
    """Tell one story into a new run directory."""
    run_virtual(lambda loop: STORIES[name](loop, path))


def main(names: list[str]) -> None:
    for name in names or STORIES:
        path = HERE / f"v{FORMAT}" / name
        if path.exists():
            continue
        shutil.rmtree(WORKSHOP, ignore_errors=True)
        WORKSHOP.mkdir()
        make(name, WORKSHOP / name)
        shutil.copytree(WORKSHOP / name, path)
        text = json.dumps(facts(path), indent=1)
        (path / EXPECTED).write_text(f"{text}\n", encoding="utf-8")
        print(f"made {path}")
    SUMS.write_text(sums(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
