"""`python -m mmtp_jax.bench serving`: load for any server of OpenAI's API, and when it answered.

Nothing here imports jax. `options` says what to measure, `bodies` and `arrivals` what is sent when;
`connection` keeps the bytes that come and their times, `processes` and `worker` do so on several
cores; `events` reads the bytes afterwards, and `measures`, `acceptance`, `report` and `plot` say
what it all comes to.
"""
