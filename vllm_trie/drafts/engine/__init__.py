"""Drafts of the next step."""
