"""The benchmark beside verl's own buffer, at a tiny size. Its numbers say nothing here, so no bound is checked."""

import os
from pathlib import Path
from typing import Any

from benchmarks import verl_buffer


async def test_the_drop_in_is_measured_beside_verls_own_buffer(transfer_queue: Any, tmp_path: Path) -> None:
    results = await verl_buffer.measure(tmp_path, counts=(20,), samples=1, wakes=1, rounds=2, batch=4)

    assert [set(result.spreads) for result in results] == [{"verl's own", "the drop-in"}] * 8
    assert os.listdir(tmp_path) == []
