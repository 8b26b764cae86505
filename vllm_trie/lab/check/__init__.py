"""The validation of a device and a model: `vllm-trie validate`.

:mod:`vllm_trie.lab.check.parts` is the table of what is checked. Each part runs in a process of its
own, and its result becomes a row of the report. Importing this package imports neither torch nor
vLLM.
"""
