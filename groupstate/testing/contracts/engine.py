"""One contract for every engine: whatever passes may stand in for another.

    class TestMine(EngineContract):
        @pytest.fixture
        def kind(self):
            return Mine()          # of a subclass of `EngineKind`, which is told what is missing in it

What a kind of engine can't do, its kind says in a `bool`, and the tests that need it are skipped with that reason.
"""

import asyncio
from collections.abc import AsyncIterator

import anyio
import anyio.lowlevel
import pytest
import pytest_asyncio

from groupstate.engines.port import Engine, Generation, Request
from groupstate.errors import EngineDied, EngineError, RequestRefused
from groupstate.testing.contracts.base import Contract
from groupstate.testing.contracts.engine_kind import (
    CONTEXT,
    VOCABULARY,
    EngineKind,
    Make,
    ask,
    check,
    closing,
    slots,
    wait_first_token,
    wait_publishing,
)


def _again(request: Request) -> Request:
    return Request(request.prompt_ids, request.params)


async def _outcome(engine: Engine, request: Request) -> Generation | Exception:
    try:
        return await engine.generate(request)
    except Exception as error:
        return error


class EngineContract(Contract):
    """The tests of an engine. A subclass, or its module, has a fixture `kind` that gives an `EngineKind`."""

    @pytest_asyncio.fixture
    async def make(self, kind: EngineKind) -> AsyncIterator[Make]:
        async with closing(kind.make) as make_one:
            yield make_one

    @pytest.fixture
    def needs_slots(self, kind: EngineKind) -> None:
        if not kind.sets_slots:
            pytest.skip("this kind of engine has its slots from what it runs in")

    @pytest.fixture
    def needs_died(self, make: Make) -> None:
        if not hasattr(make(), "died"):
            pytest.skip("this kind of engine doesn't hear of its death by itself")

    async def test_a_request_is_answered_with_a_log_probability_for_every_token(self, make: Make) -> None:
        generation = await make(weight_version=3).generate(ask(max_tokens=5))

        check(generation)
        assert len(generation.token_ids) == 5
        assert generation.finish_reason == "length"
        assert [span.weight_version for span in generation.spans] == [3]

    async def test_a_stop_token_ends_the_answer_and_is_part_of_it(self, make: Make) -> None:
        engine = make()
        token_ids = (await engine.generate(ask(max_tokens=9, temperature=0.0))).token_ids

        generation = await engine.generate(ask(max_tokens=9, temperature=0.0, stop_token_ids=(token_ids[2],)))

        assert generation.finish_reason == "stop"
        assert generation.token_ids == token_ids[: token_ids.index(token_ids[2]) + 1]

    async def test_many_requests_are_answered_each_with_its_own_answer(self, make: Make, kind: EngineKind) -> None:
        engine = make(**slots(kind, 8))
        prompts = [(1, number % VOCABULARY, number % 7) for number in range(50)]
        alone = [(await engine.generate(ask(prompt, temperature=0.0))).token_ids for prompt in prompts]

        together = await asyncio.gather(*(engine.generate(ask(prompt, temperature=0.0)) for prompt in prompts))

        assert [generation.token_ids for generation in together] == alone

    async def test_requests_of_different_lengths_join_and_leave_the_running_batch(
        self, make: Make, kind: EngineKind
    ) -> None:
        engine = make(**slots(kind, 3))
        lengths = [1, 40, 2, 17, 3, 5, 30, 1, 8]

        generations = await asyncio.gather(*(engine.generate(ask(max_tokens=length)) for length in lengths))

        assert [len(generation.token_ids) for generation in generations] == lengths

    async def test_an_aborted_request_keeps_its_tokens(self, make: Make, kind: EngineKind) -> None:
        engine, request = make(), ask(max_tokens=kind.long)
        under_way = asyncio.create_task(engine.generate(request))
        await wait_first_token(kind, engine, request)
        engine.abort(request)

        generation = await under_way

        check(generation)
        assert generation.finish_reason == "abort"
        assert 0 < len(generation.token_ids) < kind.long
        assert engine.in_flight_count == 0

    @pytest.mark.usefixtures("needs_slots")
    async def test_a_request_aborted_before_it_has_a_slot_has_no_token(self, make: Make, kind: EngineKind) -> None:
        engine, request, generating = make(slots_max=1), ask(), ask(max_tokens=kind.long)
        first = asyncio.create_task(engine.generate(generating))
        await wait_first_token(kind, engine, generating)
        queued = asyncio.create_task(engine.generate(request))
        await anyio.sleep(0.01)
        engine.abort(request)

        generation = await queued

        assert (generation.token_ids, generation.spans, generation.finish_reason) == ((), (), "abort")
        first.cancel()

    async def test_a_request_aborted_before_its_first_token_has_none(self, make: Make) -> None:
        engine, request = make(), ask()
        await engine.pause()
        queued = asyncio.create_task(engine.generate(request))
        await anyio.sleep(0.01)
        engine.abort(request)

        generation = await queued

        assert (generation.token_ids, generation.spans, generation.finish_reason) == ((), (), "abort")

    async def test_a_request_aborted_in_the_moment_of_its_call_ends_too(self, make: Make, kind: EngineKind) -> None:
        engine, request = make(), ask(max_tokens=kind.long)
        under_way = asyncio.create_task(engine.generate(request))
        await anyio.lowlevel.checkpoint()
        engine.abort(request)

        generation = await under_way

        check(generation)
        assert generation.finish_reason == "abort"
        assert len(generation.token_ids) < kind.long
        assert await kind.requests_left(engine) == 0

    async def test_aborting_a_request_that_has_ended_or_never_began_does_nothing(self, make: Make) -> None:
        engine, request = make(), ask()
        engine.abort(request)
        await engine.generate(request)
        engine.abort(request)

        check(await engine.generate(ask()))

    async def test_a_cancelled_consumer_frees_the_slot(self, make: Make, kind: EngineKind) -> None:
        engine, request = make(**slots(kind, 1)), ask(max_tokens=kind.long)
        under_way = asyncio.create_task(engine.generate(request))
        await wait_first_token(kind, engine, request)
        under_way.cancel()
        with pytest.raises(asyncio.CancelledError):
            await under_way

        assert engine.in_flight_count == 0
        assert await kind.requests_left(engine) == 0
        with anyio.fail_after(5):
            assert len((await engine.generate(ask())).token_ids) == 4

    async def test_a_consumer_that_runs_out_of_time_frees_the_slot(self, make: Make, kind: EngineKind) -> None:
        engine = make(**slots(kind, 1))
        with anyio.move_on_after(0.02) as scope:
            await engine.generate(ask(max_tokens=kind.long))

        assert scope.cancelled_caught
        assert engine.in_flight_count == 0
        assert await kind.requests_left(engine) == 0

    async def test_a_consumer_cancelled_at_any_moment_leaves_nothing_behind(self, make: Make, kind: EngineKind) -> None:
        engine = make()
        for steps in range(12):
            under_way = asyncio.create_task(engine.generate(ask(max_tokens=kind.long)))
            for _ in range(steps):
                await anyio.lowlevel.checkpoint()
            under_way.cancel()
            with pytest.raises(asyncio.CancelledError):
                await under_way

            assert engine.in_flight_count == 0
            assert await kind.requests_left(engine) == 0

    @pytest.mark.parametrize(
        ("before", "call"),
        [
            ((), "pause"),
            (("pause",), "sleep"),
            (("pause", "sleep"), "wake"),
            (("pause",), "resume"),
            ((), "publish_weights"),
            (("pause", "sleep"), "publish_weights"),
        ],
    )
    async def test_a_call_cancelled_at_any_moment_leaves_an_engine_that_is_what_it_says(
        self, make: Make, kind: EngineKind, before: tuple[str, ...], call: str
    ) -> None:
        engine = make()
        for steps in range(12):
            under_way = [asyncio.create_task(engine.generate(ask())) for _ in range(2)]
            for earlier in before:
                await getattr(engine, earlier)()
            arguments = (kind.weights(), 2 * steps + 1) if call == "publish_weights" else ()
            task = asyncio.create_task(getattr(engine, call)(*arguments))
            for _ in range(steps):
                await anyio.lowlevel.checkpoint()
            for _ in range(3):  # As somebody in a hurry does.
                task.cancel()
                await anyio.lowlevel.checkpoint()
            await asyncio.gather(task, return_exceptions=True)
            with anyio.fail_after(20):
                if engine.state == "asleep":
                    await engine.wake()
                await engine.resume()
                for generation in [*await asyncio.gather(*under_way), await engine.generate(ask())]:
                    check(generation)

            assert generation.spans[-1].weight_version == engine.weight_version
            await engine.publish_weights(kind.weights(), 2 * steps + 2)
            assert (await engine.generate(ask())).spans[-1].weight_version == 2 * steps + 2

    async def test_nothing_is_generated_while_paused(self, make: Make, kind: EngineKind) -> None:
        engine, request = make(), ask(max_tokens=kind.long)
        under_way = asyncio.create_task(engine.generate(request))
        await anyio.sleep(0.02)
        await engine.pause()
        late = asyncio.create_task(engine.generate(ask()))
        await anyio.sleep(0.6)

        assert not under_way.done()
        assert not late.done()
        await engine.resume()
        check(await late)
        assert len((await under_way).token_ids) == kind.long

    async def test_pausing_twice_and_resuming_twice_is_the_same_as_once(self, make: Make) -> None:
        engine = make()
        await engine.pause()
        await engine.pause()
        await engine.resume()
        await engine.resume()

        check(await engine.generate(ask()))

    async def test_a_paused_engine_takes_weights_and_aborts(self, make: Make, kind: EngineKind) -> None:
        engine, request = make(), ask()
        await engine.pause()
        under_way = asyncio.create_task(engine.generate(request))
        await anyio.sleep(0.01)
        await engine.publish_weights(kind.weights(), 1)
        engine.abort(request)

        assert (await under_way).finish_reason == "abort"
        assert engine.weight_version == 1

    async def test_weights_published_with_requests_in_flight_keep_the_tokens_so_far(
        self, make: Make, kind: EngineKind
    ) -> None:
        engine = make(weight_version=4)
        async with asyncio.TaskGroup() as tasks:
            requests = [ask(max_tokens=kind.long) for _ in range(3)]
            under_way = [tasks.create_task(engine.generate(request)) for request in requests]
            for request in requests:
                await wait_first_token(kind, engine, request)
            await engine.publish_weights(kind.weights(), 5)

        for task in under_way:
            generation = task.result()
            check(generation)
            assert [span.weight_version for span in generation.spans] == [4, 5]
            assert len(generation.token_ids) == kind.long
        assert engine.weight_version == 5

    async def test_kept_requests_finish_under_the_old_weights_and_new_ones_wait(
        self, make: Make, kind: EngineKind
    ) -> None:
        engine = make(weight_version=4, in_flight="keep")
        old, new = ask(max_tokens=kind.long), ask()
        under_way = asyncio.create_task(engine.generate(old))
        await wait_first_token(kind, engine, old)
        publishing = asyncio.create_task(engine.publish_weights(kind.weights(), 5))
        await wait_publishing(kind, engine)
        late = asyncio.create_task(engine.generate(new))
        await publishing

        assert under_way.done()
        finished, after = await under_way, await late
        check(finished)
        assert [span.weight_version for span in finished.spans] == [4]
        assert len(finished.token_ids) == kind.long
        assert [span.weight_version for span in after.spans] == [5]

    async def test_a_kept_request_that_goes_away_holds_nothing_up(self, make: Make, kind: EngineKind) -> None:
        engine, request = make(in_flight="keep"), ask(max_tokens=kind.long)
        under_way = asyncio.create_task(engine.generate(request))
        await wait_first_token(kind, engine, request)
        publishing = asyncio.create_task(engine.publish_weights(kind.weights(), 1))
        await wait_publishing(kind, engine)
        engine.abort(request)
        with anyio.fail_after(5):
            await publishing

        assert {span.weight_version for span in (await under_way).spans} == {0}
        assert engine.weight_version == 1

    async def test_a_paused_engine_that_keeps_requests_takes_weights_all_the_same(
        self, make: Make, kind: EngineKind
    ) -> None:
        engine, request = make(in_flight="keep"), ask(max_tokens=kind.long)
        under_way = asyncio.create_task(engine.generate(request))
        await wait_first_token(kind, engine, request)
        await engine.pause()
        with anyio.fail_after(5):
            await engine.publish_weights(kind.weights(), 1)
        await engine.resume()

        check(generation := await under_way)
        assert [span.weight_version for span in generation.spans] == [0, 1]

    async def test_restarted_requests_have_nothing_of_the_old_weights(self, make: Make, kind: EngineKind) -> None:
        engine, request = make(in_flight="restart"), ask(max_tokens=kind.long, seed=3)
        under_way = asyncio.create_task(engine.generate(request))
        await wait_first_token(kind, engine, request)
        await engine.publish_weights(kind.weights(), 5)

        check(generation := await under_way)
        assert [span.weight_version for span in generation.spans] == [5]
        assert len(generation.token_ids) == kind.long
        afterwards = await engine.generate(ask(max_tokens=kind.long, seed=3))
        assert generation.token_ids == afterwards.token_ids

    async def test_an_engine_goes_to_sleep_and_back_with_its_requests(self, make: Make, kind: EngineKind) -> None:
        engine, request = make(), ask(max_tokens=kind.long)
        under_way = asyncio.create_task(engine.generate(request))
        await wait_first_token(kind, engine, request)
        states = []
        for step in (engine.pause, engine.sleep, engine.sleep):
            await step()
            states.append(engine.state)
        late = asyncio.create_task(engine.generate(ask()))
        await anyio.sleep(0.3)
        assert not under_way.done()
        assert not late.done()
        await engine.publish_weights(kind.weights(), 1)
        for step in (engine.wake, engine.wake, engine.resume):
            await step()
            states.append(engine.state)

        assert states == ["paused", "asleep", "asleep", "paused", "paused", "generating"]
        check(await late)
        check(generation := await under_way)
        assert len(generation.token_ids) == kind.long
        assert [span.weight_version for span in generation.spans] == [0, 1]

    async def test_an_engine_that_nobody_used_sleeps_too(self, make: Make) -> None:
        engine = make()
        with anyio.fail_after(5):
            for step in (engine.pause, engine.sleep, engine.wake, engine.resume):
                await step()

        check(await engine.generate(ask()))

    @pytest.mark.parametrize(
        ("before", "call", "complaint"),
        [
            ([], "sleep", "cannot sleep: the engine is generating; pause it first"),
            ([], "wake", "cannot wake: the engine is generating; pause it first"),
            (["pause", "sleep"], "resume", "cannot resume: the engine is asleep; wake it first"),
            (["pause", "sleep"], "pause", "cannot pause: the engine is asleep; wake it first"),
        ],
    )
    async def test_no_state_is_skipped(self, make: Make, before: list[str], call: str, complaint: str) -> None:
        engine = make()
        for step in before:
            await getattr(engine, step)()
        state = engine.state

        with pytest.raises(EngineError, match=complaint):
            await getattr(engine, call)()
        assert engine.state == state

    async def test_an_aborted_request_leaves_a_sleeping_engine(self, make: Make, kind: EngineKind) -> None:
        engine, request = make(), ask(max_tokens=kind.long)
        under_way = asyncio.create_task(engine.generate(request))
        await wait_first_token(kind, engine, request)
        await engine.pause()
        await engine.sleep()
        engine.abort(request)

        assert (await under_way).finish_reason == "abort"
        assert engine.in_flight_count == 0

    async def test_a_policy_that_does_not_exist_is_refused(self, make: Make) -> None:
        with pytest.raises(EngineError, match="'drop'; it must be one of 'keep', 'continue', 'restart'"):
            make(in_flight="drop")

    async def test_a_parameter_that_the_engine_does_not_have_is_refused_by_name(self, make: Make) -> None:
        engine, request = make(), ask(extra={"temprature": 1})
        with pytest.raises(RequestRefused, match="temprature"):
            await engine.generate(request)

        assert engine.in_flight_count == 0
        assert not request.used

    async def test_misfit_weights_are_refused_and_the_old_ones_stay(self, make: Make, kind: EngineKind) -> None:
        engine = make(weight_version=4)
        before = await engine.generate(ask(temperature=0.0))
        with pytest.raises(EngineError, match="version 4 stays"):
            await engine.publish_weights({**kind.weights(), "nonsense": object()}, 5)

        assert engine.weight_version == 4
        assert await engine.generate(ask(temperature=0.0)) == before

    async def test_a_request_serves_once(self, make: Make) -> None:
        engine, request = make(), ask()
        await engine.generate(request)

        with pytest.raises(EngineError, match="used before"):
            await engine.generate(request)

    async def test_two_calls_with_one_request_at_a_time_are_refused_too(self, make: Make) -> None:
        engine, request = make(), ask()
        outcomes = await asyncio.gather(engine.generate(request), engine.generate(request), return_exceptions=True)

        assert [type(outcome) for outcome in outcomes] == [Generation, EngineError]

    @pytest.mark.parametrize(
        ("prompt_ids", "complaint"),
        [
            ((), "empty prompt"),
            ((1,) * CONTEXT, f"context of {CONTEXT}"),
            ((1, -1), "-1"),
            ("ab", "the text 'ab'; it must be token ids"),
        ],
        ids=["empty", "too long", "below zero", "a text"],
    )
    async def test_bad_prompts_are_refused_before_anything_is_queued(
        self, make: Make, prompt_ids: tuple[int, ...], complaint: str
    ) -> None:
        engine, request = make(), ask(prompt_ids)
        with pytest.raises(RequestRefused, match=complaint):
            await engine.generate(request)

        assert engine.in_flight_count == 0
        assert not request.used

    async def test_an_answer_ends_where_the_context_ends(self, make: Make) -> None:
        generation = await make().generate(ask((1,) * (CONTEXT - 10), max_tokens=50))

        assert len(generation.token_ids) == 10
        assert generation.finish_reason == "length"

    async def test_a_seed_gives_the_same_tokens_in_any_company(self, make: Make) -> None:
        engine = make()
        alone = await engine.generate(ask(seed=11, max_tokens=30))
        company = [ask((1, number % VOCABULARY), max_tokens=number + 1) for number in range(20)]
        generations = await asyncio.gather(
            *map(engine.generate, [*company, ask(seed=11, max_tokens=30), *map(_again, company)])
        )

        assert generations[20].token_ids == alone.token_ids

    async def test_an_engine_that_dies_fails_everything_at_once_and_for_good(self, kind: EngineKind) -> None:
        engine = await kind.make_mortal(**slots(kind, 2))
        async with asyncio.TaskGroup() as tasks:
            under_way = [tasks.create_task(_outcome(engine, ask(max_tokens=kind.long))) for _ in range(5)]
            await anyio.sleep(0.02)
            kind.kill(engine)

        for task in under_way:
            assert isinstance(task.result(), EngineDied)
            assert kind.death in str(task.result())
        for attempt in (engine.generate(ask()), engine.publish_weights(kind.weights(), 1), engine.pause()):
            with pytest.raises(EngineDied, match=kind.death):
                await attempt
        assert engine.in_flight_count == 0
        await engine.aclose()

    @pytest.mark.usefixtures("needs_died")
    async def test_who_waits_for_its_death_is_told_while_nobody_asks_anything(self, kind: EngineKind) -> None:
        engine = await kind.make_mortal()
        await engine.generate(ask())
        waiting = [asyncio.create_task(engine.died()) for _ in range(2)]
        waiting[0].cancel()
        done, _ = await asyncio.wait(waiting, timeout=0.05)

        assert done == {waiting[0]}
        kind.kill(engine)
        for call in (waiting[1], engine.died()):
            with anyio.fail_after(30), pytest.raises(EngineDied, match=kind.death):
                await call
        await engine.aclose()

    @pytest.mark.usefixtures("needs_died")
    async def test_to_be_closed_is_no_death(self, make: Make) -> None:
        engine = make()
        await engine.generate(ask())
        waiting = asyncio.create_task(engine.died())
        await engine.aclose()
        done, _ = await asyncio.wait([waiting], timeout=0.05)
        waiting.cancel()

        assert not done

    async def test_closing_fails_requests_under_way_and_may_be_done_twice(self, make: Make, kind: EngineKind) -> None:
        engine = make()
        under_way = asyncio.create_task(_outcome(engine, ask(max_tokens=kind.long)))
        await anyio.sleep(0.02)
        await engine.aclose()
        await engine.aclose()

        assert isinstance(await under_way, EngineDied)
        with pytest.raises(EngineDied, match="closed"):
            await engine.generate(ask())
