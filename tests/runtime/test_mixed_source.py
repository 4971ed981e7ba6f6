"""Prompts of several datasets: one source for each, drawn from by the rules' shares."""

import itertools
from collections import Counter

import anyio
import pytest

from groupstate import Prompt, Rules
from groupstate.core import events as ev
from groupstate.core.rules import PerDataset
from groupstate.errors import BadInput, BadSettings, NotEnoughGroups, SourceFailed
from groupstate.log.memory import MemoryLog
from groupstate.runtime.sources import ListSource, MixedSource, as_source
from tests.runtime.scenes import events, finish, half_right, opened, virtual

HALF = Rules(datasets={"a": PerDataset(share=0.5)})


def drawn(run) -> list[tuple[str, int]]:
    return [(event.dataset, event.source_position) for event in events(run, ev.GroupSubmitted)]


# By itself -------------------------------------------------------------------------------------------


def test_a_mapping_is_a_source_of_several_datasets():
    source = as_source({"a": [1, 2], "b": ListSource([3])})

    assert isinstance(source, MixedSource)
    assert source.datasets == ("a", "b")
    assert source.draw_from("a") == Prompt(1, "a")
    assert (source.position, source.position_of("a"), source.position_of("b")) == (1, 1, 0)


def test_a_prompt_is_of_the_dataset_that_it_was_drawn_from_whatever_it_says():
    assert MixedSource({"a": [Prompt("p", dataset="z", group_id="g")]}).draw_from("a") == Prompt("p", "a", None, "g")


def test_a_dataset_that_has_no_more_is_no_longer_listed():
    source = MixedSource({"a": [], "b": [1]})

    assert source.draw_from("a") is None
    assert source.datasets == ("b",)


def test_outside_of_a_run_the_datasets_take_turns_until_all_are_used_up():
    source = MixedSource({"a": [1], "b": [2, 3, 4]})
    prompts = list(iter(source.draw, None))

    assert [(prompt.dataset, prompt.content) for prompt in prompts] == [("a", 1), ("b", 2), ("b", 3), ("b", 4)]
    assert source.draw() is None


def test_it_goes_on_behind_the_last_prompt_of_each():
    source = MixedSource({"a": [1, 2, 3], "b": [4, 5], "c": [6]})
    assert source.draw_from("c") is not None
    assert source.draw_from("c") is None
    source.seek_each({"a": 2, "b": 0, "gone": 9})

    assert source.datasets == ("a", "b", "c")
    assert (source.draw_from("a"), source.draw_from("b")) == (Prompt(3, "a"), Prompt(4, "b"))


def test_one_position_says_nothing():
    with pytest.raises(BadInput, match="mixed is of several datasets"):
        MixedSource({"a": []}).seek(1)


def test_a_dataset_is_not_itself_of_several():
    with pytest.raises(BadInput, match="dataset 'a' of mixed is a mapping itself"):
        MixedSource({"a": {"b": [1]}})


# In a run --------------------------------------------------------------------------------------------


@virtual
async def test_a_run_draws_by_the_shares_and_keeps_the_place_in_each_dataset(loop, tmp_path):
    rules = Rules(datasets={"a": PerDataset(share=0.75)})

    def prompts():
        return {"a": (f"a{number}" for number in itertools.count()), "b": [f"b{number}" for number in range(9)]}

    async with opened(loop, tmp_path / "run", rules=rules, source=prompts()) as run:
        with anyio.move_on_after(1):
            await run.sample(8)
        first = drawn(run)
    async with opened(loop, tmp_path / "run", source=prompts(), session=half_right) as run:
        await run.sample(8)
        await run.sample(8)
        later = drawn(run)

    assert Counter(name for name, _ in first) == {"a": 6, "b": 2}
    for name in ("a", "b"):
        positions = [position for dataset, position in later if dataset == name]
        assert positions == list(range(len(positions)))
    contents = {group.prompt for group in run.book.groups.values()}
    assert len(contents) == len(run.book.groups)


@virtual
async def test_an_exhausted_dataset_leaves_its_share_to_the_others_and_then_the_source_is_exhausted(loop):
    async with opened(loop, rules=HALF, source={"a": ["x"], "b": range(4)}, session=half_right) as run:
        batch = await run.sample(5)

        assert Counter(group.dataset for group in batch.groups) == {"a": 1, "b": 4}
        assert batch.metrics["training/datasets/b/sampled"] == 4.0
        with pytest.raises(NotEnoughGroups, match="the source is exhausted"):
            await run.sample(1)
        assert len(events(run, ev.SourceExhausted)) == 1


@virtual
async def test_a_dataset_that_is_evicted_often_is_drawn_more_often_within_the_tolerance(loop):
    async def session(ctx):
        hard = ctx.prompt.dataset == "a" and ctx.prompt.content % 2
        if hard:
            raise ValueError("no")
        return await half_right(ctx)

    rules = Rules(datasets={"a": PerDataset(share=0.5)}, share_tolerance=0.1, batch_size=4)
    async with opened(loop, rules=rules, session=session, source={"a": range(999), "b": range(999)}) as run:
        for _ in range(40):
            await run.commit(await run.sample(4))
        counts = Counter(name for name, _ in drawn(run))

        assert counts["a"] / counts.total() == pytest.approx(0.6, abs=0.01)


@virtual
async def test_a_dataset_whose_source_raises_is_told_to_the_sampler(loop):
    def broken():
        yield "x"
        raise OSError("no disk")

    async with opened(loop, source={"a": broken()}, session=half_right) as run:
        with pytest.raises(SourceFailed, match="source 'mixed' failed at prompt 1: OSError: no disk"):
            await run.sample(2)


@virtual
async def test_validation_may_be_of_several_datasets(loop):
    async with opened(loop, session=half_right) as run:
        batch = await run.validate({"a": ["x"], "b": ["y", "z"]})

        assert Counter(group.dataset for group in batch.groups) == {"a": 1, "b": 2}


@virtual
async def test_shares_need_a_source_that_can_be_asked_for_one_dataset(loop):
    with pytest.raises(BadSettings, match=r"shares to 'a', and the source 'iterator' can't be asked .* source=\{"):
        async with opened(loop, rules=HALF, source=iter(["p"])):
            pass
    async with opened(loop, rules=HALF) as run:
        assert run.submit("p", dataset="a").phase == "pending"


@virtual
async def test_a_share_of_a_dataset_that_the_source_lacks_is_refused(loop):
    with pytest.raises(
        BadSettings, match=r"give a share to dataset 'a', which .* 'mixed' doesn't have; it has 'b', 'c'"
    ):
        async with opened(loop, rules=HALF, source={"b": [], "c": []}):
            pass


SETTINGS = [{"share": 1.0}, {"share": 0.0}, {"lag_max": 1}, {"tolerance": 0.5}, {}]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize(
    "source",
    [{"math": ["p"], "code": ["q"]}, [Prompt("p", "math"), Prompt("q", "code")], [Prompt("p", "math"), "q"]],
    ids=["mapping", "list", "half-named"],
)
@virtual
async def test_a_dataset_of_the_rules_that_the_source_lacks_is_refused_with_the_nearest_name(loop, source, settings):
    log = MemoryLog()
    rules = Rules(datasets={"maths": PerDataset(**settings)})
    with pytest.raises(BadSettings, match=r"dataset 'maths', which .*; did you mean 'math'\? it has .*'math'"):
        async with opened(loop, log=log, rules=rules, source=source):
            pass

    assert log.last_seq == 0


@virtual
async def test_of_many_datasets_only_some_are_listed(loop):
    with pytest.raises(BadSettings, match=r"it has 'd00', 'd01', .*, 'd07' and 32 more$"):
        async with opened(loop, rules=HALF, source={f"d{number:02}": [] for number in range(40)}):
            pass


@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
@virtual
async def test_shares_for_prompts_that_name_no_dataset_are_refused_with_that(loop, share):
    rules = Rules(datasets={"maths": PerDataset(share=share)})
    with pytest.raises(BadSettings, match="shares to 'maths', and no prompt of the source 'list' names a dataset"):
        async with opened(loop, rules=rules, source=["p", "q"]):
            pass


@pytest.mark.parametrize("source", [["p"], iter(["p"]), [], None], ids=["list", "iterator", "empty", "none"])
@virtual
async def test_where_the_datasets_cannot_be_known_bounds_of_their_own_are_taken(loop, source):
    rules = Rules(datasets={"maths": PerDataset(lag_max=1)})
    async with opened(loop, rules=rules, source=source) as run:
        assert run.submit("p", dataset="maths").phase == "pending"


@virtual
async def test_a_list_without_prompts_is_exhausted_whatever_the_shares(loop):
    async with opened(loop, rules=HALF, source=[]) as run:
        with pytest.raises(NotEnoughGroups, match="the source is exhausted"):
            await run.sample(1)


@virtual
async def test_a_dataset_that_was_drawn_before_keeps_its_bounds_with_another_source_but_no_share(loop, tmp_path):
    rules = Rules(datasets={"easy": PerDataset(lag_max=1), "hard": PerDataset(lag_max=8)})
    path = tmp_path / "run"
    async with opened(loop, path, rules=rules, source={"easy": ["p"], "hard": ["q"]}, session=half_right) as run:
        await run.sample(2)
    async with opened(loop, path, source={"hard": ["q", "r"]}, session=half_right) as run:
        assert len(await run.sample(3)) == 3
    rules = Rules(datasets={"easy": PerDataset(share=0.5)})
    with pytest.raises(BadSettings, match=r"give a share to dataset 'easy', which the source 'mixed' doesn't have"):
        async with opened(loop, path, rules=rules, source={"hard": ["q", "r"]}):
            pass


@virtual
async def test_a_name_of_a_dataset_that_is_no_string_is_refused(loop):
    with pytest.raises(BadInput, match=r"the dataset of a prompt of list is \['a'\]; it must be a string"):
        async with opened(loop, rules=HALF, source=[Prompt("p", dataset=["a"])]):
            pass


@virtual
async def test_shares_that_are_all_zero_are_refused_by_the_datasets_that_there_are(loop):
    none = Rules(datasets={"a": PerDataset(share=0.0)})
    with pytest.raises(BadSettings, match="the shares of all datasets of the source are 0"):
        async with opened(loop, rules=none, source={"a": ["p"]}):
            pass
    async with opened(loop, rules=none, source={"a": ["p"], "b": ["q"]}, session=half_right) as run:
        assert [group.dataset for group in (await run.sample(1)).groups] == ["b"]


@virtual
async def test_a_starved_dataset_is_told_with_the_next_batch(loop):
    rules = Rules(starvation_versions=2)
    async with opened(loop, rules=rules) as run:
        run.submit("p", dataset="math")
        code = run.submit("q", dataset="code")
        await run.publish_weights(1)
        await run.publish_weights(2)
        finish(code, 1.0)
        batch = await run.sample(1)

        assert [(e.dataset, e.versions) for e in events(run, ev.DatasetStarved)] == [("code", 2), ("math", 2)]
        assert batch.metrics["training/datasets/math/starved"] == 1.0
