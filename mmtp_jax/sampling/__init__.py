"""Request parameters (no jax), their device form, logits processing and the sampler."""
