"""Model families: one file each says what a config.json describes and which tensors fill it.

Adding a family is adding a file and naming it in `registry.py`; the engine does not change.
"""
