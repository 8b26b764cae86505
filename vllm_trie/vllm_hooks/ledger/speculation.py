"""The ledger's entries for tree speculation."""

from __future__ import annotations

from functools import partial

from vllm_trie.vllm_hooks.ledger.patch import Patch
from vllm_trie.vllm_hooks.ledger.record import group

_PLUGGABLE = "speculative methods can be registered by plugins"
_TREE_DRAFTS = "vLLM verifies trees of drafts itself"
_TREE_MASKS = "attention metadata carries tree masks"
_STATS = "proposers can report statistics"
_TESTED = "tree attention has been run on enough devices"

_verified = partial(group, until=_TREE_DRAFTS)
_masked = partial(group, until=_TREE_MASKS)

_proposer = group(
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.",
    until=_TREE_DRAFTS,
    point="request_proposer",
)
_runner = _verified("vllm.v1.worker.gpu_model_runner:GPUModelRunner.", point="draft_verifier")
_at_start = _verified("vllm.v1.worker.gpu_model_runner:GPUModelRunner.")
_cpu_worker = _verified("vllm.v1.worker.cpu_worker:", platform="cpu", point="draft_verifier")
_cpu_attention = _masked("vllm.v1.attention.backends.cpu_attn:CPUAttention", platform="cpu")
_sampling = _verified("vllm.v1.sample.")
_any = group("vllm.")

_trained = group(
    "vllm.",
    until="a proposer can be a part of another, and gets the accepted tokens of a tree",
)

_v2_runner = _verified("vllm.v1.worker.gpu.")
_v2_trained = group(
    "vllm.v1.worker.gpu.spec_decode.speculator:",
    until="a speculator can be a part of another",
)
_v2_overridden = _verified("vllm.v1.worker.gpu.model_runner:GPUModelRunner.")

_ATTENTION_FORWARD = (
    "layer query key value kv_cache attn_metadata output output_scale output_block_scale"
)
"""Parameters of an attention implementation's ``forward`` on every device."""

# fmt: off
SPECULATION_PATCHES: tuple[Patch, ...] = (
    # Set-up
    _any("config.speculative:SpeculativeConfig.num_speculative_tokens_per_batch_size", "set",
        "keeps the scheduler from padding requests with one token left to a full draft",
        until="vLLM pads such requests only where they fit a step"),
    _any("config.speculative:logger", "changed",
        "drops the warning that custom_class is experimental, once a method of the plugin uses it",
        until=_PLUGGABLE),
    _any("engine.arg_utils:EngineArgs.async_scheduling", "set",
        "off where it was left open and Model Runner V1 serves, instead of off with a warning",
        until=_PLUGGABLE),
    _any("v1.spec_decode.custom_class_proposer:create_custom_proposer", "relied on",
        "instantiates the proposer from the class path in the configuration", "vllm_config",
        until=_PLUGGABLE),
    # Worker
    _cpu_worker("CPUWorker.init_device", "overridden",
        "registers the attention backend, makes the runner with trees", "",
        successor="no worker class of the plugin: the runner binds its proposer"),
    _cpu_worker("CPUModelRunner", "subclassed", "the class that the worker makes its runner of",
        "vllm_config device", wrapper="worker.cpu_worker:TreeCPUModelRunner", scope="tree_runner",
        successor="nothing; the runner stays vLLM's"),
    _cpu_worker("CPUModelRunner", "subclassed", "the same, where vLLM verifies the drafts",
        "vllm_config device", wrapper="worker.cpu_worker:ChainCPUModelRunner",
        scope="chain_runner", successor="nothing; the runner stays vLLM's"),
    _cpu_worker("CPUWorker.compile_or_warm_up_model", "overridden",
        "measures step costs once the model is ready", "", successor="`DraftVerifier.warm_up()`"),
    _cpu_worker("CPUWorker.shutdown", "overridden", "saves what was learned", "",
        successor="nothing; the last save is at the exit of the process"),
    _runner("load_model", "overridden",
        "refuses a model whose attention layers do not know of trees; hands a trained drafter to "
        "its union",
        successor="the check is in the proposer's `load_model()`"),
    _runner("_prepare_inputs", "overridden",
        "positions of tree nodes follow their depth; a step without drafts is prepared as if "
        "speculative_config were None", "scheduler_output num_scheduled_tokens",
        successor="`DraftVerifier.place_drafts()`"),
    _runner("_calc_spec_decode_metadata", "overridden",
        "computes the rows with logits alone, not what vLLM's rejection sampler reads",
        "num_draft_tokens cu_num_scheduled_tokens",
        successor="`DraftVerifier.spec_decode_metadata()`"),
    _runner("execute_model", "overridden",
        "takes the duration of a step, for the adaptive node budget",
        successor="`DraftVerifier.start_step()`"),
    _runner("_build_attention_metadata", "overridden", "hands the trees to the attention backend",
        until=_TREE_MASKS, point="draft_trees",
        successor="a field, filled from `DraftVerifier.draft_trees()`"),
    _runner("_sample", "overridden",
        "walks down the trees losslessly and puts the KV of accepted nodes in place",
        "logits spec_decode_metadata", successor="`DraftVerifier.verify()`"),
    _proposer("propose_draft_token_ids", "overridden",
        "gives drafters request ids, hidden states of the accepted node and budgets",
        "scheduler_output sampled_token_ids sampling_metadata hidden_states sample_hidden_states "
        "aux_hidden_states spec_decode_metadata common_attn_metadata",
        until="proposers get request ids and hidden states",
        successor="`RequestProposer.propose_for_step()`"),
    _proposer("take_draft_token_ids", "overridden",
        "drafts, after vLLM has sent the step's tokens off", "",
        successor="`RequestProposer.propose_for_step()`, before they are sent"),
    _runner("sample_tokens", "overridden",
        "attaches the worker's statistics to its output; runs as if speculative_config were None "
        "where no drafts are wanted", "grammar_output", until=_STATS,
        point="proposer_stats", successor="`RequestProposer.take_stats()`"),
    _proposer("_on_request_state_removed", "overridden", "forgets the trees of ended requests",
        "req_id req_state", successor="`RequestProposer.remove_request()`"),
    _proposer("_input_fits_in_drafter", "overridden",
        "keeps length limits per request, not for the whole batch", "common_attn_metadata",
        successor="`RequestProposer.keeps_to_max_model_len()`"),
    _any("v1.worker.gpu_model_runner:build_logitsprocs", "wrapped",
        "min_p and logit_bias, which vLLM leaves out with any speculation",
        "vllm_config device is_pin_memory is_pooling_model custom_logitsprocs",
        wrapper="worker.verification.sampling:wrap_build_logitsprocs", scope="tree_runner",
        until="vLLM's rejection sampler applies logits processors"),
    _any("v1.sample.logits_processor:BUILTIN_LOGITS_PROCESSORS", "read",
        "the processors of an engine without speculation",
        until="vLLM's rejection sampler applies logits processors"),
    _at_start("finalize_kv_connector", "called", "in steps in which no drafts are wanted", ""),
    _at_start("_dummy_run", "called", "at start-up: first step costs for the adaptive node budget",
        "num_tokens"),
    _at_start("_sync_device", "called", "at start-up: waits until a pass is done, to time it", ""),
    _any("distributed.parallel_state:get_tp_group", "called", "sends rank 0's trees to all ranks",
        "", until=_TREE_DRAFTS),
    # Trained drafters
    _trained("config.speculative:SpeculativeConfig.use_gemma4_mtp", "called",
        "refuses MTP layers that share the model's KV cache", ""),
    _trained("config.speculative:SpeculativeConfig.use_step3p5_mtp", "called", "the same", ""),
    _trained("config.speculative:SpeculativeConfig.use_multi_module_mtp", "called",
        "refuses MTP with several modules on Model Runner V2", ""),
    _trained("config.speculative:SpeculativeConfig.disable_padded_drafter_batch", "set",
        "drafting waits for the step's tokens on the host"),
    _trained("v1.worker.gpu_model_runner:GPUModelRunner.__init__", "overridden",
        "sets it, once vLLM's proposer is made", "vllm_config device"),
    _trained("v1.worker.gpu_model_runner:GPUModelRunner.get_model", "called",
        "hidden states that a model has for its MTP layers", ""),
    _trained("v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.propose", "called",
        "feeds the accepted tokens and drafts a chain",
        "num_speculative_tokens target_token_ids target_positions target_hidden_states "
        "next_token_ids token_indices_to_sample common_attn_metadata sampling_metadata"),
    _trained("v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer._greedy_sample", "set",
        "keeps the probabilities of the tokens that are drafted, and of others", "hidden_states"),
    _trained("v1.spec_decode.vocab_mapping:VocabMapping.constrain_draft_logits", "called",
        "drafters with another vocabulary, as in vLLM's sampling"),
    _trained("v1.spec_decode.vocab_mapping:VocabMapping.map_draft_to_target_ids", "called",
        "the same"),
    _trained("v1.attention.backend:CommonAttentionMetadata", "made",
        "describes the accepted tokens of the requests that the proposer drafts for, and by the "
        "check of a GPU random steps",
        "query_start_loc query_start_loc_cpu seq_lens num_reqs num_actual_tokens max_query_len "
        "max_seq_len block_table_tensor slot_mapping causal seq_lens_cpu_upper_bound"),
    # Verification
    _sampling("sampler:Sampler.forward", "called", "at each level of the walk",
        "logits sampling_metadata"),
    _sampling("sampler:Sampler.greedy_sample", "called", "for batches of plain greedy requests",
        "logits"),
    _sampling("logits_processor.builtin:MinTokensLogitsProcessor", "read",
        "min_tokens counts accepted nodes as output"),
    _sampling("rejection_sampler:expand_batch_to_tokens", "wrapped",
        "vLLM's kernel for CPUs fills a copy of its output, so that chains were sampled with "
        "uninitialized temperatures", "x cu_num_tokens num_tokens replace_from replace_to",
        wrapper="worker.verification.sampling:wrap_expand_batch_to_tokens", platform="cpu",
        until="vLLM's `_expand_kernel_impl` writes to its output"),
    _sampling("rejection_sampler:RejectionSampler.parse_output", "relied on",
        "reads rows of sampled tokens padded with -1", "output_token_ids vocab_size"),
    # Attention
    _any("v1.attention.backends.registry:register_backend", "called",
        "tree attention in place of CPU_ATTN", "backend class_path", until=_TREE_MASKS),
    _any("v1.attention.backends.registry:AttentionBackendEnum.CPU_ATTN.clear_override", "called",
        "an earlier engine in the same process may have left tree attention in place", "",
        platform="cpu", until=_TREE_MASKS),
    _any("v1.attention.selector:_cached_get_attn_backend.cache_clear", "called",
        "an earlier engine in the same process may have cached vLLM's backend",
        until=_TREE_MASKS, point="backend_overrides",
        successor="overrides are part of the cache's key"),
    _cpu_attention("BackendImpl.forward", "overridden", "gives rows with trees tree attention",
        _ATTENTION_FORWARD),
    _cpu_attention("MetadataBuilder._set_isa_to_layers", "called",
        "the vector kernel in place of AMX, whose cache layout the plugin does not read",
        "layer_names", until="tree attention reads the AMX layout"),
    _any("_custom_ops:cpu_attn_get_scheduler_metadata", "called",
        "plans the stock kernel's work for the rows without trees",
        "num_reqs num_heads num_kv_heads head_dim seq_lens dtype query_start_loc causal "
        "sliding_window_size isa enable_kv_split",
        until="tree attention also serves the rows without trees as fast as the stock kernel",
        platform="cpu"),
)
# fmt: on

# fmt: off
V2_PATCHES: tuple[Patch, ...] = (
    _verified("vllm.v1.worker.cpu.model_runner:", platform="cpu")("CPUModelRunner", "subclassed",
        "Model Runner V2 that drafts", "vllm_config device",
        wrapper="worker.cpu_worker:DraftingCPUModelRunnerV2", scope="v2_runner"),
    _verified("vllm.v1.worker.gpu.model_runner:", platform="cuda")("GPUModelRunner", "subclassed",
        "Model Runner V2 that drafts", "vllm_config device",
        wrapper="worker.cuda_worker:DraftingGPUModelRunnerV2", scope="v2_runner"),
    _v2_runner("model_runner:init_speculator", "wrapped", "makes the plugin's speculator",
        "vllm_config device req_states", wrapper="worker.runners.runner_v2:wrap_init_speculator",
        scope="v2_runner",
        until=_PLUGGABLE),
    _any("config.speculative:SpeculativeConfig.use_ngram", "wrapped",
        "keeps the requests' text off the device, which only vLLM's own n-grams read", "",
        wrapper="worker.runners.runner_v2:wrap_use_ngram", scope="v2_stage",
        until=_PLUGGABLE),
    _v2_runner("spec_decode.speculator:BaseSpeculator.propose", "overridden",
        "proposes the drafters' drafts",
        "input_batch attn_metadata slot_mappings last_hidden_states dummy_run "
        "num_speculative_tokens"),
    _v2_trained("DraftModelSpeculator.propose", "set",
        "drafts for the union, whose drafts it returns",
        "input_batch attn_metadata slot_mappings last_hidden_states dummy_run "
        "num_speculative_tokens"),
    _v2_trained("DraftModelSpeculator._maybe_predict_acceptance", "set",
        "keeps the probabilities of the tokens that are drafted", "logits idx_mapping draft_step"),
    _v2_trained("DraftModelSpeculator.__init__", "relied on",
        "makes draft_tokens, and num_speculative_steps, which is set to the length of the chains",
        "vllm_config device"),
    _v2_overridden("load_model", "overridden",
        "loads the drafter's weights; the rejection sampler learns how much was drafted, or gives "
        "way to the plugin's, and the model state hands trees to the attention backend"),
    _v2_overridden("initialize_kv_cache", "overridden",
        "takes the cache tensors, in which accepted nodes' KV moves, and tries again where CUDA "
        "graphs take one length only", "kv_cache_config is_profiling"),
    _v2_overridden("_dummy_sampler_run", "overridden",
        "memory profiling sees the logits of a step with full drafts", "hidden_states",
        until="vLLM profiles the logits of drafts"),
    _v2_overridden("take_draft_token_ids", "overridden", "drafts before the scheduler asks", ""),
    _v2_overridden("prepare_attn", "overridden",
        "positions of tree nodes follow their depth, once the KV slots follow from flat ones",
        "input_batch"),
    _v2_overridden("finish_requests", "overridden", "forgets ended requests", "scheduler_output"),
    _v2_overridden("add_requests", "overridden",
        "keeps the requests' text on the host, for drafters", "scheduler_output"),
    _v2_overridden("execute_model", "overridden",
        "drafts, and verifies as many tokens as were drafted", "scheduler_output"),
    _v2_runner("spec_decode.utils:DraftTokensHandler.set_draft_tokens", "called",
        "hands drafts to the scheduler, for structured outputs", "input_batch draft_tokens"),
    _v2_overridden("prepare_inputs", "overridden", "finds the step's drafts", "scheduler_output"),
    _v2_overridden("_set_active_loras", "overridden",
        "names the adapter of each row of logits; vLLM names one for each request, which is wrong "
        "with drafts", "prompt_lora_mapping",
        until="vLLM maps rows of logits to adapters on Model Runner V2"),
    _v2_overridden("sample", "overridden", "starts the copy of the sampled tokens to the host",
        "hidden_states input_batch grammar_output"),
    _v2_overridden("sample_tokens", "overridden", "attaches the worker's statistics to its output",
        "grammar_output", until=_STATS),
    _v2_runner("spec_decode.rejection_sampler:RejectionSampler.__init__", "called",
        "the plugin's samplers derive from it", "sampler spec_config device watermark_key"),
    _v2_runner("spec_decode.rejection_sampler:RejectionSampler.__call__", "overridden",
        "verifies drafts and no fillers, or trees",
        "logits input_batch draft_logits invalid_drafts"),
    _v2_runner("spec_decode.adaptive_verification:maybe_create_adaptive_verification_manager",
        "relied on", "gives CUDA graphs of drafts of any length, and the durations of steps",
        "enable_adaptive_verification attn_groups"),
    _v2_runner("spec_decode.adaptive_verification:AdaptiveVerificationManager.set_cost_curves",
        "relied on", "leaves the durations in cost_tables", "draft_curve verify_curve"),
    _v2_runner("cudagraph_utils:CudaGraphManager.capture", "relied on",
        "leaves the captured graphs in `graphs`, by description", "create_forward_fn"),
    _v2_runner("model_states.interface:ModelState.prepare_attn", "set",
        "makes the metadata of each layer, which then carries the step's trees",
        until=_TREE_MASKS),
    _v2_runner("warmup:_warmup_block_counter", "called",
        "by the check at start-up: the KV blocks of its requests", "model_runner",
        until=_TESTED),
    _v2_runner("kv_connector:KVConnector.set_disabled", "called",
        "by the check at start-up: its requests have no KV elsewhere", "disabled",
        until=_TESTED),
    _any("v1.core.sched.output:CachedRequestData.make_empty", "called",
        "by the check at start-up: steps as the scheduler makes them", "", until=_TESTED),
    _v2_runner("sample.sampler:Sampler.sample", "called", "samples each row of logits once",
        "logits expanded_idx_mapping idx_mapping idx_mapping_np pos input_ids expanded_local_pos "
        "seq_lens_upper_bound_np"),
    _v2_runner("sample.gumbel:gumbel_sample", "relied on",
        "noise depends on a request's seed, the position and the token alone", "logits"),
    _v2_runner("sample.logprob:compute_topk_scores", "called", "logprobs along the accepted path",
        "logits num_logprobs sampled_token_ids cu_num_logits"),
    _v2_runner("sample.output:SamplerOutput", "made", "the tokens of a step with trees",
        "sampled_token_ids logprobs_tensors num_nans num_sampled num_rejected"),
    _v2_runner("input_batch:get_num_sampled_and_rejected", "called",
        "requests whose prefill goes on have no tokens",
        "num_sampled seq_lens cu_num_logits idx_mapping prefill_len"),
    _v2_runner("metrics.logits:get_num_nans", "called", "as vLLM's sampler does", "logits"),
    _v2_runner("spec_decode.rejection_sampler:get_max_chunk_logits", "called",
        "bounds float32 copies of logits", "vocab_size"),
    _v2_runner("async_utils:async_copy_to_np", "called", "copies sampled tokens to the host", "x"),
    _v2_runner("async_utils:AsyncOutput.__init__", "relied on",
        "the output that the scheduler gets is in its model_runner_output", "model_runner_output"),
    _any("v1.core.sched.output:SchedulerOutput.num_invalid_spec_tokens", "set",
        "keeps fillers out of the count of draft tokens", until=_STATS),
    _any("utils.torch_utils:async_tensor_h2d", "called", "copies drafts to the device",
        "data device", until=_PLUGGABLE),
)
# fmt: on

_worker = group("vllm.v1.worker.", platform="cuda", until=_TREE_DRAFTS)
_triton = _masked("vllm.v1.attention.backends.triton_attn:TritonAttention", platform="cuda")
_check = group("vllm.v1.", platform="cuda", until=_TESTED)

# fmt: off
GPU_PATCHES: tuple[Patch, ...] = (
    _worker("gpu_worker:Worker.init_device", "overridden",
        "registers the attention backend, makes the runner with trees", ""),
    _worker("gpu_model_runner:GPUModelRunner", "subclassed",
        "the class that the worker makes its runner of", "vllm_config device",
        wrapper="worker.cuda_worker:TreeGPUModelRunner", scope="tree_runner"),
    _worker("gpu_model_runner:GPUModelRunner", "subclassed",
        "the same, where vLLM verifies the drafts", "vllm_config device",
        wrapper="worker.cuda_worker:ChainGPUModelRunner", scope="chain_runner"),
    _worker("gpu_worker:Worker.compile_or_warm_up_model", "overridden",
        "checks tree attention on the device before serving", "", until=_TESTED),
    _worker("gpu_worker:Worker.shutdown", "overridden", "saves what was learned", ""),
    _worker("gpu_model_runner:GPUModelRunner._dummy_sampler_run", "overridden",
        "memory profiling sees the logits of a step with trees", "hidden_states"),
    _masked("vllm.v1.attention.backends.registry:", platform="cuda")("AttentionBackendEnum.CUSTOM",
        "registered", "tree attention as a backend of its own"),
    _triton("Impl.forward", "overridden", "gives all rows but prefill chunks tree attention",
        _ATTENTION_FORWARD),
    _triton("MetadataBuilder.build", "overridden", "adds the buffers that hold the step's trees",
        "common_prefix_len common_attn_metadata fast_build"),
    _triton("MetadataBuilder.build_for_cudagraph_capture", "overridden",
        "marks the step; a graph of the tree kernel serves every row", "common_attn_metadata"),
    _triton("MetadataBuilder._cudagraph_support", "overridden",
        "CUDA graphs may capture any batch, as with vLLM's kernel"),
    _triton("Backend.supports_mm_prefix", "overridden", "answers no", ""),
    _triton("Backend.supports_rswa", "overridden", "answers no", ""),
    _triton("Backend.supports_batch_invariance", "overridden", "answers no", ""),
    _check("attention.backends.triton_attn:TritonAttentionImpl.do_kv_cache_update", "called",
        "by the check: shows the layout of the KV cache", "layer key value kv_cache slot_mapping"),
    _check("worker.utils:AttentionGroup.get_metadata_builder", "called",
        "by the check: the builder that steps will use", ""),
)
# fmt: on
