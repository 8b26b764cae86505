"""The ledger's lines for tree speculation on GPUs: what a CPU does not need."""

from __future__ import annotations

from functools import partial

from vllm_trie.vllm_hooks.ledger.patch import Hook
from vllm_trie.vllm_hooks.ledger.speculation import ATTENTION_FORWARD

_TRITON = "vllm.v1.attention.backends.triton_attn:TritonAttention"
_TREE_DRAFTS = "vLLM verifies trees of drafts itself"
_TREE_MASKS = "attention metadata carries tree masks"
_TESTED = "tree attention has been run on enough devices"

_hook = partial(Hook, platform="cuda")

GPU_HOOKS: tuple[Hook, ...] = (
    _hook(
        "vllm.v1.worker.gpu_worker:Worker.init_device",
        "overridden in a subclass: registers the attention backend, adds the runner's mixin",
        parameters=(),
        retire_when=_TREE_DRAFTS,
    ),
    _hook(
        "vllm.v1.worker.gpu_worker:Worker.compile_or_warm_up_model",
        "overridden in a subclass: checks tree attention on the device before serving",
        parameters=(),
        retire_when=_TESTED,
    ),
    _hook(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._dummy_sampler_run",
        "wrapped: memory profiling sees the logits of a step with trees",
        parameters=("hidden_states",),
        retire_when=_TREE_DRAFTS,
    ),
    _hook(
        "vllm.v1.attention.backends.registry:AttentionBackendEnum.CUSTOM",
        "registered: tree attention as a backend of its own",
        retire_when=_TREE_MASKS,
    ),
    _hook(
        f"{_TRITON}Impl.forward",
        "overridden in a subclass: rows with trees get tree attention",
        parameters=ATTENTION_FORWARD,
        retire_when=_TREE_MASKS,
    ),
    _hook(
        f"{_TRITON}Impl.do_kv_cache_update",
        "called by the check: shows the layout of the KV cache",
        parameters=("layer", "key", "value", "kv_cache", "slot_mapping"),
        retire_when=_TESTED,
    ),
    _hook(
        f"{_TRITON}MetadataBuilder.build",
        "overridden in a subclass: keeps what the CPU knows of the step's rows",
        parameters=("common_prefix_len", "common_attn_metadata", "fast_build"),
        retire_when=_TREE_MASKS,
    ),
    _hook(
        f"{_TRITON}MetadataBuilder._cudagraph_support",
        "overridden in a subclass: attention stays out of CUDA graphs",
        retire_when="tree masks live in buffers that a graph can read",
    ),
    *(
        _hook(
            f"{_TRITON}Backend.{name}",
            "overridden in a subclass: answers no",
            parameters=(),
            retire_when=_TREE_MASKS,
        )
        for name in ("supports_mm_prefix", "supports_rswa", "supports_batch_invariance")
    ),
    _hook(
        "vllm.v1.attention.backend:CommonAttentionMetadata",
        "made by the check: describes its random steps",
        parameters=(
            "query_start_loc",
            "query_start_loc_cpu",
            "seq_lens",
            "num_reqs",
            "num_actual_tokens",
            "max_query_len",
            "max_seq_len",
            "block_table_tensor",
            "slot_mapping",
        ),
        retire_when=_TESTED,
    ),
    _hook(
        "vllm.v1.worker.utils:AttentionGroup.get_metadata_builder",
        "called by the check: the builder that steps will use",
        parameters=(),
        retire_when=_TESTED,
    ),
)
