"""Bytes of a stream, cut anywhere, to events."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupstate.engines.http import client
from groupstate.engines.http.client import EventLines, NoEvents

STREAM = b': a comment\nevent: x\ndata: {"a": 1}\r\n\r\nid: 7\nretry: 9\ndata:{"b": "\xc3\xa9"}\n\ndata: [DONE]\n\n'
EVENTS = [b'{"a": 1}', b'{"b": "\xc3\xa9"}', b"[DONE]"]


@given(st.lists(st.integers(0, len(STREAM))))
def test_events_do_not_hang_on_where_the_bytes_are_cut(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(STREAM)]
    lines = EventLines()

    found = [data for start, stop in itertools.pairwise(places) for data in lines.feed(STREAM[start:stop])]
    assert found == EVENTS


def test_what_is_no_event_is_shown() -> None:
    with pytest.raises(NoEvents, match="a line that is no event: b'<html>'"):
        list(EventLines().feed(b"\n<html>\n"))


def test_a_line_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "LINE_BYTES_MAX", 100)
    lines = EventLines()
    list(lines.feed(b"data: " + b"x" * 60))
    with pytest.raises(NoEvents, match="a line of more than 100 bytes"):
        list(lines.feed(b"x" * 60))
