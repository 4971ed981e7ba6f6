"""Contracts find what is broken: a rule, a log or a store that breaks its promise fails a test of it."""

import asyncio
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from groupstate import Drop, Rules, Select
from groupstate.core.events import PayloadRef
from groupstate.engines.scripted import ScriptedEngine
from groupstate.log.memory import MemoryLog, MemoryPayloads
from groupstate.simulate.loop import VirtualLoop, run_virtual
from groupstate.testing import EngineKind, EvictionContract, LogContract, PayloadStoreContract, SelectionContract

from . import broken_rules
from .broken_rules import in_band

ROOT = Path(__file__).parents[2]


def failed(contract: type, **fixtures: Callable[[], Any]) -> list[str]:
    """Names of the tests that fail, each run with new fixtures, in virtual time."""
    return [name for name, test in inspect.getmembers(contract, inspect.isfunction) if _fails(contract, test, fixtures)]


def _fails(contract: type, test: Callable[..., Any], fixtures: dict[str, Callable[[], Any]]) -> bool:
    if not test.__name__.startswith("test_"):
        return False
    names = [name for name in inspect.signature(test).parameters if name != "self"]
    for options in _options(test):
        given = {name: options[name] if name in options else fixtures[name]() for name in names}
        try:
            answer = test(contract(), **given)
            if inspect.isawaitable(answer):
                run_virtual(lambda loop, answer=answer: answer)  # type: ignore[misc]
        except pytest.skip.Exception:
            continue
        except Exception:
            # What is broken may raise whatever it likes.
            return True
        except BaseException as error:
            if isinstance(error, pytest.fail.Exception):
                return True
            raise
    return False


def _options(test: Any) -> Iterator[dict[str, Any]]:
    marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
    if not marks:
        yield {}
    for mark in marks:
        for value in mark.args[1]:
            yield {mark.args[0]: value}


def selecting(rule: Any) -> type[SelectionContract]:
    return type("Mine", (SelectionContract,), {"selection": staticmethod(rule)})


def evicting(rule: Any) -> type[EvictionContract]:
    return type("Mine", (EvictionContract,), {"selection": staticmethod(rule)})


def test_a_right_rule_fails_nothing() -> None:
    assert failed(selecting(in_band)) == failed(evicting(in_band)) == []


@pytest.mark.parametrize(
    ("rule", "test"),
    [
        (broken_rules.needs_one_more, "test_a_sampler_is_served_by_exactly_enough_groups"),
        (broken_rules.takes_validation, "test_validation_is_neither_counted_nor_taken"),
        (broken_rules.counts_validation, "test_validation_is_neither_counted_nor_taken"),
        (broken_rules.selects_twice, "test_a_batch_has_as_many_groups_as_were_asked_for"),
        (broken_rules.Forgetful(), "test_a_sampler_is_served_by_exactly_enough_groups"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_broken_selection_fails_the_test_that_says_so(rule: Any, test: str) -> None:
    assert test in failed(selecting(rule))


def keeps_all(book: Any, rules: Any, request: Any) -> Iterator[Select | Drop]:
    ready = [group.group_id for group in book.ready()]
    if len(ready) >= request.size:
        yield Select(ready[: request.size])


def drops_all(book: Any, rules: Any, request: Any) -> Iterator[Select | Drop]:
    yield from (Drop(group.group_id) for group in book.ready())


def drops_validation(book: Any, rules: Any, request: Any) -> Iterator[Select | Drop]:
    yield from (Drop(group.group_id) for group in book.ready("val"))
    yield from in_band(book, rules, request)


@pytest.mark.parametrize(
    ("rule", "test"),
    [
        (keeps_all, "test_a_bad_group_is_evicted_and_a_good_one_is_trained_on"),
        (drops_all, "test_a_good_group_stays_however_long_it_waits"),
        (drops_validation, "test_validation_is_never_evicted"),
        (broken_rules.evicts_what_was_sampled, "test_a_group_that_is_with_the_trainer_is_never_evicted"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_broken_eviction_fails_the_test_that_says_so(rule: Any, test: str) -> None:
    assert test in failed(evicting(rule))


def test_a_failure_of_a_rule_is_told_with_its_story() -> None:
    contract = evicting(keeps_all)()

    with pytest.raises(AssertionError) as caught:
        contract.test_a_late_result_revives_nothing()

    assert "\n".join(caught.value.__notes__) == (
        "\nThe story, in which good groups end 'reward=0', 'reward=1' and bad groups end 'reward=1', 'reward=1', under "
        "keeps_all:\n\n    submit bad/2\n    start bad\n    finish bad.0 reward=1\n    finish bad.1 reward=1\n"
        "    sample 1\n    finish bad.0 reward=1 attempt=1\n\n"
        "Batches: [['bad']]. Evicted: []. Sampleable: []."
    )


def test_settings_that_evict_nothing_fail_too() -> None:
    class Mine(EvictionContract):
        rules = Rules()

    assert "test_a_bad_group_is_evicted_and_a_good_one_is_trained_on" in failed(Mine)


class Forgets(MemoryLog):
    def read(self, start: int = 1, stop: int | None = None) -> Iterator[Any]:
        return iter(list(super().read(start, stop))[:1])


class NeverWakes(MemoryLog):
    async def durable(self, seq: int) -> None:
        if seq > self.last_seq:
            return


class GoesOn(MemoryLog):
    async def aclose(self) -> None:
        pass


@pytest.mark.parametrize(
    ("log", "test"),
    [
        (MemoryLog, ""),
        (Forgets, "test_a_part_can_be_read"),
        (NeverWakes, "test_an_event_can_be_waited_for_before_it_is_posted"),
        (GoesOn, "test_a_closed_log_refuses_posts"),
    ],
)
def test_a_broken_log_fails_the_test_that_says_so(log: type, test: str) -> None:
    found = failed(LogContract, log=log)

    assert test in found if test else found == []


class Hangs(MemoryLog):
    async def durable(self, seq: int) -> None:
        await asyncio.Event().wait()


class PatientContract(LogContract):
    patience_s = 0.01


def test_a_log_that_keeps_one_waiting_fails_and_does_not_hang_the_tests() -> None:
    async def waits() -> None:
        await PatientContract().test_waiting_makes_what_was_posted_durable(Hangs())

    with pytest.raises(AssertionError, match=r"waited 0\.01 s for what didn't come"):
        asyncio.run(waits())


def test_a_timeout_of_what_is_tested_is_told_as_it_is() -> None:
    class TimesOut(MemoryLog):
        async def durable(self, seq: int) -> None:
            raise TimeoutError("the disk is slow")

    async def waits() -> None:
        await LogContract().test_waiting_makes_what_was_posted_durable(TimesOut())

    with pytest.raises(TimeoutError, match="the disk is slow"):
        asyncio.run(waits())


STRICT = """
import asyncio

import pytest

from groupstate.engines.scripted import ScriptedEngine
from groupstate.log.memory import MemoryLog
from groupstate.testing import LogContract, PayloadStoreContract


class TestLog(LogContract):
    @pytest.fixture
    def log(self):
        return MemoryLog()

    async def test_one_of_my_own(self, log):
        assert asyncio.get_running_loop() and log.last_seq == 0


class TestStore(PayloadStoreContract):
    @pytest.fixture
    def store(self):
        return MemoryLog().payloads
"""


@pytest.mark.parametrize("mode", ["strict", "auto"])
def test_a_contract_needs_neither_a_setting_nor_a_plugin(tmp_path: Path, mode: str) -> None:
    (tmp_path / "test_mine.py").write_text(STRICT)
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", f"--asyncio-mode={mode}"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )

    assert done.returncode == 0, done.stdout
    assert "32 passed, 2 skipped" in done.stdout


class Aliases(MemoryPayloads):
    def put(self, data: bytes) -> PayloadRef:
        ref = super().put(data)
        self._data[ref.key] = data
        return ref


class KeepsFreed(MemoryPayloads):
    def free(self, refs: Any) -> None:
        pass


class ChecksNothing(MemoryPayloads):
    def get(self, ref: PayloadRef) -> bytes:
        return self._data[ref.key]


@pytest.mark.parametrize(
    ("store", "test"),
    [
        (MemoryPayloads, ""),
        (Aliases, "test_a_payload_is_copied_when_it_is_put"),
        (KeepsFreed, "test_a_freed_payload_is_gone"),
        (ChecksNothing, "test_a_reference_that_does_not_fit_is_refused"),
    ],
)
def test_a_broken_store_fails_the_test_that_says_so(store: type, test: str) -> None:
    found = failed(PayloadStoreContract, store=store)

    assert test in found if test else found == []


class KindOfEngine(EngineKind):
    """Only what has to be said."""

    def make(self, **options: Any) -> ScriptedEngine:
        return ScriptedEngine(lambda prompt_ids: [sum(prompt_ids) % 16] * 1900, context=2000, **options)

    def weights(self) -> dict[str, Any]:
        return {}

    def kill(self, engine: Any) -> None:
        engine.die(RuntimeError("boom"))

    def token_count(self, engine: Any, request: Any) -> int:
        return 0

    def is_publishing(self, engine: Any) -> bool:
        return False


def test_a_kind_of_engine_has_a_usual_answer_for_what_it_does_not_say() -> None:
    kind = KindOfEngine()

    async def asked(loop: VirtualLoop) -> int:
        engine = await kind.make_mortal(weight_version=3)
        assert engine.weight_version == 3
        return await kind.requests_left(engine)

    assert run_virtual(asked) == 0
    assert (kind.long, kind.death, kind.sets_slots) == (1500, "boom", False)


def test_a_kind_of_engine_that_lacks_something_says_what() -> None:
    class Mine(EngineKind):
        def make(self, **options: Any) -> Any: ...

    # Python 3.12 puts the names in quotes.
    with pytest.raises(TypeError, match=r"abstract methods '?is_publishing'?, '?kill'?, '?token_count'?, '?weights"):
        Mine()  # type: ignore[abstract]
