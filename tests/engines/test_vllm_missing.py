"""The vLLM engine where vLLM isn't installed."""

import subprocess
import sys

WITHOUT = "import sys; sys.modules['vllm'] = None; import groupstate.engines.vllm"


def test_without_vllm_it_says_what_to_install() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=60)

    assert "the engine 'vllm' needs vllm; install the extra 'vllm' of groupstate" in done.stderr
