"""Hooks in the front end: requests, their options, their outputs and metrics."""
