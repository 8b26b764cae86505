"""Hooks in the scheduler: native beam search, cache salts."""
