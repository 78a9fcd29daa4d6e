"""The oracle's own parts against examples worked out by hand, and what its users rely on."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest
from engine.families import deepseek, glm, inkling, mimo_v2, repeated_glm, step
from engine.suite import prompt
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Oracle
from oracle_attention import by_distance, convolved, log_scale, softmax
from oracle_layers import mixture
from oracle_parameters import Parameters
from oracle_rotary import rotated

from mmtp_jax.models.model import model_graph, random_value
from mmtp_jax.models.rotary import rotate
from mmtp_jax.specs import LogScaling, ModelConfig, MoESpec, RopeConfig

FAMILIES = [inkling, mimo_v2, step, deepseek, glm]


def oracle(config: ModelConfig) -> Oracle:
    return Oracle(config, random_value(model_graph(config), 0, np.dtype(np.float32)))


def parameters(**values: object) -> Parameters:
    """Parameters by name, with "_" for "."."""
    named = {name.replace("_", "."): np.array(value) for name, value in values.items()}
    return Parameters(glm(), named.__getitem__)


@settings(max_examples=50)
@given(
    half=st.sampled_from([1, 4]),
    theta=st.floats(10.0, 1e6),
    interleaved=st.booleans(),
    scaling=st.sampled_from([None, "linear", "llama3", "yarn"]),
    factor=st.floats(1.0, 40.0),
    low=st.floats(0.5, 4.0),
    span=st.floats(0.5, 30.0),
    original=st.sampled_from([16, 100, 4096]),
    truncate=st.booleans(),
    attention_factor=st.floats(0.5, 2.0),
)
def test_rotation_is_that_of_the_models(
    half: int, low: float, span: float, original: int, **options: object
) -> None:
    rope = RopeConfig(
        2 * half,
        low_freq_factor=low,
        high_freq_factor=low + span,
        beta_slow=low,
        beta_fast=low + span,
        original_max_position=original,
        **options,
    )
    x = np.random.default_rng(half).standard_normal((20, 2, 2 * half + 2))
    got = rotate(jnp.asarray(x, jnp.float32), jnp.arange(20), rope)
    np.testing.assert_allclose(np.asarray(got), rotated(x, rope), atol=3e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_later_tokens_change_nothing(family: Callable[[], ModelConfig]) -> None:
    tokens = prompt(20)
    whole, part = oracle(family()).trace(tokens).first(12), oracle(family()).trace(tokens[:12])
    np.testing.assert_allclose(whole.logits, part.logits, atol=1e-12)
    assert len(whole.modules) == len(part.modules) > 1
    layers = zip(
        [*whole.layers, *(module.layer for module in whole.modules)],
        [*part.layers, *(module.layer for module in part.modules)],
        strict=True,
    )
    for one, other in layers:
        for streams, others in ((one.attention, other.attention), (one.conv, other.conv)):
            assert streams.keys() == others.keys()
            for name, stream in streams.items():
                np.testing.assert_allclose(stream, others[name], atol=1e-12)
    for one, other in zip(whole.modules, part.modules, strict=True):
        np.testing.assert_allclose(one.logits, other.logits, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_are_what_modules_say_of_the_known_text(family: Callable[[], ModelConfig]) -> None:
    """Once drafts are known tokens, the rows they came from are ordinary rows."""
    model, known = oracle(family()), prompt(9)
    for number, draft in enumerate(model.drafts(known)):
        logits = model.trace(known).modules[number].logits[7]
        np.testing.assert_allclose(model.draft_logits(known, number), logits, atol=1e-12)
        assert draft == np.argmax(logits)
        known.append(draft)


def test_a_repeated_module_begins_as_a_module_and_ends_elsewhere() -> None:
    """Its first draft is that of the module; later rows are fed with its own output instead of the
    target's hidden state."""
    known = prompt(9)
    lone, repeated = oracle(repeated_glm(1)), oracle(repeated_glm(4))
    drafts = repeated.drafts(known)
    assert len(drafts) == 4 and drafts[:1] == lone.drafts(known)
    fed_by_itself = repeated.draft_logits([*known, drafts[0]], 1)
    fed_by_target = lone.draft_logits([*known, drafts[0]], 0)
    assert np.abs(fed_by_itself - fed_by_target).max() > 1e-2


def test_convolution() -> None:
    x = np.array([[1.0], [2.0], [3.0]])
    y = convolved(parameters(conv_taps=[[1000.0], [100.0], [10.0]]), "conv", x)
    assert y[:, 0].tolist() == [1 + 10, 2 + 20 + 100, 3 + 30 + 200 + 1000]


def test_bias_by_distance() -> None:
    bias = by_distance(np.full((3, 1, 1), 2.0), np.array([[5.0, 7.0]]))
    assert bias.tolist() == [[[10, 0, 0], [14, 10, 0], [0, 14, 10]]]


def test_softmax_with_a_window_and_a_sink() -> None:
    weights = softmax(np.zeros((1, 3, 3)), 2, np.array([np.log(2.0)]))
    np.testing.assert_allclose(weights[0], [[1 / 3, 0, 0], [1 / 4, 1 / 4, 0], [0, 1 / 4, 1 / 4]])


def test_log_scaling_begins_at_its_floor() -> None:
    scale = log_scale(LogScaling(4, alpha=0.5), np.array([0, 3, 7]))
    np.testing.assert_allclose(scale, [1, 1, 1 + 0.5 * np.log(2)])


def test_mixture() -> None:
    """Scores 1/2, 1/3, 1/4, 1/5 and a sink of 1/2; expert e says e + 1 and the sink says 10."""
    score = np.array([[1 / 2, 1 / 3, 1 / 4, 1 / 5, 1 / 2]])
    opened = 1 / (1 + np.exp(-1.0))
    p = parameters(
        router_kernel=np.log(score / (1 - score)),
        router_bias=[0.0, 0.0, 0.3, 0.2],
        router_scale=[3.0],
        experts_gate=np.ones((4, 1, 1)),
        experts_up=np.ones((4, 1, 1)),
        experts_down=np.arange(1, 5).reshape(4, 1, 1) / opened,
        sinks_gate=np.ones((1, 1, 1)),
        sinks_up=np.ones((1, 1, 1)),
        sinks_down=np.full((1, 1, 1), 10 / opened),
    )

    def run(top_k: int, **options: object) -> tuple[float, float]:
        spec = MoESpec(4, top_k, 1, num_sinks=1, scale=2.0, global_scale=True, **options)
        y, margin = mixture(p, spec, np.ones((1, 1)))
        return float(y[0, 0]), margin

    # Rankings are 1/2, 1/3, 0.55 and 0.4: the third expert, with the sink.
    assert run(1) == pytest.approx((6 * (3 / 4 + 10 / 2) / (3 / 4), 0.05))
    # Groups are worth 0.833 and 0.95: the second, though the first has the second-best expert.
    total = 1 / 4 + 1 / 5 + 1 / 2
    expected = 6 * (3 / 4 + 4 / 5 + 10 / 2) / total
    assert run(2, num_groups=2, top_groups=1)[0] == pytest.approx(expected)
    assert run(1, normalize=False)[0] == pytest.approx(6 * (3 / 4 + 10 / 2))
    assert run(1, selection_bias=False)[0] == pytest.approx(6 * (1 / 2 + 10 / 2))
