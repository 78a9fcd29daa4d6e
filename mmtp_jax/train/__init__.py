"""Trains MTP modules for a frozen target on text that the target wrote itself."""
