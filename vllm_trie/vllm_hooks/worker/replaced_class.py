"""A class of vLLM's replaced by a subclass while vLLM's worker makes its model runner."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def replaced_class(module: ModuleType, name: str, subclass: type) -> Iterator[None]:
    """Let ``module`` instantiate a subclass in place of the class it calls ``name``."""
    original = getattr(module, name)
    setattr(module, name, subclass)
    try:
        yield
    finally:
        setattr(module, name, original)
