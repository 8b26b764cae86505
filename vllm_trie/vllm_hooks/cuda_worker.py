"""vLLM's GPU worker with the tree mixin on its model runner.

Not yet run on a GPU; :mod:`vllm_trie.vllm_hooks.support` refuses GPUs at start-up.
"""

from __future__ import annotations

from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.gpu_worker import Worker

from vllm_trie.vllm_hooks.runner import add_trees

_GPU_BACKEND_CLASS = "vllm_trie.vllm_hooks.cuda_attention.TreeTritonAttentionBackend"
_REPLACED = (None, AttentionBackendEnum.TRITON_ATTN, AttentionBackendEnum.CUSTOM)


class TreeGPUWorker(Worker):
    """The GPU worker for tree speculation."""

    def init_device(self) -> None:
        chosen = self.vllm_config.attention_config.backend
        if chosen not in _REPLACED:
            raise ValueError(
                f"attention_backend={chosen.name!r} knows nothing of draft trees; leave it out or "
                "set it to 'TRITON_ATTN'"
            )
        register_backend(AttentionBackendEnum.CUSTOM, _GPU_BACKEND_CLASS)
        self.vllm_config.attention_config.backend = AttentionBackendEnum.CUSTOM
        selector._cached_get_attn_backend.cache_clear()
        super().init_device()
        add_trees(self.model_runner)
