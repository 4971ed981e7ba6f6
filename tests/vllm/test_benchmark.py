"""The benchmark that needs vLLM, at a tiny size. Its numbers say nothing here, so no bound is checked."""

from pathlib import Path

from benchmarks import sessions


async def test_sessions_are_measured_beside_vllms_own_generate(tmp_path: Path) -> None:
    results = await sessions.measure_vllm(tmp_path, repetitions={8: 2, 16: 3}, tokens=4)

    assert [result.name for result in results] == [
        f"processor time of {count} sessions of 4 tokens at once, engine vllm" for count in (8, 16)
    ]
    assert all("this process alone" in str(result) for result in results)
