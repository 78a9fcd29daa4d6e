"""The one error of this package."""


class ModelError(Exception):
    """A model that cannot be found, read or used; the message is one sentence for the user."""
