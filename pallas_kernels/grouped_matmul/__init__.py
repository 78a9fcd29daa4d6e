"""Products of sorted rows with one matrix per group: the experts of a mixture."""

from pallas_kernels.grouped_matmul.api import grouped_matmul

__all__ = ["grouped_matmul"]
