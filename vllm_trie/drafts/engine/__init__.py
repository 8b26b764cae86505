"""Drafts inside vLLM: start-up, front end, scheduler, runners, verification."""
