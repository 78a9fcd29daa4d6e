"""New keys and values into the pages of a cache, in place."""

from pallas_kernels.kv_write.api import kv_write, rotate_and_write
from pallas_kernels.kv_write.rotation import Rotation

__all__ = ["Rotation", "kv_write", "rotate_and_write"]
