"""`python -m mmtp_jax.bench`: what a step, a batch of requests and a start cost,
and what any server does under load."""
