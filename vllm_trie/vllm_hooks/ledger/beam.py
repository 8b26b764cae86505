"""The ledger's entries for native beam search."""

from __future__ import annotations

from functools import partial

from vllm_trie.vllm_hooks.ledger.patch import Patch
from vllm_trie.vllm_hooks.ledger.record import group

_group = partial(
    group,
    feature="beam",
    upstream="vllm-project/vllm issues 14426, 20316, 49197",
    until="vLLM serves beam search inside its scheduler",
)
_any = _group("vllm.")
_scheduler = _group("vllm.v1.core.sched.scheduler:Scheduler.")
_runner = _group(
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.",
    scope="native_search",
    until="the sampler returns the best of a list of tokens for each request",
)
_v2 = _group(
    "vllm.v1.worker.gpu.",
    scope="native_search",
    until="the sampler returns the best of a list of tokens for each request",
)
_fork = _group("vllm.v1.core.", point="fork_request")
_PROTOCOLS = (
    "openai.completion.protocol:CompletionRequest",
    "openai.chat_completion.protocol:ChatCompletionRequest",
)

# fmt: off
BEAM_PATCHES: tuple[Patch, ...] = (
    # Set-up
    _any("config.model:ModelConfig.get_vocab_size", "called",
        "the most candidates that a row can ask for, and the tokens of the check's prompts", ""),
    # Front end
    _any("v1.sample.logits_processor:LOGITSPROCS_GROUP", "read",
        "names the installed logits processors, whose arguments beam requests cannot have"),
    *(
        _any(f"entrypoints.{protocol}.extract_structured_outputs", "called",
            "the grammar of a request with use_beam_search", "")
        for protocol in _PROTOCOLS
    ),
    # Scheduler
    _scheduler("add_request", "overridden", "takes beam requests in", "request"),
    _scheduler("schedule", "overridden",
        "admits groups, sends forked rows to the worker",
        "throttle_prefills"),
    _scheduler("_handle_blocked_waiting_request", "overridden",
        "ordinary requests leave the slots of groups free", "request"),
    _scheduler("update_from_output", "overridden", "takes the rows' outputs and steps the searches",
        "scheduler_output model_runner_output"),
    _scheduler("_update_request_with_output", "overridden", "a complete item ends its request",
        "request new_token_ids is_stale"),
    _scheduler("_preempt_request", "overridden", "a preempted row is sent to the worker anew",
        "request timestamp drop_stale_output"),
    _scheduler("finish_requests", "overridden", "an aborted request takes its rows along",
        "request_ids finished_status"),
    _scheduler("update_draft_token_ids", "overridden", "rows get no drafts", "draft_token_ids"),
    _scheduler("get_num_unfinished_requests", "overridden", "groups that wait count as unfinished",
        ""),
    _scheduler("get_request_counts", "overridden", "groups that wait count as waiting", ""),
    _scheduler("reset_prefix_cache", "overridden",
        "copies that forks have queued give their blocks back first",
        "reset_running_requests reset_connector"),
    _scheduler("_free_request", "called", "frees dropped rows", "request"),
    _any("v1.core.sched.async_scheduler:AsyncScheduler._update_after_schedule", "overridden",
        "rows do not run ahead of their outputs", "scheduler_output"),
    _any("v1.core.sched.output:NewRequestData", "made", "how a forked row reaches the worker",
        "req_id prompt_token_ids mm_features sampling_params pooling_params block_ids "
        "num_computed_tokens lora_request prefill_token_ids"),
    _any("v1.core.sched.output:CachedRequestData", "changed", "forked rows leave it",
        "req_ids resumed_req_ids new_token_ids all_token_ids new_block_ids num_computed_tokens "
        "num_output_tokens"),
    _any("v1.request:Request", "made", "rows", "request_id prompt_token_ids"),
    _any("v1.request:Request.update_block_hashes", "relied on",
        "hashes with _block_hasher, which members keep for the row of the prompt", ""),
    _any("v1.engine:EngineCoreOutput", "made", "a hypothesis is a member's whole output",
        "request_id new_token_ids new_logprobs"),
    *(
        _any(f"v1.structured_output.backend_types:StructuredOutputGrammar.{name}", "called",
            "one matcher walks the hypotheses of a search", parameters)
        for name, parameters in (
            ("accept_tokens", "request_id tokens"),
            ("rollback", "num_tokens"),
            ("reset", ""),
            ("fill_bitmask", "bitmask batch_index"),
        )
    ),
    _any("v1.structured_output.backend_types:StructuredOutputBackend.allocate_token_bitmask",
        "called", "the masks of a search's rows", "max_num_seqs"),
    _any("v1.structured_output.request:StructuredOutputRequest.grammar", "read",
        "the grammar that vLLM has compiled for a member"),
    # Candidates of rows in the worker
    _runner("execute_model", "wrapped", "takes what the scheduler says of rows", "scheduler_output",
        wrapper="worker.beam.item_rows:wrap_execute_model"),
    _runner("_sample", "wrapped", "candidates of rows: out of all rows of a search, or items",
        "logits spec_decode_metadata", wrapper="worker.beam.item_rows:wrap_sample"),
    _runner("sample_tokens", "wrapped", "sends the candidates of rows to the scheduler",
        "grammar_output", wrapper="worker.beam.item_rows:wrap_sample_tokens"),
    _any("v1.worker.gpu_model_runner:AsyncGPUModelRunnerOutput", "relied on",
        "its _model_runner_output carries the candidates under asynchronous scheduling",
        "model_runner_output"),
    _v2("model_runner:GPUModelRunner.execute_model", "wrapped",
        "takes what the scheduler says of rows", "scheduler_output",
        wrapper="worker.beam.rows_v2:wrap_execute_model"),
    _v2("sample.sampler:Sampler.__call__", "wrapped",
        "candidates of rows with a bias, a mask, a grammar or a catalogue", "logits input_batch",
        wrapper="worker.beam.rows_v2:wrap_sampler"),
    _v2("model_runner:GPUModelRunner.sample_tokens", "wrapped",
        "sends the candidates of rows to the scheduler", "grammar_output",
        wrapper="worker.beam.rows_v2:wrap_sample_tokens"),
    _v2("async_utils:AsyncOutput", "relied on", "its model_runner_output carries the candidates",
        "model_runner_output"),
    _any("v1.worker.gpu_input_batch:InputBatch.update_async_output_token_ids", "called",
        "the tokens of requests that decode an item, under asynchronous scheduling", ""),
    _any("v1.outputs:SamplerOutput", "made", "a batch of rows only needs no sampler",
        "sampled_token_ids logprobs_tensors"),
    _any("v1.outputs:ModelRunnerOutput", "changed", "carries the candidates", "req_ids"),
    # Attention
    _runner("_build_attention_metadata", "wrapped",
        "tells the layers which rows share the slots of a prompt",
        "num_tokens num_reqs max_query_len num_scheduled_tokens",
        wrapper="worker.beam.item_rows:wrap_build_attention_metadata", platform="cpu",
        until="vLLM's CPU attention reads a shared prefix once"),
    _any("v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.forward", "wrapped",
        "attends to the rows of searches together",
        "layer query key value kv_cache attn_metadata output",
        wrapper="worker.beam.shared_prompt:wrap_forward", scope="native_search", platform="cpu",
        until="vLLM's CPU attention reads a shared prefix once"),
    # KV blocks
    _any("v1.worker.gpu_model_runner:copy_kv_cache_blocks_inplace", "wrapped",
        "copies the slots of tail blocks that differ; vLLM's copies whole blocks bytewise",
        "kv_caches num_blocks kv_cache_block_copies",
        wrapper="worker.beam.block_copies:wrap_copy_blocks", scope="native_search", platform="cpu"),
    _any("v1.attention.backends.cpu_attn:_get_attn_isa", "called",
        "whether slots lie in the cache as the copies expect", "dtype block_size head_size",
        platform="cpu"),
    _any("v1.core.sched.output:SchedulerOutput", "changed",
        "carries the slots of each copy and what the worker needs of the rows",
        "kv_cache_block_copies"),
    _fork("single_type_kv_cache_manager:SingleTypeKVCacheManager.take_pending_cow_copies",
        "relied on", "drains the copy-on-write queue that forks append to", "",
        successor="`KVCacheManager.fork_request()` queues the copy"),
    _any("v1.core.kv_cache_manager:KVCacheManager.take_kv_cache_block_copies", "relied on",
        "sends the queued copies to the worker", ""),
    _fork("block_pool:BlockPool.touch", "called", "shares blocks", "blocks",
        successor="`KVCacheManager.fork_request()`"),
    _fork("block_pool:BlockPool.get_new_blocks", "called", "the tail block of a fork", "num_blocks",
        successor="`KVCacheManager.fork_request()`"),
)
# fmt: on
