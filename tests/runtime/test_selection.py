"""Selection in a real run: rules of the user's own, versions that groups are made for, and who is told what."""

import functools

import anyio
import pytest

from groupstate import Drop, PerBatch, Prompt, Rules, Select
from groupstate.core import events as ev
from groupstate.errors import BadInput, BadSettings, CustomRuleError, NotEnoughGroups, SampleTimeout
from groupstate.runtime.opening import own_selection
from tests.runtime.scenes import events, finish, half_right, opened, quiet, ready, started, virtual

HERE = __name__


def youngest(book, rules, request):
    """The groups that were submitted last."""
    ids = [group.group_id for group in book.ready()][::-1]
    return Select(ids[: request.size]) if len(ids) >= request.size else []


async def waits(book, rules, request):
    return []


class Callable_:
    def __call__(self, book, rules, request):
        return youngest(book, rules, request)


class AsyncCallable:
    async def __call__(self, book, rules, request):
        return []


def picks(batch) -> list[str]:
    return [group.group_id for group in batch.groups]


# A rule of the user's own ----------------------------------------------------------------------------


@virtual
async def test_a_function_selects_in_place_of_the_rules(loop):
    async with opened(loop, selection=youngest) as run:
        ready(run, "a", "b", "c")

        assert picks(await run.sample(2)) == ["c", "b"]
        assert run.rules.selection == f"{HERE}:youngest"


@virtual
async def test_the_rules_name_it_by_its_import_path(loop):
    async with opened(loop, rules=Rules(selection=f"{HERE}:youngest")) as run:
        ready(run, "a", "b")

        assert picks(await run.sample(1)) == ["b"]


@virtual
async def test_the_log_keeps_the_path_and_a_run_that_is_opened_again_finds_it(loop, tmp_path):
    async with opened(loop, tmp_path / "run", selection=youngest) as run:
        ready(run, "a", "b")
    async with opened(loop, tmp_path / "run") as run:
        assert picks(await run.sample(1)) == ["b"]
        assert run.book.rules["selection"] == f"{HERE}:youngest"


@virtual
async def test_a_function_that_can_not_be_imported_again_has_to_be_given_again(loop, tmp_path):
    def local(book, rules, request):
        return youngest(book, rules, request)

    async with opened(loop, tmp_path / "run", selection=local) as run:
        ready(run, "a", "b")
    with pytest.raises(BadSettings, match=r"selection: .*; or give open_run\(selection=\.\.\.\) the function itself"):
        async with opened(loop, tmp_path / "run"):
            pass
    async with opened(loop, tmp_path / "run", selection=local) as run:
        assert picks(await run.sample(1)) == ["b"]


@pytest.mark.parametrize("rule", [Callable_(), functools.partial(youngest)], ids=["object", "partial"])
@virtual
async def test_an_object_that_can_be_called_is_a_rule_and_has_to_be_given_again(loop, tmp_path, rule):
    async with opened(loop, tmp_path / "run", selection=rule) as run:
        ready(run, "a", "b")
        assert picks(await run.sample(1)) == ["b"]
    with pytest.raises(BadSettings, match=r"give open_run\(selection=\.\.\.\)"):
        async with opened(loop, tmp_path / "run"):
            pass


@pytest.mark.parametrize("rule", [waits, AsyncCallable(), 7], ids=["async", "async object", "no function"])
@virtual
async def test_what_is_awaited_or_no_function_is_refused(loop, rule):
    with pytest.raises(BadSettings, match="it must be a plain function rule"):
        async with opened(loop, selection=rule):
            pass


def test_a_function_of_the_script_that_was_run_is_told_as_one_with_what_the_caller_can_do():
    with pytest.raises(BadSettings) as raised:
        own_selection(Rules(selection="__main__:no_such_rule"), way_on="name it anew")

    assert str(raised.value) == (
        "selection '__main__:no_such_rule' was a function of the script that was run, and the one that runs now has no "
        "'no_such_rule'; name it anew"
    )


def test_a_misspelt_function_is_told_with_what_was_meant_and_what_the_caller_can_do():
    with pytest.raises(BadSettings, match=r"has no 'younges'; did you mean 'youngest'\? or pass --selection$"):
        own_selection(Rules(selection=f"{__name__}:younges"), way_on="pass --selection")


def test_an_async_function_is_refused_by_its_path_too():
    with pytest.raises(BadSettings, match="it must be a plain function rule"):
        own_selection(Rules(selection=f"{HERE}:waits"))


def test_a_class_by_its_path_is_not_a_rule():
    with pytest.raises(BadSettings, match="is a class, which makes no selection"):
        own_selection(Rules(selection=f"{HERE}:Callable_"))


@pytest.mark.parametrize(
    "rules",
    [Rules(selection="freshest_first"), Rules(selection="pkg.mod:fn"), Rules.in_order(1)],
    ids=["freshest", "other", "version"],
)
@virtual
async def test_it_does_not_go_with_rules_that_name_another(loop, rules):
    with pytest.raises(
        BadSettings, match=rf"have selection '{rules.selection}', and .* has '{HERE}:youngest': give one"
    ):
        async with opened(loop, selection=youngest, rules=rules):
            pass


@virtual
async def test_it_goes_with_rules_that_name_it_too(loop):
    async with opened(loop, selection=youngest, rules=Rules(selection=f"{HERE}:youngest")) as run:
        ready(run, "a", "b")

        assert picks(await run.sample(1)) == ["b"]


@virtual
async def test_a_run_that_is_opened_again_may_be_given_another(loop, tmp_path):
    async with opened(loop, tmp_path / "run", rules=Rules(selection="freshest_first")) as run:
        ready(run, "a", "b")
    async with opened(loop, tmp_path / "run", selection=youngest) as run:
        assert picks(await run.sample(1)) == ["b"]
        assert run.rules.selection == f"{HERE}:youngest"


@virtual
async def test_a_wrong_answer_reaches_the_sampler_and_the_next_is_served(loop):
    answers = [[Select(["nobody"])], [Drop("b", message="dull"), Select(["a"])]]

    async with opened(loop, selection=lambda *_: answers.pop(0) if answers else []) as run:
        ready(run, "a", "b")
        with pytest.raises(CustomRuleError, match="it selects group 'nobody', which never was"):
            await run.sample(1)
        assert run.sampleable_count() == 2

        batch = await run.sample(1)

        assert picks(batch) == ["a"]
        assert batch.metrics["training/custom/evicted_samples"] == 1.0
        assert [event.message for event in events(run, ev.GroupEvicted)] == ["dull"]


@virtual
async def test_a_rule_that_raises_leaves_the_rollout_running(loop):
    def broken(book, rules, request):
        raise ZeroDivisionError("by none")

    async with opened(loop, selection=broken, session=half_right, source=["p"] * 3) as run:
        with pytest.raises(CustomRuleError, match="raised ZeroDivisionError: by none"):
            await run.sample(1)
        assert await run.wait_sampleable(1) >= 1


@virtual
async def test_a_rule_that_changes_the_run_while_it_is_asked_is_told_so(loop):
    async with opened(loop, selection=lambda *_: meddling()) as run:

        def meddle():
            run.cancel("c")
            yield Select(["a"])

        meddling = meddle
        ready(run, "a", "b")
        run.submit("p", group_id="c", n=1)
        with pytest.raises(CustomRuleError, match="it changed the run while it was asked; a rule only looks"):
            await run.sample(1)
        assert events(run, ev.BatchSampled) == []


@virtual
async def test_samplers_that_wait_are_served_in_the_order_of_their_arrival(loop):
    async with opened(loop, selection=youngest) as run:
        first, second = started(run.sample(2)), started(run.sample(1))
        await quiet()
        ready(run, "a", "b", "c")

        assert (picks(await first), picks(await second)) == (["b", "a"], ["c"])


@virtual
async def test_a_sampler_that_is_not_selected_for_is_told_so_when_its_time_is_up(loop):
    async with opened(loop, selection=lambda *_: []) as run:
        ready(run, "a")
        with pytest.raises(SampleTimeout, match="has taken none of the 1 sampleable groups"):
            await run.sample(1, timeout_s=5)


# Groups that are made for a version ------------------------------------------------------------------

EXACT = Rules(selection="exact_version", basis="target_version", lag_max=0, batch_size=2, admission=PerBatch(warmup=1))


def targets(run) -> list[int | None]:
    return [event.target_version for event in events(run, ev.GroupSubmitted)]


@virtual
async def test_groups_are_made_for_the_current_version_and_those_ahead_and_sampled_at_theirs(loop):
    async with opened(loop, rules=EXACT, session=half_right, source=range(20)) as run:
        batches = [await run.sample(2, weight_version=version) for version in range(3)]

        assert [[group.lag for group in batch.groups] for batch in batches] == [[0, 0]] * 3
        assert [{run.book.groups[g].target_version for g in picks(batch)} for batch in batches] == [{0}, {1}, {2}]
        assert targets(run) == [0, 0, 1, 1, 2, 2, 3, 3]


@virtual
async def test_a_second_batch_at_a_version_is_made_and_does_not_hang(loop):
    async with opened(loop, rules=EXACT, session=half_right, source=range(20)) as run:
        await run.sample(2)
        await run.sample(2)

        assert targets(run) == [0, 0, 1, 1, 0, 0]


@virtual
async def test_a_submitted_group_is_made_for_the_version_that_is_asked_for_or_the_next_open_one(loop):
    async with opened(loop, rules=EXACT) as run:
        run.submit("a", target_version=1)
        run.submit("b")
        run.submit("c")
        run.submit("d")

        assert targets(run) == [1, 0, 0, 1]


@virtual
async def test_a_version_that_is_over_is_refused(loop):
    async with opened(loop, rules=EXACT, weight_version=3) as run:
        with pytest.raises(BadInput, match="target_version 2 is over: the current weight version is 3"):
            run.submit("a", target_version=2)

        assert run.submit("a", target_version=3).phase == "pending"


@pytest.mark.parametrize(("rules", "partition"), [(Rules(), "train"), (EXACT, "val")], ids=["rules", "validation"])
@virtual
async def test_a_target_that_nobody_samples_by_is_refused(loop, rules, partition):
    async with opened(loop, rules=rules) as run:
        with pytest.raises(BadInput, match="target_version 0 has no effect here"):
            run.submit("a", partition=partition, target_version=0)


@virtual
async def test_validation_goes_on_whatever_version_training_is_at(loop):
    async with opened(loop, rules=EXACT, session=half_right) as run:
        await run.publish_weights(4)

        assert len((await run.validate(["v", "w"])).groups) == 2


@virtual
async def test_what_is_waited_for_is_of_the_current_version(loop):
    async with opened(loop, rules=EXACT, source=[]) as run:
        finish(run.submit("now", target_version=0), 1.0)
        for name in ("x", "y"):
            finish(run.submit(name, target_version=1), 1.0)

        assert run.sampleable_count() == 1
        with pytest.raises(NotEnoughGroups, match="1 groups are sampleable and 0 in flight"):
            await run.sample(2)
        with pytest.raises(NotEnoughGroups, match="no more than 1 groups are left; 2 wanted"):
            await run.wait_sampleable(2)
        await run.publish_weights(1)
        assert await run.wait_sampleable(2) == 2


@virtual
async def test_what_is_looked_out_for_is_drawn_for_the_current_version(loop):
    rules = Rules(selection="exact_version", basis="target_version", lag_max=0, batch_size=1)
    async with opened(loop, rules=rules, session=half_right, source=range(9)) as run:
        assert await run.wait_sampleable(3) == 3
        assert targets(run).count(0) == 3


@virtual
async def test_a_recovered_run_goes_on_with_the_versions_to_come(loop, tmp_path):
    async with opened(loop, tmp_path / "run", rules=EXACT) as run:
        finish(run.submit("a", group_id="a"), 1.0)
        finish(run.submit("b", group_id="b", target_version=1), 1.0)
        await run.sample(1)
    async with opened(loop, tmp_path / "run") as run:
        again = await run.sample(1)
        later = await run.sample(1, weight_version=1)

        assert (picks(again), picks(later)) == (["a"], ["b"])


@virtual
async def test_freshest_first_goes_by_the_stamp(loop):
    async with opened(loop, rules=Rules(selection="freshest_first")) as run:
        ready(run, "old")
        await run.publish_weights(1)
        ready(run, "new", "newer")
        await anyio.sleep(1)

        assert picks(await run.sample(2)) == ["new", "newer"]


@virtual
async def test_a_prompt_with_an_id_keeps_it_under_targets(loop):
    async with opened(loop, rules=EXACT, source=[Prompt("p", group_id="mine")], session=half_right) as run:
        assert picks(await run.sample(1)) == ["mine"]
