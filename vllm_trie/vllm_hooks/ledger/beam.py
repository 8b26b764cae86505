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
        "admits groups, sends beams to the worker",
        "throttle_prefills"),
    _scheduler("_handle_blocked_waiting_request", "overridden",
        "ordinary requests leave the slots of groups free", "request"),
    _scheduler("update_from_output", "overridden",
        "takes the candidates of beams and steps the searches",
        "scheduler_output model_runner_output"),
    _scheduler("_update_request_with_output", "overridden", "a complete item ends its request",
        "request new_token_ids is_stale"),
    _scheduler("_preempt_request", "overridden", "a preempted group starts again with a new proxy",
        "request timestamp drop_stale_output"),
    _scheduler("finish_requests", "overridden", "an aborted request takes its proxy along",
        "request_ids finished_status"),
    _scheduler("update_draft_token_ids", "overridden", "proxies get no drafts", "draft_token_ids"),
    _scheduler("get_num_unfinished_requests", "overridden", "groups that wait count as unfinished",
        ""),
    _scheduler("get_request_counts", "overridden", "groups that wait count as waiting", ""),
    _scheduler("_free_request", "called", "frees proxies", "request"),
    _any("v1.core.sched.async_scheduler:AsyncScheduler._update_after_schedule", "overridden",
        "beams do not run ahead of their outputs", "scheduler_output"),
    _any("v1.core.sched.output:NewRequestData", "made", "a beam's slot on Model Runner V2",
        "req_id prompt_token_ids mm_features sampling_params pooling_params block_ids "
        "num_computed_tokens lora_request prefill_token_ids"),
    _any("v1.core.sched.output:CachedRequestData", "changed", "proxies whose beams decode leave it",
        "req_ids resumed_req_ids new_token_ids all_token_ids new_block_ids num_computed_tokens "
        "num_output_tokens"),
    _any("v1.request:Request", "made", "its subclass stands for a group, the proxy",
        "request_id prompt_token_ids"),
    _any("v1.request:Request.update_block_hashes", "relied on",
        "writes block_hashes, which proxies share with their search", ""),
    _any("v1.engine:EngineCoreOutput", "made", "the whole output of a search",
        "request_id new_token_ids finish_reason"),
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
        "called", "the masks of a search's beams", "max_num_seqs"),
    _any("v1.structured_output.request:StructuredOutputRequest.grammar", "read",
        "the grammar that vLLM has compiled for a search"),
    _any("v1.core.kv_cache_manager:KVCacheManager.allocate_slots", "wrapped",
        "takes blocks for all beams of a group where vLLM schedules the request that stands for it",
        "request num_new_tokens", wrapper="scheduler.proxies:wrap_allocate_slots",
        scope="native_search"),
    # Beams in the worker
    _runner("execute_model", "wrapped", "takes what the scheduler asks for", "scheduler_output",
        wrapper="worker.beam.beams_v1:wrap_execute_model"),
    _runner("_update_states", "wrapped", "attaches the beams of groups behind the requests",
        "scheduler_output", wrapper="worker.beam.beams_v1:wrap_update_states"),
    _runner("_sample", "wrapped", "candidates of beams: out of all beams of a search, or items",
        "logits spec_decode_metadata", wrapper="worker.beam.beams_v1:wrap_sample"),
    _runner("sample_tokens", "wrapped", "sends the candidates to the scheduler",
        "grammar_output", wrapper="worker.beam.beams_v1:wrap_sample_tokens"),
    _any("v1.worker.gpu_model_runner:AsyncGPUModelRunnerOutput", "relied on",
        "its _model_runner_output carries the candidates under asynchronous scheduling",
        "model_runner_output"),
    _v2("model_runner:GPUModelRunner.execute_model", "wrapped",
        "adds the beams of groups, takes what the scheduler asks for", "scheduler_output",
        wrapper="worker.beam.beams_v2:wrap_execute_model"),
    _v2("model_runner:GPUModelRunner.update_requests", "wrapped",
        "writes the tokens and block tables of beams", "scheduler_output",
        wrapper="worker.beam.beams_v2:wrap_update_requests"),
    *(
        _v2(f"{sampler}.__call__", "wrapped", "candidates of beams, out of all beams of a search",
            "logits input_batch", wrapper="worker.beam.beams_v2:wrap_sampler")
        for sampler in (
            "sample.sampler:Sampler",
            "spec_decode.rejection_sampler:RejectionSampler",
        )
    ),
    _v2("model_runner:GPUModelRunner.sample_tokens", "wrapped",
        "sends the candidates to the scheduler", "grammar_output",
        wrapper="worker.beam.beams_v2:wrap_sample_tokens"),
    _v2("async_utils:AsyncOutput.get_output", "wrapped",
        "sends the candidates, whose copies came before those of its own", "",
        wrapper="worker.beam.beams_v2:wrap_get_output"),
    _v2("async_utils:stream", "called", "copies candidates in the stream of a step's output",
        "to_stream from_stream"),
    _any("v1.worker.gpu_input_batch:InputBatch.update_async_output_token_ids", "called",
        "the tokens of requests that decode an item, under asynchronous scheduling", ""),
    _any("v1.outputs:SamplerOutput", "made", "a step of beams only needs no sampler",
        "sampled_token_ids logprobs_tensors"),
    _any("v1.outputs:ModelRunnerOutput", "changed", "carries the candidates", "req_ids"),
    # Attention
    _runner("_build_attention_metadata", "wrapped",
        "tells the layers which beams share the slots of a prompt",
        "num_tokens num_reqs max_query_len num_scheduled_tokens",
        wrapper="worker.beam.beams_v1:wrap_build_attention_metadata", platform="cpu",
        until="vLLM's CPU attention reads a shared prefix once"),
    _any("v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.forward", "wrapped",
        "attends to the beams of searches together",
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
        "carries the beams, and the slots of each copy",
        "kv_cache_block_copies"),
    _any("v1.core.kv_cache_utils:KVCacheBlockCopy", "made", "the copy of a tail block",
        "src_block_id dst_block_id"),
    _any("v1.core.block_pool:BlockPool.get_new_blocks", "called", "blocks of beams", "num_blocks"),
    _any("v1.core.block_pool:BlockPool.free_blocks", "called", "gives back blocks of beams",
        "ordered_blocks"),
)
# fmt: on
