"""A run goes on in the source that its positions count in, however often it was killed; another one is refused."""

import random
from collections import Counter

import anyio
import pytest

from groupstate import MixedSource, PerDataset, Prompt, Rules, Trajectory
from groupstate.core import events as ev
from groupstate.errors import BadSettings, NotEnoughGroups
from groupstate.runtime.sources import FunctionSource, IteratorSource, ListSource
from tests.runtime.scenes import cut, events, half_right, killed, last_segment, opened, virtual


async def used(loop, path, source, count=2):
    """A run that has committed `count` prompts of a source."""
    async with opened(loop, path, source=source, session=half_right) as run:
        for _ in range(count):
            await run.commit(await run.sample(1))
    return path


# What is recorded ------------------------------------------------------------------------------------


@virtual
async def test_a_source_says_what_its_order_depends_on_and_is_recorded_once(loop, tmp_path):
    for _ in range(2):
        await used(loop, tmp_path / "run", ListSource(range(9), shuffle_seed=7, name="sums"))

    async with opened(loop, tmp_path / "run") as run:
        details = {"size": 9, "epochs": 1, "shuffle_seed": 7}
        assert events(run, ev.SourceOpened) == [ev.SourceOpened("sums", "ListSource", details)]
        assert run.book.source == events(run, ev.SourceOpened)[0]


@virtual
async def test_a_mixed_source_says_so_per_dataset(loop, tmp_path):
    source = MixedSource({"math": range(9), "code": FunctionSource(str)})

    async with opened(loop, tmp_path / "run", source=source) as run:
        (event,) = events(run, ev.SourceOpened)

    assert (event.name, event.kind) == ("mixed", "MixedSource")
    assert event.details == {
        "math": {"name": "list", "kind": "ListSource", "size": 9, "epochs": 1, "shuffle_seed": None},
        "code": {"name": "function", "kind": "FunctionSource"},
    }


class Own:
    """A source of the user's own."""

    name = "own"

    def __init__(self, said=None):
        self.position = 0
        if said is not None:
            self.describe = lambda: said

    def draw(self):
        self.position += 1
        return Prompt(self.position)

    def seek(self, position):
        self.position = position


@virtual
async def test_a_source_of_ones_own_may_say_nothing(loop, tmp_path):
    await used(loop, tmp_path / "run", Own())

    async with opened(loop, tmp_path / "run", source=Own(), session=half_right) as run:
        assert events(run, ev.SourceOpened) == [ev.SourceOpened("own", "Own")]


@pytest.mark.parametrize(
    ("said", "text"), [("a word", "gave str; it must give a dict"), ({"at": object()}, "must give a dict of plain")]
)
@virtual
async def test_what_cannot_be_recorded_is_refused(loop, tmp_path, said, text):
    with pytest.raises(BadSettings, match=text):
        await used(loop, tmp_path / "run", Own(said))


# What is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "now", "text"),
    [
        (ListSource("abcd", shuffle_seed=1), ListSource("abcd", shuffle_seed=2), "shuffle_seed is 2 and was 1"),
        (ListSource("abcd", shuffle_seed=1), ListSource("abcde", shuffle_seed=1), "size is 5 and was 4"),
        (ListSource("abcd"), ListSource("abcd", shuffle_seed=1), "shuffle_seed is 1 and was None"),
        (ListSource("abcd", shuffle_seed=1), IteratorSource("abcd"), "shuffle_seed is None and was 1; size is None"),
        (ListSource("abcd", epochs=2), ListSource("abcd", epochs=3), "epochs is 3 and was 2"),
        (ListSource("abcd", epochs=None), ListSource("abcde", epochs=None), "size is 5 and was 4"),
        (ListSource("abcd"), MixedSource({"a": list("abcd")}), "it is a MixedSource and was a ListSource"),
        (
            MixedSource({"a": ListSource("abcd", shuffle_seed=1)}),
            MixedSource({"a": ListSource("abcd", shuffle_seed=2)}),
            "dataset 'a': shuffle_seed is 2 and was 1",
        ),
        (Own({"file": "one"}), Own({"file": "two"}), "file is 'two' and was 'one'"),
    ],
)
@virtual
async def test_another_order_is_refused_and_nothing_is_written(loop, tmp_path, before, now, text):
    path = await used(loop, tmp_path / "run", before)
    written = last_segment(path).read_bytes()

    with pytest.raises(BadSettings, match=text) as refused:
        await opened(loop, path, source=now).__aenter__()

    assert "skip some prompts" in str(refused.value)
    assert "source_changed=True" in str(refused.value)
    assert last_segment(path).read_bytes() == written
    async with opened(loop, path, source=now, source_changed=True, session=half_right) as run:
        assert run.book.source.kind == type(now).__name__
        assert len(events(run, ev.SourceOpened)) == 2


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (ListSource("abcd"), ListSource("abcdef")),
        (ListSource("abcd"), IteratorSource("abcdef")),
        (MixedSource({"a": list("abcd")}), MixedSource({"a": list("abcdef"), "b": ListSource("xy", epochs=None)})),
        (MixedSource({"a": list("abcd"), "b": ["x"]}), MixedSource({"a": list("abcd")})),
    ],
)
@virtual
async def test_what_only_grew_or_lies_ahead_is_taken(loop, tmp_path, before, now):
    path = await used(loop, tmp_path / "run", before)

    async with opened(loop, path, source=now, session=half_right) as run:
        assert (await run.sample(1)).groups


@virtual
async def test_before_anything_is_drawn_the_source_may_be_another(loop, tmp_path):
    async with opened(loop, tmp_path / "run", source=ListSource("abcd", shuffle_seed=1)):
        pass

    async with opened(loop, tmp_path / "run", source=ListSource("abcd", shuffle_seed=2)) as run:
        assert run.book.source.details["shuffle_seed"] == 2


@virtual
async def test_shares_given_later_make_positions_count_per_dataset_so_they_are_refused(loop, tmp_path):
    prompts = [Prompt(n, "ab"[n % 2]) for n in range(8)]
    path = await used(loop, tmp_path / "run", ListSource(prompts))
    shared = Rules(datasets={"a": PerDataset(share=0.5)})

    with pytest.raises(BadSettings, match="it is a MixedSource and was a ListSource"):
        await opened(loop, path, source=ListSource(prompts), rules=shared).__aenter__()


# Killed again and again ------------------------------------------------------------------------------


SOURCES = {
    "shuffled": lambda: ListSource([f"p{n}" for n in range(23)], shuffle_seed=5),
    "epochs": lambda: ListSource([f"p{n}" for n in range(7)], epochs=3),
    "shuffled epochs": lambda: ListSource([f"p{n}" for n in range(7)], epochs=3, shuffle_seed=5),
    "mixed": lambda: MixedSource(
        {
            "a": ListSource([f"a{n}" for n in range(5)], epochs=2, shuffle_seed=1),
            "b": IteratorSource(f"b{n}" for n in range(9)),
        }
    ),
}
RULES = Rules(batch_size=2, filter_metric="reward")


async def scored(ctx):
    """Every fifth prompt has no variance, so that its groups are evicted."""
    await anyio.sleep(0.1 + 0.3 * (sum(map(ord, ctx.prompt.content)) % 4))
    flat = sum(map(ord, ctx.prompt.content)) % 5 == 0
    return Trajectory(reward=1.0 if flat else float(ctx.session))


def settings(kind):
    return {"source": SOURCES[kind](), "session": scored, "group_size": 2, "rules": RULES}


async def trained_until(loop, path, kind, moment):
    """Train until a moment; gives the directory as a kill leaves it then, or the log where the prompts are over."""
    async with opened(loop, path, **settings(kind)) as run:
        with anyio.move_on_after(moment):
            try:
                while True:
                    await run.commit(await run.sample(1))
            except NotEnoughGroups:
                return None, events(run)
        return killed(path), None


def every_prompt(log) -> Counter:
    """Positions of all groups that were submitted from the source, by dataset."""
    return Counter((e.dataset, e.source_position) for e in log if isinstance(e, ev.GroupSubmitted))


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("seed", range(4))
@virtual
async def test_killed_and_resumed_again_and_again_each_prompt_is_given_as_often_as_without(loop, tmp_path, kind, seed):
    _, log = await trained_until(loop, tmp_path / "whole", kind, 1e6)
    chance = random.Random(seed)
    path, killed_log, kills = tmp_path / "run", None, 0
    while killed_log is None:
        left, killed_log = await trained_until(loop, path, kind, chance.uniform(0.05, 2.0))
        if left is not None:
            path, kills = left, kills + 1
            if chance.random() < 0.5:
                size = last_segment(path).stat().st_size
                path = cut(path, max(0, size - chance.randint(0, 30)))

    assert kills > 1
    assert every_prompt(killed_log) == every_prompt(log)
    assert set(every_prompt(log).values()) == {1}
    assert sum(isinstance(e, ev.GroupEvicted) for e in killed_log) == sum(isinstance(e, ev.GroupEvicted) for e in log)
    names = {e.group_id: (e.dataset, e.source_position) for e in killed_log if isinstance(e, ev.GroupSubmitted)}
    sampled = {e.batch: e.group_ids for e in killed_log if isinstance(e, ev.BatchSampled)}
    trained = Counter(names[g] for e in killed_log if isinstance(e, ev.BatchCommitted) for g in sampled[e.batch])
    assert set(trained.values()) == {1}
