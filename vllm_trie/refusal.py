"""What the plugin refuses or is told to leave, and how its messages show values."""

from __future__ import annotations

import itertools
import os
import reprlib
from typing import Any


class RefusedError(ValueError):
    """A setting or a file that cannot be used; the message names it and says what to do.

    Any other ``ValueError`` is a bug, and keeps its traceback.
    """


def turned_off(variable: str) -> str:
    """Return how an environment variable turns something off, empty if it does not."""
    value = os.environ.get(variable, "1").strip().lower()
    return f"{variable}={value}" if value in ("0", "false", "off", "no") else ""


class _Shown(reprlib.Repr):
    """Looks at no more than 20 entries of a container and of the containers in it."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 200
        self.maxlist = self.maxtuple = 20
        self.maxlevel = 2

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        first = dict(itertools.islice(x.items(), self.maxdict + 1))
        return super().repr_dict(first, level)  # sorts them


_SHOWN = _Shown()


def shown(value: object) -> str:
    """Return a value as an error shows it, in a time that does not depend on its size."""
    return _SHOWN.repr(value)[:200]
