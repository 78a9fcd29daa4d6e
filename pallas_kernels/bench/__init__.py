"""`python -m pallas_kernels.bench`: what the kernels take on a GPU; runs are kept in `results/`."""
