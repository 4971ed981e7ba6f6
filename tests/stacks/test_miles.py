"""miles' own data source, generation, rewards and call of a rollout function, with the rollout function of groupstate.

miles' package imports what only a machine with GPUs has. Those modules are replaced here by what is used of them: a
name, a version, a test for LoRA. SGLang is a small server that answers in its form.
"""

import http.server
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from groupstate.core import events as ev
from groupstate.core.invariants import violations
from groupstate.log.reading import read_log

GPU_MODULES: dict[str, dict[str, Any]] = {
    "miles.backends.megatron_utils.lora_utils": {"LORA_ADAPTER_NAME": "lora", "is_lora_enabled": lambda args: False},
    "miles.utils.dumper_utils": {},
    "ray": {"remote": lambda **options: lambda kind: kind},
    "ray.util": {},
    "ray.util.scheduling_strategies": {"NodeAffinitySchedulingStrategy": None},
    "sglang_router": {"__version__": "0.3.0"},
}


class Sglang(http.server.ThreadingHTTPServer):
    """Answers each prompt with the number that was asked, or another one, in turns."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[list[int]] = []
        self.abort_first = False
        self.lock = threading.Lock()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Sglang

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append(asked["input_ids"])
            aborts = self.server.abort_first and len(self.server.asked) == 1
            token = asked["input_ids"][1] if len(self.server.asked) % 2 else 9
        answer = {
            "text": f"{token - 5} ",
            "meta_info": {
                "output_token_logprobs": [[-0.5, token, None]],
                "finish_reason": {"type": "abort" if aborts else "stop"},
                "weight_version": "1",
            },
        }
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


async def is_right(args: Any, sample: Any, **kwargs: Any) -> float:
    """What `--custom-rm-path` names."""
    return float(sample.response.split()[-1] == sample.label)


@pytest.fixture
def sglang() -> Iterator[Sglang]:
    server = Sglang()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="session")
def miles() -> SimpleNamespace:
    for name, values in GPU_MODULES.items():
        module = ModuleType(name)
        vars(module).update(values)
        sys.modules[name] = module
    from miles.rollout.base_types import call_rollout_fn
    from miles.rollout.data_source import RolloutDataSource
    from miles.utils.http_utils import init_http_client
    from miles.utils.misc import SingletonMeta, load_function

    return SimpleNamespace(
        call_rollout_fn=call_rollout_fn,
        RolloutDataSource=RolloutDataSource,
        init_http_client=init_http_client,
        SingletonMeta=SingletonMeta,
        load_function=load_function,
    )


@pytest.fixture
def args(sglang: Sglang, tokenizer_folder: Path, tmp_path: Path) -> Any:
    """miles' options, as its parser leaves them."""
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"ask {number} say", "label": str(number)} for number in range(8)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    host, port = sglang.server_address[:2]
    given = {
        "hf_checkpoint": str(tokenizer_folder), "prompt_data": str(prompts), "input_key": "prompt",
        "label_key": "label",
        "custom_rm_path": f"{__name__}.is_right", "sglang_router_ip": host, "sglang_router_port": port,
        "rollout_batch_size": 2, "n_samples_per_prompt": 2, "over_sampling_batch_size": 2, "rollout_seed": 1,
        "rollout_num_gpus": 1, "rollout_num_gpus_per_engine": 1, "sglang_server_concurrency": 8, "sglang_dp_size": 1,
        "rollout_temperature": 1.0, "rollout_top_p": 1.0, "rollout_top_k": -1, "rollout_max_response_len": 4,
        "rollout_global_dataset": True, "metadata_key": "metadata", "rollout_skip_special_tokens": True,
        "groupstate": {"path": str(tmp_path / "run"), "rules": {"lag_max": 1, "filter_metric": "reward"}},
    }  # fmt: skip
    off = (
        "ci_test", "use_rollout_routing_replay", "use_miles_router", "partial_rollout", "group_rm", "colocate",
        "mask_offpolicy_in_partial_rollout", "rollout_shuffle", "use_distributed_post",
        "apply_chat_template", "sglang_speculative_algorithm",
    )  # fmt: skip
    none = (
        "chat_template_path", "dump_details", "rollout_max_prompt_len", "multimodal_keys", "tool_key", "reward_key",
        "apply_chat_template_kwargs", "custom_generate_function_path", "dynamic_sampling_filter_path", "rollout_stop",
        "rollout_sample_filter_path", "rollout_all_samples_process_path", "rollout_stop_token_ids",
        "sglang_router_policy",
    )  # fmt: skip
    return SimpleNamespace(**{**dict.fromkeys(off, False), **dict.fromkeys(none), **given})


@pytest.fixture
def generate(miles: SimpleNamespace, args: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Calls the rollout function as miles does, found by its path."""
    monkeypatch.setattr(miles.SingletonMeta, "_instances", {})
    monkeypatch.setattr("miles.utils.http_utils._http_client", None)
    monkeypatch.setattr("groupstate.integrations.slime.ABORT_PAUSE_S", 0.0)
    miles.init_http_client(args)
    source = miles.RolloutDataSource(args)
    function = miles.load_function("groupstate.integrations.miles.generate_rollout")
    yield lambda rollout_id: miles.call_rollout_fn(function, args, rollout_id, source, evaluation=False)
    function.close()


def closed_log(folder: Path) -> list[Any]:
    from groupstate.integrations.miles import generate_rollout

    generate_rollout.close()
    records = list(read_log(folder / "run" / "start-1"))
    assert violations(records) == []
    return [record.event for record in records]


def test_miles_generates_and_groupstate_decides(generate: Any, tmp_path: Path) -> None:
    outputs = [generate(rollout_id) for rollout_id in range(3)]
    events = closed_log(tmp_path)

    for output in outputs:
        assert [len(group) for group in output.samples] == [2, 2]
        assert all({sample.reward for sample in group} == {0.0, 1.0} for group in output.samples)
    sampled = [event for event in events if isinstance(event, ev.BatchSampled)]
    assert [event.weight_version for event in sampled] == [0, 1, 2]
    assert [group_id for event in sampled for group_id in event.group_ids] == [
        str(group[0].group_index) for output in outputs for group in output.samples
    ]
    finished = [event for event in events if isinstance(event, ev.SessionFinished)]
    assert {event.trajectories[0].prompt_tokens for event in finished} == {3}


def test_a_sample_that_sglang_aborted_goes_on_from_its_tokens(generate: Any, sglang: Sglang, args: Any) -> None:
    del args.groupstate["rules"]  # In sync mode the batch is all that is asked for.
    sglang.abort_first = True
    generate(0)

    assert any(len(asked) == 4 and asked[:3] == sglang.asked[0] for asked in sglang.asked)
