"""Choosing tokens: every option of the sampler, decided row by row in one kernel."""

from pallas_kernels.choose_token.row import FLOATS, INTS, STOP_IDS
from pallas_kernels.choose_token.triton import Config, choose_token

__all__ = ["FLOATS", "INTS", "STOP_IDS", "Config", "choose_token"]
