"""Checks of a device at the start of an engine, before it serves."""
