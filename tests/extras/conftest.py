"""Engines for the tests of extras."""

from tests.engine.conftest import _engines, engine, test_drafters

__all__ = ["_engines", "engine", "test_drafters"]
