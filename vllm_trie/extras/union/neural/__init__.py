"""A trained drafter of vLLM's own as a source of heads."""
