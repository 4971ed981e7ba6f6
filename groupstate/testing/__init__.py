"""What tests of groupstate, and of what is made for it, are written with. Needs the extra `testing`, but for the first
three.

`notation`: a history in a few short lines, driven through the real ledger and replayed after every event.
`invariants`: `assert_invariants`, for a log or a run's folder.
`plain`: the rules once more, as a reader of their page would carry them out by hand.
`strategies`: hypothesis strategies for rules, outcomes, events, histories and interleavings.
`machine`: `GroupMachine`, which has hypothesis drive a run under rules of your own.
`contracts`: the tests that an engine, a log, a payload store or a rule of your own has to pass.
`fixtures`: a pytest plugin for virtual time and scripted engines.

Rule: importing this brings in neither hypothesis nor pytest; a name is imported when it is asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from groupstate.engines.scripted import ScriptedEngine
    from groupstate.simulate.loop import Deadlock, VirtualLoop, run_virtual
    from groupstate.testing import strategies
    from groupstate.testing.contracts import (
        EngineContract,
        EngineKind,
        EvictionContract,
        LogContract,
        PayloadStoreContract,
        SelectionContract,
    )
    from groupstate.testing.invariants import InvariantBroken, assert_invariants
    from groupstate.testing.machine import GroupMachine
    from groupstate.testing.notation import Story, play
    from groupstate.testing.twin import BrokenStory, Twin
    from groupstate.testing.watched import Asked

_WHERE: Final = {
    "Asked": "groupstate.testing.watched",
    "BrokenStory": "groupstate.testing.twin",
    "Deadlock": "groupstate.simulate.loop",
    "EngineContract": "groupstate.testing.contracts",
    "EngineKind": "groupstate.testing.contracts",
    "EvictionContract": "groupstate.testing.contracts",
    "GroupMachine": "groupstate.testing.machine",
    "InvariantBroken": "groupstate.testing.invariants",
    "LogContract": "groupstate.testing.contracts",
    "PayloadStoreContract": "groupstate.testing.contracts",
    "ScriptedEngine": "groupstate.engines.scripted",
    "SelectionContract": "groupstate.testing.contracts",
    "Story": "groupstate.testing.notation",
    "Twin": "groupstate.testing.twin",
    "VirtualLoop": "groupstate.simulate.loop",
    "assert_invariants": "groupstate.testing.invariants",
    "play": "groupstate.testing.notation",
    "run_virtual": "groupstate.simulate.loop",
    "strategies": "groupstate.testing",
}

__all__ = [
    "Asked",
    "BrokenStory",
    "Deadlock",
    "EngineContract",
    "EngineKind",
    "EvictionContract",
    "GroupMachine",
    "InvariantBroken",
    "LogContract",
    "PayloadStoreContract",
    "ScriptedEngine",
    "SelectionContract",
    "Story",
    "Twin",
    "VirtualLoop",
    "assert_invariants",
    "play",
    "run_virtual",
    "strategies",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "strategies":
        return importlib.import_module("groupstate.testing.strategies")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
