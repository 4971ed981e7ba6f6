"""The demo's tasks: where they come from, and that none leaks."""

import os
import subprocess
import sys

import pytest

from groupstate.demo import tasks as tasks_module
from groupstate.demo.tasks import MissingTasks, Tasks, import_task_module, tokenizer


def sums(*, seed: int = 0, held_out_count: int = 50, digits: tuple[int, int] = (2, 2)) -> Tasks:
    return Tasks(seed=seed, held_out_count=held_out_count, terms=(2, 2), digits=digits)


def test_a_training_task_is_a_function_of_its_position() -> None:
    first, second = sums(), sums()

    assert [first.train(position) for position in (5, 0, 999)] == [second.train(position) for position in (5, 0, 999)]
    assert first.train(5).position == 5


def test_other_seeds_train_on_other_tasks_and_share_the_held_out_set() -> None:
    first, second = sums(seed=0), sums(seed=1)

    assert [first.train(at) for at in range(9)] != [second.train(at) for at in range(9)]
    assert first.held_out == second.held_out


def test_no_held_out_expression_is_ever_trained_on() -> None:
    # 200 expressions in all, so nearly every other training task has to be replaced.
    tasks = sums(held_out_count=100, digits=(1, 1))
    held_out = {task.expression for task in tasks.held_out}
    trained = {tasks.train(position).expression for position in range(3000)}

    assert len(held_out) == 100
    assert len(trained) == 100
    assert not held_out & trained


def test_the_verifier_gives_full_marks_to_the_right_answer_alone() -> None:
    tasks = sums()
    for task in tasks.held_out:
        assert tasks.reward(task, task.answer) == 1.0
        assert tasks.reward(task, str(int(task.answer) + 1)) == 0.0
        assert tasks.reward(task, "") == 0.0


def test_part_marks_of_the_verifier_earn_no_reward() -> None:
    tasks = sums()
    task = next(task for task in tasks.held_out if not task.answer.startswith("-"))

    assert 0.0 < tasks.score(task, f"-{task.answer}") < 1.0
    assert tasks.reward(task, f"-{task.answer}") == 0.0


def test_a_task_is_told_as_tokens() -> None:
    task = sums().train(0)

    assert task.prompt == task.expression.replace(" ", "") + "="
    assert task.prompt_ids == [tokenizer().bos_id, *tokenizer().encode(task.prompt)]
    assert tokenizer().decode(task.answer_ids) == task.answer
    assert task.answer_ids[-1] == tokenizer().eos_id


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks_module.PathFinder, "find_spec", lambda name, path=None: None)

    with pytest.raises(MissingTasks, match=r"pip install --no-deps reasoning-gym"):
        sums()


def test_a_module_that_is_not_there_leaves_nothing_behind() -> None:
    before = set(sys.modules)
    with pytest.raises(MissingTasks, match="no_such_task"):
        import_task_module("arithmetic", "no_such_task")

    assert not {name for name in set(sys.modules) - before if name.startswith("reasoning_gym")}


IMPORT_TWICE = """
import sys
from groupstate.demo.tasks import Tasks, import_task_module
for _ in range(2):
    Tasks(seed=0, held_out_count=1, terms=(2, 2), digits=(1, 1))
assert not [name for name in sys.modules if name.startswith("reasoning_gym")]
assert "torch" not in sys.modules

# A package that somebody imported before is used, and stays.
import types
package = types.ModuleType("reasoning_gym")
category = types.ModuleType("reasoning_gym.arithmetic")
sys.modules |= {"reasoning_gym": package, "reasoning_gym.arithmetic": category}
sys.modules["reasoning_gym.arithmetic.chain_sum"] = own = types.ModuleType("own")
assert import_task_module("arithmetic", "chain_sum") is own
assert sys.modules["reasoning_gym"] is package
"""


def test_no_hollow_package_stays_behind_and_a_real_one_is_left_alone() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    subprocess.run([sys.executable, "-c", IMPORT_TWICE], check=True, env=environment, timeout=60)
