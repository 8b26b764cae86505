"""Hooks in the workers: model runners with trees."""
