"""Steps before there is any request: none is a program's first, and what they take is known."""

from __future__ import annotations

import time

from mmtp_jax.adaptive.costs import Program
from mmtp_jax.engine.buckets import Bucket
from mmtp_jax.engine.device import Device

# Steps of a program that are timed together, after as many that are not; fewer where they are slow.
STEPS = 16
ENOUGH_SECONDS = 0.05


def call_programs(device: Device, buckets: tuple[Bucket, ...]) -> None:
    """Run every program once, so that no request waits for what a first call takes: kernels are
    loaded, and graphs made of them."""
    for bucket in buckets:
        _run(device, bucket, 1)


def time_programs(device: Device, buckets: tuple[Bucket, ...]) -> dict[Program, float]:
    """Seconds of a step of every program."""
    return {bucket.program: _time(device, bucket) for bucket in buckets}


def _time(device: Device, bucket: Bucket) -> float:
    first = _run(device, bucket, 1)  # a program's first call takes longer
    steps = max(1, min(STEPS, int(ENOUGH_SECONDS / first)))
    return min(_run(device, bucket, steps) for _ in range(2))


def _run(device: Device, bucket: Bucket, steps: int) -> float:
    """Seconds per step of so many one after the other, the plan already there. No request takes
    part: nothing is written to any."""
    plan = device.upload(bucket, ())
    begin = time.perf_counter()
    outputs = [device.step(bucket, plan) for _ in range(steps)]
    outputs[-1].result().packed.block_until_ready()
    return (time.perf_counter() - begin) / steps
