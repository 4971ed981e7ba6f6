"""vLLM's process doesn't outlive the one that started it."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

START_S = 600.0
GONE_S = 60.0
"""On a very busy machine; some twenty seconds and at once otherwise."""

OWNER = """
import asyncio, sys
from pathlib import Path
from tests.vllm.engines import start

async def main():
    engine = await start(Path(sys.argv[1]), skip_tokenizer_init=True)
    print(*(process.pid for process in engine.llm.engine_core.resources.engine_manager.processes), flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.timeout(START_S + GONE_S)
def test_vllm_ends_with_a_process_that_is_killed(models: Path, tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    root = Path(__file__).parents[2]
    command = [sys.executable, script, models / "v0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(root)}) as owner:
        assert owner.stdout is not None
        assert select.select([owner.stdout], [], [], START_S)[0]
        handles = [os.pidfd_open(int(pid)) for pid in owner.stdout.readline().split()]
        owner.send_signal(signal.SIGKILL)

    assert len(handles) == 1
    assert select.select(handles, [], [], GONE_S)[0] == handles
