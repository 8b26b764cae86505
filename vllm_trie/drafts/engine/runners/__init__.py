"""Adapters that run a verifier in vLLM's model runners."""
