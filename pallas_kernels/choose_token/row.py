"""The columns of a request's packed parameters, an int32 row: floats as their bits, then integers,
then stop ids padded with -1."""

FLOATS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
INTS = ("top_k", "seed", "prompt_len", "min_len", "has_bias")
STOP_IDS = len(FLOATS) + len(INTS)
"""The first column of the stop ids."""
