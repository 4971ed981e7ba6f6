"""Records as bytes and back."""

import asyncio
import json

import msgspec
import pytest

from groupstate.core.events import Record, WeightsPublished
from groupstate.errors import UnsupportedLog
from groupstate.log.codec import decode, encode_items, fingerprint, join_items, schema_json, schema_name
from groupstate.simulate.faults import FaultyDisk

from .scenes import RUN, make, weights


@pytest.mark.parametrize("count", [0, 1, 15, 16, 65_535, 65_536])
def test_items_of_any_number_can_be_joined(count):
    items = encode_items(weights(1, count))

    assert decode(join_items([items], count), "here") == weights(1, count)


def test_items_of_several_posts_are_one_array():
    parts = [encode_items(weights(1, 3)), encode_items(weights(4, 20))]

    assert decode(join_items(parts, 23), "here") == weights(1, 23)


def test_an_unknown_kind_of_event_is_named_and_refused():
    body = msgspec.msgpack.encode([*weights(1), [2, 1, [199, "later"]]])
    with pytest.raises(UnsupportedLog, match=r"x\.seg has event kind 199, which this version .* a newer one wrote it"):
        decode(body, "x.seg")


@pytest.mark.parametrize("body", [[[2, 1, [3, 7.5]]], [[2, 1]], [7], 7])
def test_a_known_kind_with_an_unknown_content_is_refused(body):
    with pytest.raises(UnsupportedLog, match=r"has an event .* that this version"):
        decode(msgspec.msgpack.encode(body), "x.seg")


def test_bytes_that_are_no_msgpack_are_refused():
    with pytest.raises(UnsupportedLog):
        decode(b"\xc1", "x.seg")


def test_a_field_that_a_later_version_appended_is_passed_over():
    body = msgspec.msgpack.encode([[1, 1001, [2, 1, 1, "later"]]])

    assert decode(body, "x.seg") == [Record(1, 1001, WeightsPublished(1))]


def test_the_schema_names_the_fields_of_every_kind():
    schema = json.loads(schema_json())

    assert schema["events"]["2"] == {"name": "WeightsPublished", "fields": ["weight_version", "lineage"]}
    assert schema["parts"]["Record"] == ["seq", "at_ns", "event"]
    assert schema_name() == f"schema-{fingerprint():016x}.json"


def test_the_schema_lies_beside_the_log():
    disk = FaultyDisk()
    asyncio.run(make(disk).aclose())

    assert disk.read(f"{RUN}/log/{schema_name()}") == schema_json()
