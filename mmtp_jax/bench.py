"""`python -m mmtp_jax.bench latency`: milliseconds per step and tokens per second, offline.

A fixed batch decodes a fixed number of tokens. The engine figure is wall time per step once the
whole batch decodes; the bare figure dispatches the same compiled program back to back without the
engine. Medians; the first steps are warm-up. Ids in, ids out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mmtp_jax.arguments import Parser, add_model_options, one_line, option
from mmtp_jax.config import CacheConfig, ConfigError, EngineConfig, SpeculativeConfig, require
from mmtp_jax.engine.core import EngineCore
from mmtp_jax.engine.programs import empty_plan
from mmtp_jax.loader import LoadedModel, load_model
from mmtp_jax.sampling.params import SamplingParams
from mmtp_jax.weights.errors import ModelError

WARM_UP_STEPS = 8


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One batch size: engine and bare milliseconds per step, and emitted tokens per second."""

    batch: int
    num_speculative_tokens: int
    engine_ms_per_step: float
    bare_ms_per_step: float
    tokens_per_second: float
    tokens_per_step: float
    rows: int


def measure(loaded: LoadedModel, core: EngineCore, batch: int, steps: int, prompt_len: int) -> Any:
    """Decode `batch` requests for `steps` steps after warm-up."""
    rng = np.random.default_rng(batch)
    params = SamplingParams(
        temperature=0.0,
        max_tokens=None,
        ignore_eos=True,
    )
    vocab = loaded.graph.config.vocab_size
    for index in range(batch):
        prompt = rng.integers(vocab, size=prompt_len).tolist()
        core.add(f"{batch}-{index}", prompt, params, seed=index)
    while core.scheduler.waiting or any(r.prefilling for r in core.scheduler.running):
        core.step()
    for _ in range(WARM_UP_STEPS):
        core.step()
    times, emitted = [], 0
    start = time.perf_counter()
    for _ in range(steps):
        begin = time.perf_counter()
        emitted += sum(len(delta.token_ids) for delta in core.step())
        times.append(time.perf_counter() - begin)
    elapsed = time.perf_counter() - start
    _require_running(core, batch)
    size = next(
        size for size in core.programs.buckets if size >= batch * (core.num_speculative_tokens + 1)
    )
    bare = bare_step(core, size, batch, steps)
    require(
        not np.asarray(core.state.done)[[r.slot for r in core.scheduler.running]].any(),
        "requests reached max_model_len while the bare step was timed: raise --max-model-len",
    )
    for index in range(batch):
        core.finish(f"{batch}-{index}")
    while core.has_work:
        core.step()
    return Measurement(
        batch=batch,
        num_speculative_tokens=core.num_speculative_tokens,
        engine_ms_per_step=1e3 * statistics.median(times),
        bare_ms_per_step=bare,
        tokens_per_second=emitted / elapsed,
        tokens_per_step=emitted / steps / batch,
        rows=size,
    )


def _require_running(core: EngineCore, batch: int) -> None:
    require(
        len(core.scheduler.running) == batch,
        "requests reached max_model_len or were preempted: raise --max-model-len or the cache",
    )


def bare_step(core: EngineCore, num_rows: int, batch: int, steps: int) -> float:
    """Milliseconds per step of the compiled program alone, dispatched back to back.

    It runs on the requests the engine holds: their state advances, so they are useless afterwards.
    """
    plan = empty_plan(core.programs.buckets[num_rows], core.config.max_num_seqs)
    for index, request in enumerate(core.scheduler.running[:batch]):
        assert request.tables is not None
        plan.slot[index] = request.slot
        plan.rows[index] = core.num_speculative_tokens + 1
        plan.capacity[index] = core.cache.capacity(request.tables)
    plan = jax.device_put(plan)
    program = core.programs.step(num_rows)
    rounds = []
    for _ in range(3):
        jax.block_until_ready(core.state.length)
        begin = time.perf_counter()
        for _ in range(steps):
            core.state, output = program(core.params, core.state, plan)
        jax.block_until_ready(output)
        rounds.append(1e3 * (time.perf_counter() - begin) / steps)
    return statistics.median(rounds)


def latency(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all batch sizes with and without speculation; returns what is written as JSON."""
    results, startup = [], {}
    for k in arguments.num_speculative_tokens:
        begin = time.perf_counter()
        batch = max(arguments.batch)
        rows = max(batch * (k + 1), 256)
        config = EngineConfig(
            model=arguments.model,
            dtype=arguments.dtype,
            seed=arguments.seed,
            load_format=arguments.load_format,
            hf_overrides=arguments.hf_overrides,
            tensor_parallel_size=arguments.tensor_parallel_size,
            max_model_len=arguments.max_model_len,
            max_num_seqs=batch,
            max_num_batched_tokens=rows,
            cache=CacheConfig(enable_prefix_caching=False),
            speculative=SpeculativeConfig(num_speculative_tokens=k, load_format="dummy"),
        )
        loaded = load_model(config)
        loaded_at = time.perf_counter()
        core = EngineCore(
            loaded.config, loaded.graph, loaded.params, max_model_len=loaded.max_model_len
        )
        startup[f"k={k}"] = {
            "load_s": round(loaded_at - begin, 2),
            "compile_s": round(time.perf_counter() - loaded_at, 2),
            "programs": core.programs.num_programs,
        }
        for batch in arguments.batch:
            result = measure(loaded, core, batch, arguments.steps, arguments.prompt_len)
            results.append(dataclasses.asdict(result))
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
        del core, loaded
    device = jax.devices()[0]
    return {
        "command": "python -m mmtp_jax.bench " + " ".join(sys.argv[1:]),
        "commit": _commit(),
        "device": device.device_kind,
        "platform": platform.platform(),
        "jax": jax.__version__,
        "startup": startup,
        "results": results,
    }


def _commit() -> str | None:
    root = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--verify", "HEAD"], cwd=root, capture_output=True, text=True
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code: 0, or 2 for what the user can correct."""
    arguments = _parser().parse_args(argv)
    try:
        report = latency(arguments)
    except (ModelError, ConfigError) as error:
        print(one_line(error), file=sys.stderr)
        return 2
    text = json.dumps(report, indent=1)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    prog = "python -m mmtp_jax.bench"
    parser = Parser(prog, "Measure the engine.")
    commands = parser.add_subparsers(prog=prog, dest="command", required=True, metavar="COMMAND")
    text = "milliseconds per step and tokens per second of batches that decode, as JSON"
    one = commands.add_parser("latency", help=text, description=text)
    add_model_options(one)
    group = one.add_argument_group("measurement")
    several: dict[str, Any] = {"type": int, "nargs": "+"}
    option(group, "--batch", **several, default=[1, 8, 64], help="requests decoding at once")
    help = "one engine each; random modules where the checkpoint ships none"
    option(group, "--num-speculative-tokens", **several, default=[0, 8], help=help)
    option(group, "--prompt-len", type=int, default=100, help="random token ids per prompt")
    help = f"timed steps, after {WARM_UP_STEPS} of warm-up"
    option(group, "--steps", type=int, default=64, help=help)
    option(group, "--max-model-len", type=int, default=1024, help="positions per request")
    option(group, "--json", type=Path, metavar="FILE", help="write the results here too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
