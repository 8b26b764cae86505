"""What drafts call, read or rely on in vLLM, without code that could record it."""

from vllm_trie.hooks.ledger.record import (
    PLUGGABLE,
    STATS,
    TREE_DRAFTS,
    TREE_MASKS,
    Symbols,
)

# fmt: off

_verified = Symbols(until=TREE_DRAFTS)
_v2 = Symbols("v1.worker.gpu.", TREE_DRAFTS)
_verified("distributed.parallel_state:get_tp_group", "called",
    "sends rank 0's trees to all ranks", "")
_verified("v1.sample.logits_processor.builtin:MinTokensLogitsProcessor", "read",
    "without a request, greedy decoding is the argmax")
_verified("v1.sample.logits_processor.interface:LogitsProcessor.update_state", "called",
    "before each level of the walk, as before each step", "batch_update")
_verified("v1.worker.gpu_input_batch:InputBatch.add_request", "relied on",
    "its req_output_token_ids are the lists that logits processors hold", "request")
_verified("v1.worker.gpu_input_batch:InputBatch._make_sampling_metadata", "relied on",
    "its generators are those of the batch, from which partial prefills' are hidden", "",
    until="vLLM winds back generators of CPUs by their state")
_verified("v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks", "called",
    "the tokens that a prompt takes of a step, which drafts leave to it", "request",
    until="proposers learn that a request waits")
_verified("v1.sample.rejection_sampler:RejectionSampler.parse_output", "relied on",
    "reads rows of sampled tokens padded with -1", "output_token_ids vocab_size")
_verified("v1.sample.rejection_sampler:RejectionSampler.forward", "set",
    "samples chains level by level where a request has logprob_token_ids",
    "metadata draft_probs logits sampling_metadata",
    until="vLLM's rejection sampler returns the logprobs of lists of tokens")
_verified("v1.sample.sampler:Sampler.forward", "called",
    "at each level of the walk", "logits sampling_metadata")
_verified("v1.sample.thinking_budget_state:ThinkingBudgetStateHolder.update_state", "relied on",
    "changes nothing where it is called again in a step, at the next level of a walk",
    "output_token_ids spec_token_ids")
_experts = Symbols("distributed.aux_output_connector.worker:AuxOutputWorkerConnector.")
_experts("__init__", "relied on",
    "the experts of a step's tokens are in its capturer's device_buffer",
    "vllm_config model kv_cache_config", until=TREE_DRAFTS)
_experts("_commit_output", "set",
    "takes steps that are shorter than scheduled, where each request goes on behind its last token",
    "pending", until="vLLM schedules drafts of different lengths")
_v2("async_utils:AsyncOutput.__init__", "relied on",
    "the output that the scheduler gets is in its model_runner_output", "model_runner_output")
_v2("async_utils:async_copy_to_np", "called",
    "copies sampled tokens to the host", "x")
_v2("buffer_utils:UvaBuffer", "made",
    "memory of the host in which the device waits for drafts", "size dtype")
_v2("cudagraph_utils:CudaGraphManager.capture", "relied on",
    "leaves the captured graphs in `graphs`, by description", "create_forward_fn")
_v2("input_batch:get_num_sampled_and_rejected", "called",
    "requests whose prefill goes on have no tokens",
    "num_sampled seq_lens cu_num_logits idx_mapping prefill_len")
_v2("metrics.logits:get_num_nans", "called", "as vLLM's sampler does", "logits")
_v2("sample.gumbel:gumbel_sample", "relied on",
    "noise depends on a request's seed, the position and the token alone", "logits")
_v2("sample.logprob:compute_topk_scores", "called",
    "logprobs along the accepted path",
    "logits num_logprobs sampled_token_ids cu_num_logits logprob_token_ids_state "
    "expanded_idx_mapping max_per_req_token_ids logits_mode")
_v2("sample.sampler:Sampler.get_logprobs_dims", "called",
    "whether a request of the step wants logprobs", "idx_mapping_np")
_v2("sample.output:SamplerOutput", "made",
    "the tokens of a step with trees",
    "sampled_token_ids logprobs_tensors num_nans num_sampled num_rejected")
_v2("sample.sampler:Sampler.sample", "set",
    "samples each row of logits once, and the drafter reads those of steps without drafts",
    "logits expanded_idx_mapping idx_mapping idx_mapping_np pos input_ids expanded_local_pos "
    "seq_lens_upper_bound_np")
_v2("spec_decode.adaptive_verification:AdaptiveVerificationManager.set_cost_curves", "relied on",
    "leaves the durations in cost_tables", "draft_curve verify_curve")
_v2("spec_decode.adaptive_verification:maybe_create_adaptive_verification_manager", "relied on",
    "gives CUDA graphs of drafts of any length, and the durations of steps",
    "enable_adaptive_verification attn_groups")
_v2("spec_decode.rejection_sampler:RejectionSampler.__init__", "called",
    "the plugin's samplers derive from it", "sampler spec_config device watermark_key")
_v2("spec_decode.rejection_sampler:get_max_chunk_logits", "called",
    "bounds float32 copies of logits", "vocab_size")
_v2("structured_outputs:StructuredOutputsWorker.apply_grammar_bitmask", "relied on",
    "takes a row of masks for each scheduled place, or as many for every request",
    "logits input_batch grammar_req_ids grammar_bitmask")
_verified("v1.worker.gpu_model_runner:GPUModelRunner._dummy_run", "called",
    "at start-up: first step costs for the adaptive node budget", "num_tokens")
_verified("v1.worker.gpu_model_runner:GPUModelRunner.finalize_kv_connector", "called",
    "in steps in which no drafts are wanted", "")

_method = Symbols(until=PLUGGABLE)
_method("config.speculative:logger", "changed",
    "drops the warning that custom_class is experimental, once a method of the plugin uses it")
_method("engine.arg_utils:EngineArgs.async_scheduling", "set",
    "off where it was left open and Model Runner V1 serves, instead of off with a warning")
_method("utils.torch_utils:async_tensor_h2d", "called",
    "copies drafts to the device", "data device")
_method("v1.spec_decode.custom_class_proposer:create_custom_proposer", "relied on",
    "instantiates the proposer from the class path in the configuration", "vllm_config")

for _method_name, _parameters in (
    ("accept_tokens", "request_id tokens"), ("rollback", "num_tokens"),
    ("fill_bitmask", "bitmask batch_index"), ("is_terminated", ""), ("validate_tokens", "tokens"),
):
    Symbols("v1.structured_output.backend_types:StructuredOutputGrammar.",
        "vLLM bounds this time")(_method_name, "called", "its time bounds drafts", _parameters)

_masked = Symbols(until=TREE_MASKS)
_masked("v1.attention.backends.registry:register_backend", "called",
    "tree attention in place of CPU_ATTN", "backend class_path")
_masked("v1.attention.selector:_cached_get_attn_backend.cache_clear", "called",
    "an earlier engine in the same process may have cached vLLM's backend")
_chunked = Symbols(until=TREE_MASKS, platform="cuda")
_chunked("model_executor.layers.attention.chunked_local_attention:"
    "create_chunked_local_attention_backend", "relied on",
    "derives a builder from the plugin's, which does without that",
    "underlying_attn_backend attention_chunk_size")
_chunked("v1.attention.backends.utils:make_local_attention_virtual_batches", "called",
    "a request for each attention chunk, in steps of prompts that vLLM's kernel takes",
    "attn_chunk_size common_attn_metadata block_size")
_masked("v1.worker.gpu.model_states.interface:ModelState.prepare_attn", "set",
    "makes the metadata of each layer, which then carries the step's trees, once its KV slots are "
    "known and positions of nodes may change",
    "input_batch cudagraph_mode block_tables slot_mappings")
_v2("model_states.interface:ModelState.prepare_inputs", "set",
    "makes positions in several dimensions (M-RoPE), which then follow the depths of nodes",
    "input_batch req_states")

_other = Symbols()
_other("_custom_ops:cpu_attn_get_scheduler_metadata", "called",
    "plans the stock kernel's work for the rows without trees",
    "num_reqs num_heads num_kv_heads head_dim seq_lens dtype query_start_loc causal "
    "sliding_window_size isa enable_kv_split",
    until="tree attention also serves the rows without trees as fast as the stock kernel",
    platform="cpu")
_other("config.speculative:SpeculativeConfig.num_speculative_tokens_per_batch_size", "set",
    "keeps the scheduler from padding requests with one token left to a full draft",
    until="vLLM pads such requests only where they fit a step")
_other("v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder._set_isa_to_layers", "called",
    "the vector kernel in place of AMX, if the plugin cannot read its cache layout", "layer_names",
    until="vLLM says how its kernels lay out the cache", platform="cpu")
_other("v1.attention.backends.registry:AttentionBackendEnum.CPU_ATTN.clear_override", "called",
    "an earlier engine in the same process may have left tree attention in place", "",
    until=TREE_MASKS, platform="cpu")
_other("v1.attention.backends.registry:AttentionBackendEnum.CUSTOM", "registered",
    "tree attention as a backend of its own", until=TREE_MASKS, platform="cuda")
_other("v1.engine.input_processor:InputProcessor.__init__", "relied on",
    "its speculative_config, which is taken away, only keeps min_p and logit_bias from requests; "
    "they are exact where trees verify", "vllm_config",
    until="vLLM's rejection sampler applies logits processors")
_other("v1.core.sched.output:SchedulerOutput.num_invalid_spec_tokens", "set",
    "keeps fillers out of the count of draft tokens", until=STATS)
Symbols("v1.attention.backends.triton_attn:", TREE_MASKS, platform="cuda")(
    "TritonAttentionMetadataBuilder._cudagraph_support", "overridden",
    "CUDA graphs may capture any batch, as with vLLM's kernel")
# fmt: on
