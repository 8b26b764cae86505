"""The proposer in a patched vLLM, which asks for an instance of its own class."""

from vllm.config import VllmConfig
from vllm.v1.spec_decode.draft_verifier import DraftVerifier  # type: ignore[import-not-found]

from vllm_trie.vllm_hooks.worker.attention.cpu import choose_attention
from vllm_trie.vllm_hooks.worker.runners.v1_speculation import V1Speculation


class PatchedSpeculation(V1Speculation, DraftVerifier):
    """The runner makes it before it loads the model, so that the choice of attention is in time."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        choose_attention(for_trees=not self.chain_only)
