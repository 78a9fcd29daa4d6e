"""Measurements of the kernels on a GPU; results are kept under `results/`."""
