"""Beam search inside vLLM: front end, scheduler and workers."""
