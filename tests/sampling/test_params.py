"""SamplingParams: what is accepted, normalised and refused, and with which words."""

import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError

import numpy as np
import pytest

from mmtp_jax.config import ConfigError
from mmtp_jax.sampling.params import MAX_STOP_IDS, SamplingParams

INVALID = [
    ("n", 0, "[1, 128]"),
    ("n", 129, "[1, 128]"),
    ("n", True, "integer"),
    ("n", 1.0, "integer"),
    ("temperature", -0.1, "[0, 1e+06]"),
    ("temperature", float("nan"), "[0, 1e+06]"),
    ("temperature", float("inf"), "[0, 1e+06]"),
    ("temperature", "hot", "number"),
    ("temperature", True, "number"),
    ("temperature", None, "number"),
    ("top_k", -2, "[-1,"),
    ("top_k", 0.5, "integer"),
    ("top_k", 2**31, "[-1,"),
    ("top_p", 0.0, "(0, 1]"),
    ("top_p", 1.01, "[0, 1]"),
    ("top_p", float("nan"), "[0, 1]"),
    ("min_p", -0.01, "[0, 1]"),
    ("min_p", 1.5, "[0, 1]"),
    ("seed", 2**64, "integer"),
    ("seed", "7", "integer"),
    ("seed", False, "integer"),
    ("max_tokens", 0, "[1,"),
    ("max_tokens", 10**400, "[1,"),
    ("min_tokens", -1, "[0,"),
    ("min_tokens", 17, "<= max_tokens (16)"),
    ("stop", "", "non-empty"),
    ("stop", ["a", ""], "non-empty"),
    ("stop", [1], "strings"),
    ("stop", 5, "string"),
    ("stop_token_ids", [-1], "[0,"),
    ("stop_token_ids", "12", "list"),
    ("stop_token_ids", 12, "list"),
    ("stop_token_ids", range(MAX_STOP_IDS + 1), "at most 16"),
    ("include_stop_str_in_output", 1, "true or false"),
    ("ignore_eos", None, "true or false"),
    ("skip_special_tokens", "no", "true or false"),
    ("logprobs", 21, "[0, 20]"),
    ("logprobs", -1, "[0, 20]"),
    ("logprobs", True, "integer"),
    ("presence_penalty", 2.1, "[-2, 2]"),
    ("presence_penalty", float("nan"), "[-2, 2]"),
    ("frequency_penalty", -2.1, "[-2, 2]"),
    ("frequency_penalty", [1], "number"),
    ("repetition_penalty", 0.0, "[1e-06, 1e+06]"),
    ("repetition_penalty", -1.0, "[1e-06, 1e+06]"),
    ("repetition_penalty", float("inf"), "[1e-06, 1e+06]"),
    ("logit_bias", {3: 101.0}, "[-100, 100]"),
    ("logit_bias", {3: float("nan")}, "[-100, 100]"),
    ("logit_bias", {"3": 1.0}, "integer"),
    ("logit_bias", {-1: 1.0}, "[0,"),
    ("logit_bias", [1.0], "map"),
    ("allowed_token_ids", [], "at least one"),
    ("allowed_token_ids", [1.5], "integer"),
    ("banned_token_ids", None, "list"),
    ("banned_token_ids", [True], "integer"),
]


@pytest.mark.parametrize(("name", "value", "limit"), INVALID)
def test_invalid_values_name_the_field_and_the_limit(name: str, value: object, limit: str) -> None:
    with pytest.raises(ConfigError) as error:
        SamplingParams(**{name: value})
    assert str(error.value).startswith(name)
    assert limit in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 128),
        ("temperature", 0),
        ("temperature", np.float32(0.5)),
        ("top_k", -1),
        ("top_k", np.int64(5)),
        ("top_p", 1),
        ("min_p", 1.0),
        ("seed", -1),
        ("seed", 2**64 - 1),
        ("max_tokens", None),
        ("logprobs", 0),
        ("logprobs", 20),
        ("presence_penalty", -2),
        ("repetition_penalty", 0.5),
        ("logit_bias", {0: -100, 5: 100}),
        ("stop", ["a", "b"]),
    ],
)
def test_values_at_the_limits_are_accepted(name: str, value: object) -> None:
    SamplingParams(**{name: value})


def test_sequences_become_tuples_and_numbers_plain() -> None:
    params = SamplingParams(
        stop="end",
        stop_token_ids=[1, np.int32(2)],
        banned_token_ids=[3],
        allowed_token_ids=[4],
        logit_bias={np.int64(5): 1},
        temperature=1,
    )
    assert params.stop == ("end",)
    assert params.stop_token_ids == (1, 2)
    assert params.banned_token_ids == (3,)
    assert params.allowed_token_ids == (4,)
    assert params.logit_bias == {5: 1.0}
    assert [type(value) for value in params.stop_token_ids] == [int, int]
    assert type(params.temperature) is float
    assert SamplingParams().stop == ()
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_params_are_immutable_and_survive_pickling() -> None:
    params = SamplingParams(stop=["x"], logit_bias={1: 2.0}, seed=3)
    with pytest.raises(FrozenInstanceError):
        params.n = 2  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(params)) == params


def test_the_caller_cannot_change_the_bias_afterwards() -> None:
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 1000.0
    assert params.logit_bias == {1: 2.0}


def test_small_temperatures_are_greedy() -> None:
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=9e-6).greedy
    assert not SamplingParams(temperature=1e-5).greedy


def test_stop_ids_join_those_of_the_model_once() -> None:
    assert SamplingParams(stop_token_ids=[5, 2]).stop_ids([2, 3]) == (5, 2, 3)
    assert SamplingParams(stop_token_ids=[5, 2], ignore_eos=True).stop_ids([2, 3]) == (5, 2)
    full = SamplingParams(stop_token_ids=range(MAX_STOP_IDS))
    assert len(full.stop_ids([0])) == MAX_STOP_IDS
    with pytest.raises(ConfigError, match="stop_token_ids must hold at most 16"):
        full.stop_ids([99])


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "banned_token_ids"])
def test_token_ids_must_lie_in_the_vocabulary(name: str) -> None:
    SamplingParams(**{name: [9]}).validate_for(10)
    with pytest.raises(ConfigError, match=rf"{name} must be in \[0, 9\], got 10"):
        SamplingParams(**{name: [10]}).validate_for(10)
    with pytest.raises(ConfigError, match="logit_bias"):
        SamplingParams(logit_bias={10: 1.0}).validate_for(10)


@pytest.mark.parametrize(
    ("params", "name"),
    [
        (SamplingParams(banned_token_ids=range(4)), "banned_token_ids"),
        (SamplingParams(banned_token_ids=[1, 1], allowed_token_ids=[1, 1]), "banned_token_ids"),
        (SamplingParams(allowed_token_ids=[2, 3], stop_token_ids=[2], min_tokens=1), "min_tokens"),
        (SamplingParams(banned_token_ids=range(3), min_tokens=1), "min_tokens"),
    ],
)
def test_something_must_be_left_to_choose(params: SamplingParams, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must leave at least one token"):
        params.validate_for(4, eos_token_ids=[3])


def test_repeated_ids_do_not_count_twice() -> None:
    SamplingParams(banned_token_ids=[0, 0, 1, 1]).validate_for(3)
    SamplingParams(allowed_token_ids=[3], stop_token_ids=[2], min_tokens=0).validate_for(4, [3])


def test_importing_the_parameters_does_not_import_jax() -> None:
    code = "import sys, mmtp_jax.sampling.params; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
