"""vLLM's attention backends with trees."""
