"""Run by hand on a GPU: what a call of a step costs the host, and whether the device waits for it.

A CUDA graph holds the addresses of its buffers, and XLA updates it when one has changed. So the
same program is called again and again, in turns with another one, with a new plan each time, and
after requests entered. No request takes part: the rows of all steps are padding.

    python tests/bench/dispatch_cost.py --num-speculative-tokens 4 --rows 320 640
    XLA_FLAGS=--xla_gpu_command_buffer_update_mode=SKIP_TEMP python tests/bench/dispatch_cost.py
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT)]

from mmtp_jax.config import CacheConfig, EngineConfig, SpeculativeConfig  # noqa: E402
from mmtp_jax.engine.core import EngineCore  # noqa: E402
from mmtp_jax.engine.plan import StepPlan  # noqa: E402
from mmtp_jax.engine.state import EngineState  # noqa: E402
from mmtp_jax.loader import load_model  # noqa: E402
from mmtp_jax.weights.resolve import DEFAULT_MODEL  # noqa: E402
from pallas_kernels.bench.output import run_of, show, write_facts  # noqa: E402

WARM_UP = 32
STEPS = 64
ROUNDS = 5
# Calls that may be ahead of the device, as in the engine.
AHEAD = 2

# (state, number) -> (state, output): one step, and what belongs to it.
Step = Callable[[EngineState, int], tuple[EngineState, Any]]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="auto")
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--rows", type=int, nargs=2, default=[320, 640], help="of two programs")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--num-pages", type=int, default=4096)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def engine(args: argparse.Namespace) -> EngineCore:
    config = EngineConfig(
        model=args.model,
        load_format=args.load_format,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=max(args.rows),
        cache=CacheConfig(num_pages=args.num_pages),
        speculative=SpeculativeConfig(
            num_speculative_tokens=args.num_speculative_tokens, load_format=args.load_format
        ),
    )
    loaded = load_model(config)
    return EngineCore(
        loaded.config,
        loaded.graph,
        loaded.params,
        max_model_len=loaded.max_model_len,
        row_counts=tuple(args.rows),
    )


def patterns(core: EngineCore) -> dict[str, Step]:
    programs, params = core.device.programs, core.params
    small, large = programs.buckets
    empty = {
        bucket: StepPlan.pack(bucket, programs.abstract_state.num_slots)
        for bucket in (small, large)
    }
    there = {bucket: programs.upload(plan) for bucket, plan in empty.items()}

    def again(state: EngineState, _: int) -> Any:
        return programs.step(small)(params, state, there[small])

    def in_turns(state: EngineState, number: int) -> Any:
        bucket = (small, large)[number % 2]
        return programs.step(bucket)(params, state, there[bucket])

    def new_plan(state: EngineState, _: int) -> Any:
        return programs.step(small)(params, state, programs.upload(empty[small]))

    def after_admission(state: EngineState, _: int) -> Any:
        state = programs.admit(state, programs.empty_admission())
        return programs.step(small)(params, state, there[small])

    return {
        f"{small.num_rows} rows": again,
        f"{small.num_rows} and {large.num_rows} rows in turns": in_turns,
        f"{small.num_rows} rows, a new plan each": new_plan,
        f"{small.num_rows} rows, an admission before each": after_admission,
    }


def measure(state: EngineState, step: Step) -> tuple[EngineState, float, float]:
    """The state, and medians over rounds: milliseconds of a call, and per step."""
    calls, steps = [], []
    for count in (WARM_UP, *[STEPS] * ROUNDS):
        outputs: list[Any] = []
        called = 0.0
        begin = time.perf_counter()
        for number in range(count):
            start = time.perf_counter()
            state, output = step(state, number)
            output.packed.copy_to_host_async()
            called += time.perf_counter() - start
            outputs.append(output.packed)
            if len(outputs) > AHEAD:
                outputs.pop(0).block_until_ready()
        jax.block_until_ready(state)
        calls.append(1e3 * called / count)
        steps.append(1e3 * (time.perf_counter() - begin) / count)
    return state, statistics.median(calls[1:]), statistics.median(steps[1:])


def main() -> None:
    args = arguments()
    core = engine(args)
    table = Table(title="milliseconds")
    for head in ("steps", "a call", "per step"):
        table.add_column(head)
    results = []
    state = core.device.state
    for name, step in patterns(core).items():
        state, call, whole = measure(state, step)
        results.append({"steps": name, "call_ms": round(call, 4), "step_ms": round(whole, 4)})
        table.add_row(name, f"{call:.3f}", f"{whole:.3f}")
    core.device.state = state
    show(table)
    facts = run_of("python tests/bench/dispatch_cost.py", sys.argv[1:])
    write_facts(args.json, facts | {"results": results})


if __name__ == "__main__":
    main()
