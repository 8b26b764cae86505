"""Drafts at start-up: arguments, the choice of verification, the verifier."""
