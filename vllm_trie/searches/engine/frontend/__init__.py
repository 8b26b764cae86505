"""Searches in the front end: requests, calls, answers."""
