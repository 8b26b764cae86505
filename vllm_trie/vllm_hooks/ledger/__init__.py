"""Every symbol of vLLM that the plugin touches, and the code that touches it."""
