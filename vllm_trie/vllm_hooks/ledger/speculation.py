"""The ledger's lines for tree speculation."""

from __future__ import annotations

from vllm_trie.vllm_hooks.ledger.patch import Hook

ATTENTION_FORWARD = (
    "layer",
    "query",
    "key",
    "value",
    "kv_cache",
    "attn_metadata",
    "output",
    "output_scale",
    "output_block_scale",
)
"""Parameters of an attention implementation's ``forward``, whatever the device."""
_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_PLUGGABLE = "speculative methods can be registered by plugins"
_TREE_DRAFTS = "vLLM verifies trees of drafts itself"

SPECULATION_HOOKS: tuple[Hook, ...] = (
    Hook(
        "vllm.engine.arg_utils:EngineArgs.add_cli_args",
        "wrapped: the methods as choices of --spec-method, --speculative-model as an alias",
        parameters=("parser",),
        retire_when=_PLUGGABLE,
        extension_point="speculative_methods",
    ),
    Hook(
        "vllm.engine.arg_utils:EngineArgs.create_speculative_config",
        "wrapped: rewrites a method of ours to custom_class",
        parameters=("target_model_config", "target_parallel_config"),
        retire_when=_PLUGGABLE,
        extension_point="speculative_methods",
    ),
    Hook(
        "vllm.engine.arg_utils:EngineArgs.create_engine_config",
        "wrapped: refuses unsupported configurations at start-up",
        retire_when=_PLUGGABLE,
        extension_point="speculative_methods",
    ),
    Hook(
        "vllm.config.speculative:SpeculativeConfig.num_speculative_tokens_per_batch_size",
        "set: keeps the scheduler from padding requests with one token left to a full draft",
        retire_when="vLLM pads such requests only where they fit a step",
    ),
    Hook(
        "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
        "wrapped: checks extra_args['speculation'] where a bad value is an error of one request",
        parameters=("request_id", "prompt", "params"),
        retire_when="requests can opt out of speculation",
        extension_point="request_extension",
    ),
    Hook(
        "vllm.v1.spec_decode.custom_class_proposer:create_custom_proposer",
        "relied on: instantiates the proposer from the class path in the configuration",
        parameters=("vllm_config",),
        retire_when=_PLUGGABLE,
    ),
    Hook(
        "vllm.v1.worker.cpu_worker:CPUWorker.init_device",
        "overridden in a subclass: registers the attention backend, adds the runner's mixin",
        parameters=(),
        retire_when=_TREE_DRAFTS,
        extension_point="draft_verifier",
        platform="cpu",
    ),
    Hook(
        "vllm.v1.attention.backends.registry:register_backend",
        "called: tree attention in place of CPU_ATTN",
        parameters=("backend", "class_path"),
        retire_when="attention metadata carries tree masks",
    ),
    Hook(
        "vllm.v1.attention.selector:_cached_get_attn_backend.cache_clear",
        "called: an earlier engine in the same process may have cached the stock backend",
        retire_when="attention metadata carries tree masks",
        extension_point="backend_overrides",
    ),
    Hook(
        f"{_RUNNER}.load_model",
        "overridden: refuses a model whose attention layers do not know of trees",
        retire_when="attention metadata carries tree masks",
        extension_point="draft_verifier",
    ),
    Hook(
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.forward",
        "overridden in a subclass: rows with trees get tree attention",
        parameters=ATTENTION_FORWARD,
        retire_when="attention metadata carries tree masks",
        platform="cpu",
    ),
    Hook(
        "vllm._custom_ops:cpu_attn_get_scheduler_metadata",
        "called: plans the stock kernel's work for the rows without trees",
        parameters=(
            "num_reqs",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "seq_lens",
            "dtype",
            "query_start_loc",
            "causal",
            "sliding_window_size",
            "isa",
            "enable_kv_split",
        ),
        retire_when="tree attention also serves the rows without trees as fast as the stock kernel",
        platform="cpu",
    ),
    Hook(
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder._set_isa_to_layers",
        "called: the vector kernel in place of AMX, whose cache layout the plugin does not read",
        parameters=("layer_names",),
        retire_when="tree attention reads the AMX layout",
        platform="cpu",
    ),
    Hook(
        f"{_RUNNER}._prepare_inputs",
        "overridden: positions of tree nodes follow their depth; a step without drafts is prepared "
        "as if speculative_config were None",
        parameters=("scheduler_output", "num_scheduled_tokens"),
        retire_when=_TREE_DRAFTS,
        extension_point="draft_verifier",
    ),
    Hook(
        f"{_RUNNER}._preprocess",
        "overridden: nothing to look for in a step without drafts",
        retire_when=_TREE_DRAFTS,
        extension_point="draft_verifier",
    ),
    Hook(
        f"{_RUNNER}._calc_spec_decode_metadata",
        "overridden: the rows with logits alone, not what vLLM's rejection sampler reads",
        parameters=("num_draft_tokens", "cu_num_scheduled_tokens"),
        retire_when=_TREE_DRAFTS,
        extension_point="draft_verifier",
    ),
    Hook(
        f"{_RUNNER}.execute_model",
        "overridden: the time of a step, for the adaptive node budget",
        retire_when=_TREE_DRAFTS,
        extension_point="draft_verifier",
    ),
    Hook(
        f"{_RUNNER}._dummy_run",
        "called at start-up: first step costs for the adaptive node budget",
        parameters=("num_tokens",),
        retire_when=_TREE_DRAFTS,
    ),
    Hook(
        f"{_RUNNER}._sync_device",
        "called at start-up: waits until a pass is done, to time it",
        parameters=(),
        retire_when=_TREE_DRAFTS,
    ),
    Hook(
        "vllm.v1.worker.cpu_worker:CPUWorker.compile_or_warm_up_model",
        "overridden in a subclass: measures these costs once the model is ready",
        parameters=(),
        retire_when=_TREE_DRAFTS,
        extension_point="draft_verifier",
        platform="cpu",
    ),
    Hook(
        f"{_RUNNER}._build_attention_metadata",
        "overridden: hands the trees to the attention backend",
        retire_when="attention metadata carries tree masks",
        extension_point="draft_trees",
    ),
    Hook(
        f"{_RUNNER}._sample",
        "overridden: lossless walk down the trees, KV of accepted nodes put in place",
        parameters=("logits", "spec_decode_metadata"),
        retire_when=_TREE_DRAFTS,
        extension_point="draft_verifier",
    ),
    Hook(
        f"{_RUNNER}.propose_draft_token_ids",
        "overridden: drafters get request ids, hidden states of the accepted node and budgets",
        parameters=(
            "scheduler_output",
            "sampled_token_ids",
            "sampling_metadata",
            "hidden_states",
            "sample_hidden_states",
        ),
        retire_when="proposers get request ids and hidden states",
        extension_point="request_proposer",
    ),
    Hook(
        f"{_RUNNER}.sample_tokens",
        "overridden: hangs the worker's statistics on its output; runs as if speculative_config "
        "were None where no drafts are wanted",
        parameters=("grammar_output",),
        retire_when="proposers can report statistics",
        extension_point="proposer_stats",
    ),
    Hook(
        f"{_RUNNER}._on_request_state_removed",
        "overridden: forgets the trees of ended requests",
        parameters=("req_id", "req_state"),
        retire_when=_TREE_DRAFTS,
        extension_point="request_proposer",
    ),
    Hook(
        f"{_RUNNER}._input_fits_in_drafter",
        "overridden: length limits are kept per request, not for the whole batch",
        parameters=("common_attn_metadata",),
        retire_when=_TREE_DRAFTS,
        extension_point="request_proposer",
    ),
    Hook(
        "vllm.v1.sample.sampler:Sampler.forward",
        "called at each level of the walk",
        parameters=("logits", "sampling_metadata"),
        retire_when=_TREE_DRAFTS,
    ),
    Hook(
        "vllm.v1.sample.sampler:Sampler.greedy_sample",
        "called for batches of plain greedy requests",
        parameters=("logits",),
        retire_when=_TREE_DRAFTS,
    ),
    Hook(
        "vllm.v1.sample.logits_processor.builtin:MinTokensLogitsProcessor",
        "read: min_tokens counts accepted nodes as output",
        retire_when=_TREE_DRAFTS,
    ),
    Hook(
        "vllm.v1.sample.rejection_sampler:RejectionSampler.parse_output",
        "relied on: reads rows of sampled tokens padded with -1",
        parameters=("output_token_ids", "vocab_size"),
        retire_when=_TREE_DRAFTS,
    ),
    Hook(
        "vllm.distributed.parallel_state:get_tp_group",
        "called: rank 0's trees are sent to all ranks",
        parameters=(),
        retire_when=_TREE_DRAFTS,
    ),
    Hook(
        "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
        "wrapped: takes the worker's statistics from its output",
        parameters=("scheduler_output", "model_runner_output"),
        retire_when="proposers can report statistics",
        extension_point="proposer_stats",
    ),
    Hook(
        "vllm.v1.core.sched.scheduler:Scheduler.add_request",
        "wrapped: sends a request's cache salt along to the worker",
        parameters=("request",),
        retire_when="proposers get the requests' cache salts",
        extension_point="cache_salt",
    ),
    Hook(
        "vllm.v1.core.sched.scheduler:Scheduler.make_stats",
        "wrapped: adds them to the speculation statistics that vLLM sends to the front end",
        parameters=("spec_decoding_stats",),
        retire_when="proposers can report statistics",
        extension_point="proposer_stats",
    ),
    Hook(
        "vllm.v1.metrics.stats:SchedulerStats.__dataclass_fields__",
        "annotation of spec_decoding_stats replaced by a subclass of its type",
        retire_when="proposers can report statistics",
        extension_point="proposer_stats",
    ),
    Hook(
        "vllm.v1.metrics.loggers:StatLoggerManager.__init__",
        "wrapped: adds the plugin's stat logger",
        parameters=("vllm_config", "engine_idxs", "custom_stat_loggers"),
        retire_when="stat logger plugins are loaded for LLM as for AsyncLLM",
        extension_point="stat_loggers",
    ),
)
