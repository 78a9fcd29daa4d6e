"""Two devices give the tokens of one: heads, MLPs, vocabulary and experts are split."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

GOLDENS = Path(__file__).parent / "goldens"

PROGRAM = """
import json, sys
from mmtp_jax import LLM, SamplingParams
directory, prompt, count = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
llm = LLM(directory, dtype="float32", progress=False, max_num_seqs=2, max_num_batched_tokens=32,
          row_multiple=32, page_size=4, num_pages=65, tensor_parallel_size=2)
params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
(output,) = llm.generate([prompt], params)
split = [not value.sharding.is_fully_replicated for value in llm.core.device.params]
pages = [not array.sharding.is_fully_replicated
         for group in llm.core.device.state.pages for array in group.values()]
print(json.dumps([list(output.outputs[0].token_ids), any(split), any(pages)]))
llm.close()
"""


# Inkling has all that llama has.
@pytest.mark.parametrize("name", ["llama", pytest.param("inkling", marks=pytest.mark.slow)])
def test_two_devices_give_the_same_tokens(name: str) -> None:
    golden = np.load(GOLDENS / name / "golden.npz")
    prompt, continuation = golden["prompt"].tolist(), golden["continuation"].tolist()
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, GOLDENS / name, json.dumps(prompt), str(len(continuation))],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[2],
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1]) == [continuation, True, True]
