"""What an engine does before its first request."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from engine.harness import Harness
from engine.models import plain
from engine.suite import limited, prompt

from mmtp_jax.config import ConfigError
from mmtp_jax.engine import device
from mmtp_jax.engine.buckets import Bucket
from mmtp_jax.engine.plan import StepPlan
from mmtp_jax.engine.state import EngineState
from mmtp_jax.engine.warm_up import call_programs


def test_no_room_for_the_caches_is_known_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    made = device.initial_state
    fault = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate")
    faults = [fault]

    def first_fails(*args: Any, **kwargs: Any) -> EngineState:
        if faults:
            raise faults.pop()
        return made(*args, **kwargs)

    monkeypatch.setattr(device, "initial_state", first_fails)
    with pytest.raises(ConfigError, match=r"no room for \d+ bytes of caches .*memory_fraction"):
        Harness(plain())


def test_other_faults_of_the_device_keep_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise jax.errors.JaxRuntimeError("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS")

    monkeypatch.setattr(device, "initial_state", fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="ILLEGAL_ADDRESS"):
        Harness(plain())


def test_every_program_can_be_called_without_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Harness(plain())
    text = made.generate(prompt(5), limited(6))
    called: list[Bucket] = []
    step = made.core.device.step

    def counted(bucket: Bucket, plan: StepPlan) -> Any:
        called.append(bucket)
        return step(bucket, plan)

    monkeypatch.setattr(made.core.device, "step", counted)
    call_programs(made.core.device, made.core.device.programs.buckets)
    assert called == list(made.core.device.programs.buckets)
    monkeypatch.undo()
    made.reset()
    assert made.generate(prompt(5), limited(6)) == text
