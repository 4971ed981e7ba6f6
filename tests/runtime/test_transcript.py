"""Sessions of several turns: one row of tokens, and of each token who wrote it, under which weights."""

from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from groupstate import Prompt, Rules, SamplingParams, SessionContext, Trajectory, VersionSpan, broadcast_reward
from groupstate.core import events as ev
from groupstate.core.trajectory import checked, payload_of, record_of, restored
from groupstate.engines.port import Engine, Generation, Request
from groupstate.engines.scripted import ScriptedEngine
from groupstate.engines.tokenizer import CharTokenizer
from groupstate.errors import BadInput, EngineError, RequestRefused, SessionStateError, UnusableResult
from tests.runtime.scenes import events, opened, quiet, started, virtual

LETTERS = CharTokenizer("abcdefghijklmnopqrstuvwxyz ")


def context(engine: Engine | None, **params: Any) -> SessionContext:
    return SessionContext("g", 0, 1, 1, Prompt("p"), 0, engine, SamplingParams(**params))


def answering(*answers: Sequence[int], **options: Any) -> SessionContext:
    return context(ScriptedEngine(list(answers), **options))


class Fixed:
    """An engine that gives what it is told, whatever is asked."""

    tokenizer = None
    takes_text = False

    def __init__(self, *generations: Generation) -> None:
        self.generations = list(generations)
        self.requests: list[Request] = []

    async def generate(self, request: Request) -> Generation:
        self.requests.append(request)
        await anyio.lowlevel.checkpoint()
        return self.generations.pop(0)


def fixed(*generations: Generation) -> SessionContext:
    return context(Fixed(*generations))  # type: ignore[arg-type]


def generation(*token_ids: int, version: int = 0, log_prob: float = -0.5, **more: Any) -> Generation:
    spans = (VersionSpan(0, len(token_ids), version),) if token_ids else ()
    return Generation(token_ids, (log_prob,) * len(token_ids), spans, more.pop("finish_reason", "stop"), **more)


def valid(trajectory: Trajectory) -> Trajectory:
    """The same, as the door of the log lets it in."""
    rows = checked(trajectory, session=0, group_id="g")
    (row,) = restored([record_of(0, row) for row in rows], payload_of(rows, "session 0 of group 'g'"))
    return row


@pytest.mark.parametrize("begin", [SessionContext.transcript, SessionContext.prompt_ids])
def test_chat_messages_are_no_prompt_and_a_way_is_named(begin: Any) -> None:
    with pytest.raises(BadInput, match=r"the prompt is a list of messages; .*apply_chat_template"):
        begin(answering([3]), [{"role": "user", "content": "hello"}])


def test_an_observation_that_is_neither_text_nor_tokens_is_named_and_leaves_nothing() -> None:
    t = answering([3]).transcript([1, 2])

    with pytest.raises(BadInput, match="the observation is NoneType None; it must be token ids"):
        t.observe(None)  # type: ignore[arg-type]
    assert len(t) == 2


# Turns -----------------------------------------------------------------------------------------------


@virtual
async def test_answers_and_observations_stand_in_their_order_with_who_wrote_them(loop):
    t = fixed(generation(10, 11), generation(12, version=1)).transcript([1, 2])
    await t.generate()
    t.observe([90, 91, 92])
    await t.generate()

    row = valid(t.trajectory(reward=1.0))
    assert row.prompt_ids == (1, 2)
    assert row.response_ids == (10, 11, 90, 91, 92, 12)
    assert row.log_probs == (-0.5, -0.5, 0.0, 0.0, 0.0, -0.5)
    assert row.environment == ((2, 5),)
    assert row.spans == (VersionSpan(0, 2, 0), VersionSpan(5, 6, 1))
    assert row.metrics == {"reward": 1.0}


@virtual
async def test_each_turn_asks_with_all_tokens_so_far(loop):
    ctx = fixed(generation(10), generation(11))
    t = ctx.transcript([1])
    await t.generate()
    t.observe([90])
    await t.generate(temperature=0.0)

    assert [request.prompt_ids for request in ctx.engine.requests] == [[1], [1, 10, 90]]
    assert [request.params.temperature for request in ctx.engine.requests] == [1.0, 0.0]
    assert t.token_ids == [1, 10, 90, 11]
    assert len(t) == 4


@virtual
async def test_turns_and_forks_of_a_session_share_their_affinity(loop):
    ctx = fixed(*(generation(10) for _ in range(3)))
    t = ctx.transcript([1])
    await t.generate()
    await t.fork().generate()
    await ctx.transcript([2]).generate()

    assert {request.affinity for request in ctx.engine.requests} == {"g_0"}


@virtual
async def test_what_was_generated_is_never_encoded_again(loop):
    """`ab` is one token for whoever encodes it, and the model wrote it as two."""

    class Merging(CharTokenizer):
        def encode(self, text: str) -> list[int]:
            return [99 if part == "ab" else super(Merging, self).encode(part)[0] for part in text.split(" ")]

        def decode(self, token_ids: Sequence[int]) -> str:
            return "".join("ab" if token == 99 else super(Merging, self).decode([token]) for token in token_ids)

    a, b = LETTERS.encode("ab")
    prompts = []

    def script(prompt_ids: Sequence[int]) -> Sequence[int]:
        prompts.append(list(prompt_ids))
        return [a, b]

    t = context(ScriptedEngine(script, tokenizer=Merging(LETTERS.alphabet))).transcript("c")
    assert (await t.generate()).text == "ab"
    t.observe("ab")
    await t.generate()

    assert prompts == [[*LETTERS.encode("c")], [*LETTERS.encode("c"), a, b, 99]]
    assert t.text == "ababab"


@virtual
async def test_adjacent_spans_of_one_version_and_adjacent_observations_are_one(loop):
    t = fixed(generation(10), generation(11), generation(12, version=1)).transcript([1])
    await t.generate()
    await t.generate()
    t.observe([90])
    t.observe([])
    t.observe([91])
    await t.generate()
    t.observe([92])

    row = valid(t.trajectory())
    assert row.environment == ((2, 4), (5, 6))
    assert row.spans == (VersionSpan(0, 2, 0), VersionSpan(4, 5, 1))


@virtual
async def test_spans_of_one_version_on_both_sides_of_an_observation_stay_two(loop):
    t = fixed(generation(10), generation(11)).transcript([1])
    await t.generate()
    t.observe([90])
    await t.generate()

    assert valid(t.trajectory()).spans == (VersionSpan(0, 1, 0), VersionSpan(2, 3, 0))


@virtual
async def test_an_answer_across_versions_keeps_its_spans_where_it_stands(loop):
    two = Generation((10, 11, 12), (-0.1, -0.2, -0.3), (VersionSpan(0, 1, 4), VersionSpan(1, 3, 5)), "stop")
    t = fixed(generation(9, version=4), two).transcript([1])
    await t.generate()
    await t.generate()

    assert valid(t.trajectory()).spans == (VersionSpan(0, 2, 4), VersionSpan(2, 4, 5))


@virtual
async def test_the_environment_may_begin(loop):
    t = answering([10]).transcript([1])
    t.observe([90])
    await t.generate()

    row = valid(t.trajectory())
    assert (row.environment, row.spans) == (((0, 1),), (VersionSpan(1, 2, 0),))


@virtual
async def test_a_transcript_without_an_answer_has_nothing_that_the_model_wrote(loop):
    t = answering().transcript([1])
    t.observe([90, 91])

    row = valid(t.trajectory())
    assert (row.environment, row.spans, row.info) == (((0, 2),), (), {})


# How answers end -------------------------------------------------------------------------------------


@virtual
async def test_how_each_answer_ended_is_told(loop):
    t = answering([10, 11, 12], [13]).transcript([1])
    first = await t.generate(max_tokens=2)
    await t.generate()

    assert first.finish_reason == "length"
    assert t.finish_reasons == ("length", "stop")
    row = valid(t.trajectory(info={"tool calls": 0}))
    assert row.info == {"finish_reason": "stop", "finish_reasons": ["length", "stop"], "tool calls": 0}


@virtual
async def test_an_aborted_answer_stays_as_far_as_it_came(loop):
    class Noting(ScriptedEngine):
        async def generate(self, request: Request) -> Generation:
            self.request = request
            return await super().generate(request)

    engine = Noting([[10, 11, 12], [13]], token_s=1.0)
    t = context(engine).transcript([1])
    under_way = started(t.generate())
    await anyio.sleep(2.5)
    engine.abort(engine.request)
    await under_way
    await t.generate()

    assert t.finish_reasons == ("abort", "stop")
    assert t.token_ids == [1, 10, 11, 13]


@virtual
async def test_an_answer_without_a_token_changes_nothing_but_how_it_ended(loop):
    t = fixed(generation(finish_reason="abort")).transcript([1])
    await t.generate()

    assert t.finish_reasons == ("abort",)
    assert valid(t.trajectory()).response_ids == ()


@virtual
async def test_a_cancelled_answer_leaves_nothing_behind(loop):
    t = answering([10, 11], [12], token_s=1.0).transcript([1])
    with anyio.move_on_after(1.5):
        await t.generate()
    assert t.token_ids == [1]

    await t.generate()
    assert t.token_ids == [1, 12]


@virtual
async def test_a_full_context_is_the_engines_refusal_and_what_there_is_can_be_kept(loop):
    t = answering([10, 11, 12], [13], context=4).transcript([1])
    assert (await t.generate()).finish_reason == "length"

    with pytest.raises(RequestRefused, match="the context of 4"):
        await t.generate()
    assert valid(t.trajectory()).response_ids == (10, 11, 12)


@virtual
async def test_a_refusal_that_the_session_lets_through_is_its_recorded_end(loop):
    async def session(ctx: SessionContext) -> Trajectory:
        t = ctx.transcript([1])
        while True:
            await t.generate()

    engine = ScriptedEngine(lambda prompt_ids: [10, 11], context=4)
    async with opened(loop, session=session, engine=engine, rules=Rules()) as run:
        run.submit("p")
        await anyio.sleep(1)

        (end,) = events(run, ev.SessionFailed)
        assert end.failure == "refused"


@virtual
async def test_two_answers_at_once_are_refused_and_the_first_goes_on(loop):
    t = answering([10, 11], token_s=1.0).transcript([1])
    under_way = started(t.generate())
    await quiet()

    with pytest.raises(SessionStateError, match="cannot generate: an answer of this transcript is under way"):
        await t.generate()
    with pytest.raises(SessionStateError, match="cannot observe"):
        t.observe([90])
    await under_way
    assert t.token_ids == [1, 10, 11]


# Forks -----------------------------------------------------------------------------------------------


@virtual
async def test_a_fork_goes_its_own_way(loop):
    t = fixed(generation(10), generation(11, version=1), generation(12, version=2)).transcript([1])
    await t.generate()
    t.observe([90])
    other = t.fork()
    await t.generate()
    other.observe([91])
    await other.generate()

    assert valid(t.trajectory()).response_ids == (10, 90, 11)
    row = valid(other.trajectory())
    assert row.response_ids == (10, 90, 91, 12)
    assert row.log_probs == (-0.5, 0.0, 0.0, -0.5)
    assert row.environment == ((1, 3),)
    assert row.spans == (VersionSpan(0, 1, 0), VersionSpan(3, 4, 2))
    assert row.info["finish_reasons"] == ["stop", "stop"]


@virtual
async def test_what_a_fork_has_in_common_can_be_its_prompt(loop):
    t = fixed(generation(10), generation(11)).transcript([1])
    await t.generate()
    t.observe([90])
    other = t.fork(as_prompt=True)
    await other.generate()

    row = valid(other.trajectory())
    assert (row.prompt_ids, row.response_ids, row.spans) == ((1, 10, 90), (11,), (VersionSpan(0, 1, 0),))
    assert other.finish_reasons == ("stop",)


@virtual
async def test_a_fork_may_be_made_while_an_answer_is_under_way(loop):
    t = answering([10], [11], token_s=1.0).transcript([1])
    under_way = started(t.generate())
    await quiet()
    other = t.fork()
    await other.generate()
    await under_way

    assert (t.token_ids, other.token_ids) == ([1, 10], [1, 11])


# Texts -----------------------------------------------------------------------------------------------


@virtual
async def test_texts_are_encoded_by_the_engines_tokenizer(loop):
    t = answering(LETTERS.encode("yes"), tokenizer=LETTERS).transcript("why")
    await t.generate()
    t.observe(" no")
    t.observe(LETTERS.encode(" then"))

    assert t.prompt_ids == LETTERS.encode("why")
    assert t.response_ids == LETTERS.encode("yes no then")
    assert t.text == valid(t.trajectory()).text == "yes no then"


@virtual
async def test_an_observed_text_gets_no_special_tokens(loop):
    class Whole(CharTokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            ids = super().encode(text)
            return [self.bos_id, *ids] if add_special_tokens else ids

    t = answering([10], tokenizer=Whole("ab")).transcript("a")
    t.observe("b")

    assert t.token_ids == [1, 3, 4]


@virtual
async def test_a_tokenizer_that_cannot_say_what_it_takes_is_asked_plainly(loop):
    class Words:
        encode = {"b": [7]}.__getitem__  # not of Python: `inspect.signature` may not know its arguments
        decode = str

    t = answering([10], tokenizer=Words()).transcript([1])
    t.observe("b")

    assert t.token_ids == [1, 7]


@virtual
async def test_a_text_for_an_engine_without_a_tokenizer_is_refused(loop):
    t = answering([10]).transcript([1])
    with pytest.raises(EngineError, match="has no tokenizer, so it takes token ids and no text"):
        t.observe("hello")
    t.observe([90])

    assert (t.token_ids, t.text) == ([1, 90], "")


@virtual
async def test_an_engine_that_takes_only_texts_says_so_at_the_beginning(loop):
    ctx = fixed()
    ctx.engine.takes_text = True

    with pytest.raises(EngineError, match="takes texts and has no tokenizer"):
        ctx.transcript("hello")


@virtual
async def test_an_engine_that_takes_only_texts_is_given_the_text(loop):
    ctx = fixed(Generation((), (), (), "stop", "hello"))
    ctx.engine.takes_text = True

    answer = await ctx.generate("who?")
    (request,) = ctx.engine.requests

    assert answer.text == "hello"
    assert (request.text, request.prompt_ids) == ("who?", ())


@virtual
async def test_an_answer_of_text_alone_is_refused_and_leaves_nothing(loop):
    t = fixed(Generation((), (), (), "stop", "hello"), generation(10)).transcript([1])
    with pytest.raises(EngineError, match="a text and no token ids"):
        await t.generate()

    assert t.token_ids == [1]
    assert (await t.generate()).token_ids == (10,)


@virtual
async def test_log_probs_that_one_answer_lacks_are_left_out_of_the_row(loop):
    t = fixed(generation(10), Generation((11,), (), (VersionSpan(0, 1, 0),), "stop")).transcript([1])
    await t.generate()
    await t.generate()

    assert valid(t.trajectory()).log_probs == ()
    assert valid(t.fork().trajectory()).log_probs == ()


@virtual
async def test_log_probs_that_do_not_fit_the_tokens_are_refused(loop):
    t = fixed(Generation((10, 11), (-0.5,), (VersionSpan(0, 2, 0),), "stop")).transcript([1])

    with pytest.raises(EngineError, match="1 log-probabilities for 2 tokens"):
        await t.generate()
    assert t.token_ids == [1]


@virtual
async def test_token_ids_are_integers(loop):
    t = answering([10]).transcript([1])
    with pytest.raises(BadInput, match="must be token ids"):
        t.observe([1.5])
    with pytest.raises(BadInput, match="the prompt is NoneType None"):
        t._ctx.transcript(None)

    assert t.token_ids == [1]


# The reward of a session -----------------------------------------------------------------------------


def test_the_last_reward_is_given_to_all_trajectories_of_a_session():
    rows = [
        Trajectory(response_ids=(1,), metrics={"reward": 0.25, "turns": 1.0}),
        Trajectory(),
        Trajectory(metrics={"reward": 0.75}),
    ]

    given = broadcast_reward(rows)

    assert [valid(row).metrics for row in given] == [{"reward": 0.75, "turns": 1.0}, {"reward": 0.75}, {"reward": 0.75}]
    assert given[0].response_ids == (1,)
    assert broadcast_reward([]) == []


def test_a_last_trajectory_without_reward_has_none_to_give():
    with pytest.raises(UnusableResult, match=r"the last of 2 trajectories has no metric 'reward'.*it has 'acc'"):
        broadcast_reward([Trajectory(reward=1.0), Trajectory(metrics={"acc": 1.0})])


# In a run --------------------------------------------------------------------------------------------


@virtual
async def test_the_log_tells_versions_and_environment_of_every_trajectory_of_a_session(loop):
    async def session(ctx: SessionContext) -> list[Trajectory]:
        long = ctx.transcript([1])
        await long.generate()
        long.observe([90, 91])
        await long.generate()
        short = ctx.transcript([1, 5])
        await short.generate()
        return broadcast_reward([long.trajectory(), short.trajectory(reward=1.0)])

    engine = ScriptedEngine(lambda prompt_ids: [10, 11], token_s=1.0)
    async with opened(loop, session=session, engine=engine) as run:
        run.submit("p")
        await anyio.sleep(2.5)
        await run.publish_weights(1, {})
        await anyio.sleep(2)
        await run.publish_weights(2, {})
        batch = await run.sample(1)

        (end,) = events(run, ev.SessionFinished)
        long, short = end.trajectories
        assert (long.response_tokens, long.environment) == (6, ((2, 4),))
        assert long.spans == (VersionSpan(0, 2, 0), VersionSpan(4, 6, 1))
        assert (short.prompt_tokens, short.spans) == (2, (VersionSpan(0, 2, 2),))
        assert [row.trajectory.reward for row in batch.rows] == [1.0, 1.0]


@virtual
async def test_sessions_of_many_turns_run_beside_each_other(loop):
    async def session(ctx: SessionContext) -> Trajectory:
        t = ctx.transcript([1 + ctx.session])
        for turn in range(5):
            await t.generate()
            t.observe([90 + turn])
        return t.trajectory(reward=float(ctx.session))

    def script(prompt_ids: Sequence[int]) -> Sequence[int]:
        return [prompt_ids[0] * 10 + len(prompt_ids) % 7] * (1 + len(prompt_ids) % 3)

    engine = ScriptedEngine(script, token_s=0.01, slots_max=3)
    async with opened(loop, session=session, engine=engine, group_size=8) as run:
        run.submit("p")
        (group,) = (await run.sample(1)).groups

    for number, (row,) in group.sessions:
        alone = context(ScriptedEngine(script))
        t = alone.transcript([1 + number])
        for turn in range(5):
            await t.generate()
            t.observe([90 + turn])
        assert tuple(row.response_ids) == tuple(t.response_ids)
