"""Traces of requests: their steps and trees, as a file."""
