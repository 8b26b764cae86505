"""What the checks of devices call in vLLM."""

from vllm_trie.hooks.ledger.record import TESTED, Symbols

# fmt: off

_check = Symbols(until=TESTED)
_check("v1.core.sched.output:CachedRequestData.make_empty", "called",
    "by the check at start-up: steps as the scheduler makes them", "")
_check("v1.attention.backend:CommonAttentionMetadata", "made",
    "by the check of a GPU: describes random steps",
    "query_start_loc query_start_loc_cpu seq_lens num_reqs num_actual_tokens max_query_len "
    "max_seq_len block_table_tensor slot_mapping causal")
_check("v1.worker.gpu.kv_connector:KVConnector.set_disabled", "called",
    "by the check at start-up: its requests have no KV elsewhere", "disabled")
_check("v1.worker.gpu.warmup:_warmup_block_counter", "called",
    "by the check at start-up: the KV blocks of its requests", "model_runner")
_check("v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin.maybe_setup_dummy_loras", "called",
    "by the check at start-up: adapters of zeros, whose first is warmup_1", "lora_config")
_check("v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin.maybe_remove_all_loras", "called",
    "by the check at start-up, whatever happened", "lora_config")

_check_cuda = Symbols(until=TESTED, platform="cuda")
_check_cuda("v1.attention.backends.triton_attn:TritonAttentionImpl.do_kv_cache_update", "called",
    "by the check: shows the layout of the KV cache", "layer key value kv_cache slot_mapping")
_check_cuda("v1.worker.utils:AttentionGroup.get_metadata_builder", "called",
    "by the check: the builder that steps will use", "")
# fmt: on
