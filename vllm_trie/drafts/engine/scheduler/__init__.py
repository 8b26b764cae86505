"""Drafts in the scheduler: cache salts, statistics, room for prefills."""
