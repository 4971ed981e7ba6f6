"""Puts `GroupMachine` to one planted fault and prints what it finds, as JSON.

python -m tests.planted.machine "fence ignored" 500
"""

import json
import sys
import time

import attrs
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from groupstate.testing import BrokenStory, GroupMachine
from tests.planted.faults import TEN
from tests.planted.tools import Found, Plant, planted


def found_by_machine(plant: Plant, most: int) -> Found | None:
    stories = 0

    class Counted(GroupMachine):
        def __init__(self) -> None:
            nonlocal stories
            super().__init__()
            stories += 1

    usual = settings(
        Counted.TestCase.settings,
        max_examples=most,
        stateful_step_count=30,
        phases=[Phase.generate],
        derandomize=True,
        database=None,
        deadline=None,
        print_blob=False,
    )
    began = time.process_time()
    with planted(plant):
        try:
            run_state_machine_as_test(Counted, settings=usual)
        except BrokenStory as broken:
            what = broken.what.partition("\n")[0]
            # It is played once more, to be shown.
            return Found(stories - 1, what, seconds=time.process_time() - began)
        except Exception as error:
            return Found(stories - 1, f"{type(error).__name__}: {error}", seconds=time.process_time() - began)
    return None


if __name__ == "__main__":
    found = found_by_machine(TEN[sys.argv[1]], int(sys.argv[2]))
    print(json.dumps(found and attrs.asdict(found)))
