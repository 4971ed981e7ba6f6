"""Logging: quiet until it is asked for, and through structlog where the program has configured it."""

import io
import json
import logging
import os
import subprocess
import sys

import pytest
import structlog

from groupstate import logs
from groupstate.logs import Logger

log = Logger("groupstate.test")


@pytest.fixture
def configured():
    """A program that has configured structlog, and the events that it gets."""
    found: list[dict] = []

    def keep(logger, method, event):
        found.append({"level": method, **event})
        raise structlog.DropEvent

    structlog.configure(processors=[keep])
    yield found
    structlog.reset_defaults()


def test_without_configuration_warnings_show_and_the_rest_does_not(capsys):
    logging.getLogger("groupstate").handlers.clear()

    log.info("quiet", group="g")

    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("level", ["info", "warning", "error"])
def test_without_configuration_events_go_to_the_standard_library(caplog, level):
    with caplog.at_level(logging.INFO):
        getattr(log, level)("something happened", group="g7", lag=2)

    (record,) = caplog.records
    assert (record.levelname.lower(), record.name) == (level, "groupstate.test")
    assert record.getMessage().startswith("event='something happened' group='g7' lag=2")


@pytest.mark.parametrize("level", ["info", "warning", "error"])
def test_an_event_below_the_level_is_not_put_together(caplog, level):
    class Costly:
        def __repr__(self) -> str:
            raise AssertionError("nobody looks at it")

    with caplog.at_level(logging.CRITICAL):
        getattr(log, level)("quiet", value=Costly())

    assert caplog.records == []


@pytest.mark.parametrize("level", ["info", "warning", "error"])
def test_a_program_with_structlog_gets_the_events_through_its_own_processors(configured, level):
    getattr(log, level)("something happened", group="g7")

    assert configured == [{"level": level, "event": "something happened", "group": "g7"}]


def test_structlog_may_be_configured_after_the_first_event(caplog, configured):
    structlog.reset_defaults()
    log.warning("before")
    structlog.configure(processors=[lambda logger, method, event: configured.append(event) or (_ for _ in ()).throw(
        structlog.DropEvent)])  # fmt: skip

    log.warning("after")

    assert [record.getMessage()[:15] for record in caplog.records] == ["event='before' "]
    assert [event["event"] for event in configured] == ["after"]


IMPORTED_ELSEWHERE = """
import importlib.machinery, sys, threading
from groupstate.logs import Logger

begun, go_on = threading.Event(), threading.Event()

class Slowly(importlib.machinery.SourceFileLoader):
    def exec_module(self, module):
        begun.set()
        assert go_on.wait(30)
        super().exec_module(module)

class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        spec = super().find_spec(name, path, target)
        if name == "structlog":
            spec.loader = Slowly(name, spec.origin)
        return spec

sys.meta_path.insert(0, Finder)
problems = []
threading.excepthook = lambda problem: problems.append(problem.exc_value)
importing = threading.Thread(target=__import__, args=("structlog",))
importing.start()
assert begun.wait(30)
saying = threading.Thread(target=Logger("groupstate.test").warning, args=("something happened",))
saying.start()
saying.join(0.3)
go_on.set()
saying.join(30)
importing.join(30)
assert not problems, problems
"""


def test_an_event_said_while_another_thread_imports_structlog_waits_for_it():
    done = subprocess.run([sys.executable, "-c", IMPORTED_ELSEWHERE], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "event='something happened' level='warning'\n")


# Configured here ----------------------------------------------------------------------------------------------


@pytest.fixture
def stream():
    yield io.StringIO()
    logs.unconfigure()


def test_asked_for_as_json_each_event_is_one_object(stream):
    logs.configure(json=True, stream=stream)

    log.info("something happened", group="g7", reasons=("stale",))
    log.warning("odd", value={1})

    first, second = map(json.loads, stream.getvalue().splitlines())
    assert (first["event"], first["group"], first["reasons"]) == ("something happened", "g7", ["stale"])
    assert (first["level"], first["logger"], first["timestamp"][-1]) == ("info", "groupstate.test", "Z")
    assert (second["event"], second["level"]) == ("odd", "warning")


def test_asked_for_as_text_it_is_a_line_with_time_and_logger(stream):
    logs.configure(stream=stream)

    log.info("something happened", group="g7")

    assert "groupstate.test event='something happened' group='g7'" in stream.getvalue()


def test_asked_again_the_latest_holds_and_nothing_is_shown_twice(stream, caplog):
    before = io.StringIO()
    logs.configure(json=True, stream=before)
    logs.configure(level="warning", stream=stream)

    log.info("quiet")
    log.warning("loud")

    assert (len(stream.getvalue().splitlines()), before.getvalue()) == (1, "")
    assert caplog.records == []
    logs.unconfigure()
    logs.unconfigure()
    log.warning("after")
    assert len(stream.getvalue().splitlines()) == 1


def test_a_level_that_is_none_is_refused():
    with pytest.raises(ValueError, match="level is 'loud'; it must be one of info, warning, error"):
        logs.configure(level="loud")


@pytest.mark.parametrize(
    ("value", "json", "level"),
    [
        ("info", False, "INFO"),
        ("json", True, "INFO"),
        ("JSON, warning", True, "WARNING"),
        ("error,text", False, "ERROR"),
    ],
)
def test_the_environment_says_level_and_form(stream, value, json, level):
    logs.configure_by(value)

    assert (logs._as_json, logging.getLevelName(logging.getLogger("groupstate").level)) == (json, level)


@pytest.mark.parametrize("value", ["loud", "info,error", "json,text"])
def test_an_environment_that_is_not_understood_is_told(caplog, value):
    logs.configure_by(value)

    (record,) = caplog.records
    assert "the environment's log setting isn't understood" in record.getMessage()
    assert logs._shown is None


def test_an_empty_environment_changes_nothing(caplog):
    logs.configure_by("")

    assert (logs._shown, caplog.records) == (None, [])


def test_the_environment_holds_from_the_import_on():
    code = "import groupstate.logs as logs; logs.Logger('groupstate.x').info('heard', group='g')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "GROUPSTATE_LOG": "json"},
        capture_output=True,
        text=True,
        check=True,
    )

    assert json.loads(done.stderr)["event"] == "heard"
