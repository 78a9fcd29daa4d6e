"""Attention kernels over paged caches. Imports nothing from `mmtp_jax`."""
