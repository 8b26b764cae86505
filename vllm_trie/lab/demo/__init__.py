"""The demo: draft trees on real prompts, measured against plain vLLM.

Importing this package imports neither torch nor vLLM; thread settings have to come before them.
"""
