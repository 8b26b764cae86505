"""Drafts in the scheduler: statistics, changes before a step, room for prefills."""
