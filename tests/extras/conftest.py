"""Engines for the tests of extras."""

from tests.engine.conftest import _engines, engine, expected, inspect_models_here, test_drafters

__all__ = ["_engines", "engine", "expected", "inspect_models_here", "test_drafters"]
