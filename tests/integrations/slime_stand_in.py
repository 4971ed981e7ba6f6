"""What slime publishes of itself, as far as a rollout function uses it, with a generation that tests write.

Read from slime's docs/en/get_started/customization.md (138eb42), slime/rollout/sglang_rollout.py (0044b40),
slime/rollout/base_types.py (2bdd8de) and slime/utils/types.py (0d234f3). slime isn't on PyPI and needs SGLang and
Megatron; `make test-stacks` runs the same function in miles, its fork, for real.
"""

import asyncio
import enum
import importlib
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import attrs
import pytest


class Status(enum.Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@attrs.define(kw_only=True)
class Sample:
    """slime's dataclass, without what concerns images, experts and teachers."""

    Status = Status

    group_index: int | None = None
    index: int | None = None
    prompt: str | list[dict[str, str]] = ""
    tokens: list[int] = attrs.field(factory=list)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = attrs.field(factory=list)
    rollout_log_probs: list[float] | None = None
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict[str, Any] = attrs.field(factory=dict)
    session_id: str | None = None

    def get_reward_value(self, args: Any) -> Any:
        return self.reward if not args.reward_key else self.reward[args.reward_key]  # type: ignore[index]

    def answers(self, *token_ids: int, reward: Any = None, status: Status = Status.COMPLETED) -> "Sample":
        """More of a response, as `generate_and_rm` leaves it."""
        self.tokens = [*(self.tokens or [1, 2]), *token_ids]
        self.response_length += len(token_ids)
        self.response += "".join(f"<{token_id}>" for token_id in token_ids)
        self.rollout_log_probs = [*(self.rollout_log_probs or []), *(-0.5 for _ in token_ids)]
        self.weight_versions = [*self.weight_versions, "1"]
        self.status, self.reward = status, reward
        return self


@attrs.define
class RolloutFnTrainOutput:
    samples: list[list[Any]]
    metrics: dict[str, Any] | None = None


class GenerateState:
    """One for all calls, as slime's singleton."""

    def __init__(self, args: Any) -> None:
        self.sampling_params = vars(args).setdefault(
            "_params", {"temperature": args.rollout_temperature, "max_new_tokens": 8}
        )
        self.group_sampling_seeds = list(range(100, 100 + args.n_samples_per_prompt))


@attrs.define
class DataSource:
    """Groups of samples, without end or so many."""

    n: int
    count: int | None = None
    given: int = 0

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        groups = []
        for _ in range(num_samples):
            if self.given == self.count:
                break
            first, self.given = self.given * self.n, self.given + 1
            groups.append(
                [
                    Sample(group_index=self.given - 1, index=first + place, prompt=f"ask {self.given - 1}", label="yes")
                    for place in range(self.n)
                ]
            )
        return groups


Generation = Callable[[Any, Sample, dict[str, Any]], Awaitable[Any]]


@attrs.define
class Slime:
    """The package, and one loop of its own in a thread."""

    generation: Generation
    loop: asyncio.AbstractEventLoop = attrs.field(init=False)
    evaluated: list[int] = attrs.field(factory=list)

    def start(self) -> threading.Thread:
        self.loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        thread.start()
        return thread

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    async def generate_and_rm(
        self, args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
    ) -> Any:
        assert not evaluation
        assert sample.status in (Status.PENDING, Status.ABORTED)
        return await self.generation(args, sample, sampling_params)

    def generate_rollout(self, args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
        assert evaluation
        self.evaluated.append(rollout_id)
        return SimpleNamespace(data={})

    def modules(self, package: str = "slime") -> dict[str, ModuleType]:
        parts = {
            "rollout.sglang_rollout": {
                "generate_and_rm": self.generate_and_rm,
                "generate_rollout": self.generate_rollout,
                "GenerateState": GenerateState,
            },
            "rollout.base_types": {"RolloutFnTrainOutput": RolloutFnTrainOutput},
            "utils.async_utils": {"run": self.run},
            "utils.misc": {"load_function": load_function},
        }
        found = {f"{package}{part}": ModuleType(f"{package}{part}") for part in ("", ".rollout", ".utils")}
        for name, values in parts.items():
            module = found[f"{package}.{name}"] = ModuleType(f"{package}.{name}")
            vars(module).update(values)
        return found


def load_function(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def arguments(**changes: Any) -> Any:
    """slime's options, at their defaults."""
    return SimpleNamespace(
        **{
            "rollout_batch_size": 2,
            "n_samples_per_prompt": 2,
            "rollout_temperature": 1.0,
            "over_sampling_batch_size": 2,
            "dynamic_sampling_filter_path": None,
            "rollout_sample_filter_path": None,
            "rollout_all_samples_process_path": None,
            "reward_key": None,
            "group_rm": False,
            "colocate": False,
            "partial_rollout": False,
            **changes,
        }
    )


async def by_place(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """An answer of one token, worth 1 for the first of its group and 0 for the others."""
    assert sample.index is not None
    return sample.answers(7, reward=float(sample.index % args.n_samples_per_prompt == 0))


def installed(generation: Generation, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slime]:
    """The package in sys.modules, with its loop running."""
    made = Slime(generation)
    thread = made.start()
    for name, module in made.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    yield made
    made.loop.call_soon_threadsafe(made.loop.stop)
    thread.join()
    made.loop.close()
