"""MTP modules that were trained for a frozen target and are stored apart from it.

A folder holds `modules.json` (wiring, layers, the target's identity) and `parameters/`, an Orbax
checkpoint of a flat dictionary by parameter name.
"""
