"""What the plugin refuses."""

from __future__ import annotations


class RefusedError(ValueError):
    """A setting or a file that cannot be used; the message names it and says what to do.

    Any other ``ValueError`` is a bug, and keeps its traceback.
    """
