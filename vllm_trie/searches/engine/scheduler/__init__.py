"""Searches in the scheduler: groups, their beams and their slots."""
