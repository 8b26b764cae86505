"""How the shipped model and its Medusa heads were made.

Run from the root of a checkout: `python -m tools.tiny_model.train`, then `refine`, `evaluate`, and
`medusa_text` for the text that the heads are trained on with `vllm-trie medusa train`. The model
cards next to the weights have the exact commands.
"""
