"""Logging: quiet until it is asked for, and through structlog where the program has configured it."""

import logging

import pytest
import structlog

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
