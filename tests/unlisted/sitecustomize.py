"""Python runs this at its start in processes that are to have an unlisted release of vLLM."""

from vllm_trie.hooks.ledger import table

table.SUPPORTED_VLLM_VERSIONS = ("0.31",)
