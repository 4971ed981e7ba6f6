"""Who stands beside a run that is killed: kills it, keeps what it was told, and holds the files against that.

What the events mean is written here once more, in a few lines, so that the library's own book isn't asked.
"""

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import attrs

from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.folding import replayed
from groupstate.inspect.checking import checked
from groupstate.log.reading import beginning, first_event, read_book, read_log

PLAYER = str(Path(__file__).with_name("player.py"))


def play(path: Path, plan: dict[str, Any], kill_after_s: float | None) -> tuple[list[dict[str, Any]], bool]:
    """Run the player, and kill it so long after it began to open the run. What it said, and whether it was killed."""
    command = [sys.executable, PLAYER, str(path), json.dumps(plan)]
    player = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert player.stdout is not None
    assert player.stderr is not None
    try:
        head = os.read(player.stdout.fileno(), 1 << 20)
        said = head + _listen(player, time.monotonic() + (600 if kill_after_s is None else kill_after_s))
        player.send_signal(signal.SIGKILL)
        said += player.stdout.read()
        errors = player.stderr.read().decode()
        code = player.wait(60)
    finally:
        player.kill()
        player.wait()
        player.stdout.close()
        player.stderr.close()
    assert code in (0, -signal.SIGKILL), errors
    # The last line may be cut by the kill: it wasn't told then.
    return [json.loads(line) for line in said.split(b"\n")[:-1]], code != 0


def _listen(player: "subprocess.Popen[bytes]", until: float) -> bytes:
    """What it says until a time, or until it ends."""
    said, pipe = b"", player.stdout.fileno()  # type: ignore[union-attr]
    while (left := until - time.monotonic()) > 0:
        if select.select([pipe], [], [], left)[0]:
            part = os.read(pipe, 1 << 20)
            if not part:
                player.wait(60)
                break
            said += part
    return said


@attrs.define
class Trained:
    """What the events say of batches, plainly."""

    out: dict[int, tuple[str, ...]] = attrs.Factory(dict)
    commits: list[tuple[int, int, tuple[str, ...]]] = attrs.Factory(list)
    """(seq, batch, groups), those that stand."""
    committed: set[str] = attrs.Factory(set)
    sampled: dict[int, tuple[str, ...]] = attrs.Factory(dict)
    ever_committed: set[int] = attrs.Factory(set)
    rewound_to: list[int] = attrs.Factory(list)
    marks: set[int] = attrs.Factory(set)
    """Seqs."""
    recovering: bool = False

    def feed(self, record: ev.Record) -> None:
        event = record.event
        if self.recovering and not isinstance(event, ev.BatchReturned | ev.RunRecovered):
            assert not self.out, "a batch that was out did not come back"
            self.recovering = False
        match event:
            case ev.RunRecovered():
                self.recovering = True
            case ev.BatchSampled():
                taken = {group for groups in self.out.values() for group in groups}
                assert not taken & set(event.group_ids), "sampled twice"
                assert not self.committed & set(event.group_ids), "sampled again after its commit"
                self.out[event.batch] = self.sampled[event.batch] = event.group_ids
            case ev.BatchReturned():
                del self.out[event.batch]
            case ev.BatchCommitted():
                groups = self.out.pop(event.batch)
                assert not self.committed & set(groups), "committed twice"
                self.commits.append((record.seq, event.batch, groups))
                self.committed.update(groups)
                self.ever_committed.add(event.batch)
            case ev.RunRewound():
                self.rewound_to.append(event.mark_seq)
                for _, _, groups in [commit for commit in self.commits if commit[0] > event.mark_seq]:
                    self.committed.difference_update(groups)
                self.commits = [commit for commit in self.commits if commit[0] <= event.mark_seq]
            case ev.CheckpointMarked():
                self.marks.add(record.seq)
            case ev.GroupEvicted():
                assert "damaged" not in event.reasons, "a payload is lost"
                assert event.group_id not in self.committed


@attrs.define
class Witness:
    path: Path
    keep: Any
    chance: random.Random
    trained: Trained = attrs.Factory(Trained)
    records: list[ev.Record] = attrs.Factory(list)
    """All that the files ever held, as far as it was seen before it was removed."""
    sampled: dict[int, tuple[str, ...]] = attrs.Factory(dict)
    committed: set[int] = attrs.Factory(set)
    marks: list[tuple[int, str]] = attrs.Factory(list)
    """(seq, mark), those that may be gone back to."""
    asked_for: set[int] = attrs.Factory(set)
    """Seqs of marks that were gone back to."""
    unseen: int = 0
    """The last event that was removed before it was seen."""
    kills: int = 0
    told: int = 0

    def kill_once(self, most_s: float) -> None:
        """Start the run, kill it at a random moment and look at what is left."""
        plan: dict[str, Any] = {"seed": self.chance.random(), "keep": self.keep}
        if self.marks and self.chance.random() < 0.25:
            seq, plan["mark"] = self.marks[-1]
            self.asked_for.add(seq)
        said, killed = play(self.path, plan, self.chance.uniform(0, most_s))
        assert killed
        self.kills += 1
        self.hear(said)
        self.look()

    def hear(self, said: list[dict[str, Any]]) -> None:
        """Keep in mind what a run was told."""
        self.told += len(said)
        for line in said:
            if "sampled" in line:
                self.sampled[line["sampled"]] = tuple(line["groups"])
            elif "committed" in line:
                self.committed.add(line["committed"])
            elif "mark" in line:
                self.marks.append((line["seq"], line["mark"]))

    def look(self) -> None:
        """Hold the files against what was told."""
        if not (self.path / "run.json").exists():
            assert not self.sampled
            return
        self._read()
        self._check_told()
        found = checked(self.path)
        assert not found.violations, "\n".join(map(str, found.violations))
        if self.keep in ("all", "archive"):
            assert first_event(self.path) == 1
            self._check_snapshot()

    def _read(self) -> None:
        first = first_event(self.path)
        seen = self.records[-1].seq if self.records else 0
        there = list(read_log(self.path, first))
        assert [record.seq for record in there] == list(range(first, first + len(there)))
        known = {record.seq: record for record in self.records}
        # What was acknowledged is never written anew. A kill may only take what was never told.
        assert all(known.get(record.seq, record) == record for record in there)
        assert (there[-1].seq if there else 0) >= seen
        if first > seen + 1:
            assert isinstance(self.keep, int)
            self._begin_anew(first)
            seen = self.unseen
        for record in there:
            if record.seq > seen:
                self.trained.feed(record)
                self.records.append(record)

    def _begin_anew(self, first: int) -> None:
        """Events went before they were seen: what they led to is in a snapshot, from where its own are read."""
        book, start = beginning(self.path)
        assert book is not None
        assert first <= start
        self.unseen = start - 1
        self.records = []
        gone = {group for group, phase in book.departed.items() if phase == "committed"}
        out = {number: tuple(batch.group_ids) for number, batch in book.batches.items()}
        rewound = self.trained.rewound_to
        # Aside are those whose commit may yet be undone: by the marks that are kept. Of their batches nothing is known.
        undoable = [(seq, 0, (group,)) for seq, group in book.committed_at]
        assert {group for _, _, (group,) in undoable} == set(book.aside)
        marks = {mark.seq for mark in book.marks}
        self.trained = Trained(out, undoable, gone | set(book.aside), dict(out), set(), rewound, marks)
        self._check_old(book)

    def _check_old(self, book: Book) -> None:
        """Of what was told and isn't to be read any more."""
        old = [number for number in self.sampled if number <= book.last_batch and number not in book.batches]
        for number in old:
            groups = self.sampled.pop(number)
            if number in self.committed:
                self.committed.discard(number)
                if not self.asked_for:
                    assert set(groups) <= self.trained.committed, "a commit is lost"

    def _check_told(self) -> None:
        for number, groups in self.sampled.items():
            assert self.trained.sampled.get(number) == groups, "a batch that was given out is lost"
        assert self.committed <= self.trained.ever_committed, "a commit is lost"
        assert set(self.trained.rewound_to) <= self.asked_for
        if not self.asked_for:
            standing = {batch for _, batch, _ in self.trained.commits}
            assert self.committed <= standing
        assert all(seq in self.trained.marks for seq, _ in self.marks[-1:] if seq > self.unseen), "a mark is lost"

    def _check_snapshot(self) -> None:
        book = read_book(self.path)
        if book is not None:
            for record in self.records[book.last_seq :]:
                book.apply(record)
            assert book.digest() == replayed(self.records).digest()
