"""Real processes with real files, killed at random moments: what they were told is there, and nothing twice."""

import random

import pytest

from groupstate.core import events as ev
from groupstate.inspect.checking import checked
from groupstate.log.reading import read_log

from .witness import Witness, play

KEEPS = ["all", "archive", 1, 2]


def killed(path, keep, seed, times, most_s):
    witness = Witness(path, keep, random.Random(seed))
    for _ in range(times):
        witness.kill_once(most_s)
    return witness


def test_a_process_killed_a_few_times_has_lost_nothing_that_it_was_told(tmp_path):
    witness = killed(tmp_path / "run", 2, 1, 5, 0.3)
    archive = killed(tmp_path / "archive", "archive", 2, 5, 0.3)

    assert witness.kills + archive.kills == 10
    assert witness.told + archive.told > 10


@pytest.mark.crash
@pytest.mark.parametrize("seed", range(24))
def test_a_process_killed_at_random_moments_has_lost_nothing_that_it_was_told(tmp_path, seed):
    witness = killed(tmp_path / "run", KEEPS[seed % len(KEEPS)], seed, 10, 0.6)

    assert witness.kills == 10
    assert witness.told > 10


# The same groups -------------------------------------------------------------------------------------------


def trained_on(path, prompts, keep, *, kills, step_s=0.0, chance=None):
    """Train to the end, killed so often before. The prompts' places in the source that were trained on, in order."""
    plan = {"prompts": prompts, "keep": keep, "step_s": step_s}
    for _ in range(kills):
        _, killed = play(path, plan, chance.uniform(0.02, 0.3))
        assert killed
    said, killed = play(path, plan, None)
    assert said[-1] == {"ended": True}
    assert not killed
    assert checked(path).violations == ()
    places, batches, trained = {}, {}, []
    for record in read_log(path):
        match record.event:
            case ev.GroupSubmitted(group_id=group, source_position=place):
                places[group] = place
            case ev.BatchSampled(batch=batch, group_ids=groups):
                batches[batch] = groups
            case ev.BatchCommitted(batch=batch):
                trained += [places[group] for group in batches[batch]]
    return sorted(trained), set(places.values())


@pytest.mark.crash
@pytest.mark.parametrize("keep", ["all", "archive"])
@pytest.mark.parametrize("seed", range(3))
def test_a_run_killed_ten_times_trains_on_the_same_prompts_as_one_that_was_not(tmp_path, keep, seed):
    whole, given = trained_on(tmp_path / "whole", 150, keep, kills=0)
    often, given_often = trained_on(tmp_path / "often", 150, keep, kills=10, step_s=0.03, chance=random.Random(seed))

    assert given == given_often == set(range(300))
    assert 200 < len(whole) < 300
    assert len(set(whole)) == len(whole)
    assert often == whole
