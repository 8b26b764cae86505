"""Predicted outputs: the answer as the client expects it, as a draft."""
