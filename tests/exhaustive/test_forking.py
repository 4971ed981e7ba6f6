"""Copies of a run that go on independently."""

import threading

import pytest

from groupstate.errors import BadSettings
from groupstate.testing.exhaustive import World
from groupstate.testing.exhaustive.forking import forked
from groupstate.testing.exhaustive.stage import Stage
from groupstate.testing.exhaustive.worlds import WORLDS


def stage_of(*lines: str) -> Stage:
    stage = Stage(WORLDS["refill"])
    for line in lines:
        stage.go(line)
    return stage


def test_a_copy_is_in_the_same_state():
    stage = stage_of("submit g1/2", "sample 1", "start g1.0")

    assert stage.fork().book.state() == stage.book.state()


def test_what_happens_to_a_copy_does_not_happen_to_what_it_was_copied_from():
    stage = stage_of("submit g1/2", "sample 1", "start g1.0")
    before, events = stage.book.state(), stage.log.last_seq
    copy = stage.fork()
    for line in ("finish g1.0 reward=1", "start g1.1", "finish g1.1 reward=1", "commit 1", "publish 1"):
        copy.go(line)

    assert copy.wrong == []
    assert copy.book.totals["committed"] == 1
    assert (stage.book.state(), stage.log.last_seq) == (before, events)
    assert stage.waiters[0].claim is None


def test_what_parts_of_a_run_share_their_copies_share():
    copy = stage_of("submit g1/2").fork()

    assert copy.controller is not None
    assert copy.controller.book is copy.book is copy.checker.book
    assert copy.ledger.settle.__self__ is copy.controller


def test_what_nobody_knows_to_copy_is_refused():
    with pytest.raises(TypeError, match=r"a run that holds a _thread\.lock can't be copied"):
        forked([threading.Lock()])


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"at_most": {"explode": 1}}, "at_most names 'explode'; it can bound publish, "),
        ({"rewinds": ("forget",)}, "rewinds names 'forget'; a rewind is 'keep' or 'evict'"),
        ({"at_most": {"fail": -1}}, r"at_most\['fail'\] is -1; it must be an integer of at least 0"),
        ({"rules": {"lag_max": 1}}, "rules is {'lag_max': 1}; it must be Rules, such as"),
        ({"selection": "mine:rule"}, "selection is 'mine:rule'; it must be a plain function"),
        ({"groups": "2"}, "groups is '2'; it must be an integer of at least 0"),
        ({"sessions": 0}, "sessions is 0; it must be an integer of at least 1"),
        ({"source": -1}, "source is -1; it must be an integer of at least 0"),
        ({"patient": "no"}, "World.patient is 'no'; it must be True or False"),
        ({"outcomes": "reward=1"}, "outcomes is 'reward=1'; it must be a tuple or a list of a text for each"),
        ({"outcomes": ("0.5",)}, "outcomes has '0.5', which is no end of a session: '0.5' says nothing"),
        ({"failures": "error"}, "failures is 'error'; it must be a tuple or a list of kinds of failure"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_world_that_can_t_be_is_refused(settings, problem):
    with pytest.raises(BadSettings, match=problem):
        World(**settings)
