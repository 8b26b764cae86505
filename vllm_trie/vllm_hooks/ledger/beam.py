"""The ledger's lines for native beam search."""

from __future__ import annotations

from vllm_trie.vllm_hooks.ledger.patch import Hook

_SLOW = "vllm-project/vllm issues 14426, 20316, 49197"
_NATIVE = "vLLM serves beam search inside its scheduler"


def _hook(
    target: str,
    reason: str,
    parameters: tuple[str, ...] | None = None,
    upstream: str = _SLOW,
    retire_when: str = _NATIVE,
    point: str = "",
) -> Hook:
    return Hook(
        target, reason, parameters, upstream, retire_when, feature="beam", extension_point=point
    )


_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_PART = "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager"

BEAM_HOOKS: tuple[Hook, ...] = (
    _hook(
        "vllm.config.scheduler:SchedulerConfig.get_scheduler_cls",
        "wrapped: the schedulers with beam search take the place of vLLM's own",
        (),
        point="scheduler_provider",
    ),
    _hook(f"{_SCHEDULER}.add_request", "overridden: takes beam requests in", ("request",)),
    _hook(
        f"{_SCHEDULER}.schedule",
        "overridden: admits groups, tells the worker about forked rows",
        ("throttle_prefills",),
    ),
    _hook(
        f"{_SCHEDULER}.update_from_output",
        "overridden: takes the rows' outputs and steps the searches",
        ("scheduler_output", "model_runner_output"),
    ),
    _hook(
        f"{_SCHEDULER}._preempt_request",
        "overridden: a preempted row is sent to the worker anew",
        ("request", "timestamp", "drop_stale_output"),
    ),
    _hook(
        f"{_SCHEDULER}.finish_requests",
        "overridden: an aborted request takes its rows along",
        ("request_ids", "finished_status"),
    ),
    _hook(
        f"{_SCHEDULER}.update_draft_token_ids",
        "overridden: rows get no drafts",
        ("draft_token_ids",),
    ),
    _hook(
        f"{_SCHEDULER}.get_num_unfinished_requests",
        "overridden: groups that wait count as unfinished",
        (),
    ),
    _hook(
        f"{_SCHEDULER}.get_request_counts",
        "overridden: groups that wait count as waiting",
        (),
    ),
    _hook(
        f"{_SCHEDULER}.reset_prefix_cache",
        "overridden: copies that forks have queued give their blocks back first",
        ("reset_running_requests", "reset_connector"),
    ),
    _hook(f"{_SCHEDULER}._free_request", "called: frees dropped rows", ("request",)),
    _hook(
        "vllm.v1.core.sched.async_scheduler:AsyncScheduler._update_after_schedule",
        "overridden: rows do not run ahead of their outputs",
        ("scheduler_output",),
    ),
    _hook(
        "vllm.v1.core.sched.output:NewRequestData",
        "made: how a forked row reaches the worker",
        (
            "req_id",
            "prompt_token_ids",
            "mm_features",
            "sampling_params",
            "pooling_params",
            "block_ids",
            "num_computed_tokens",
            "lora_request",
            "prefill_token_ids",
        ),
    ),
    _hook(
        "vllm.v1.core.sched.output:CachedRequestData",
        "changed: forked rows leave it",
        (
            "req_ids",
            "resumed_req_ids",
            "new_token_ids",
            "all_token_ids",
            "new_block_ids",
            "num_computed_tokens",
            "num_output_tokens",
        ),
    ),
    _hook(
        f"{_PART}.take_pending_cow_copies",
        "relied on: drains the copy-on-write queue that forks append to",
        (),
        point="fork_request",
    ),
    _hook(
        "vllm.v1.core.kv_cache_manager:KVCacheManager.take_kv_cache_block_copies",
        "relied on: sends the queued copies to the worker",
        (),
    ),
    _hook(
        "vllm.v1.core.block_pool:BlockPool.touch",
        "called: shares blocks",
        ("blocks",),
        point="fork_request",
    ),
    _hook(
        "vllm.v1.core.block_pool:BlockPool.get_new_blocks",
        "called: the tail block of a fork",
        ("num_blocks",),
        point="fork_request",
    ),
    _hook(
        "vllm.config.model:ModelConfig.get_vocab_size",
        "called: most candidates that a row can ask for, and the tokens of the check's prompts",
        (),
    ),
    _hook("vllm.v1.request:Request", "made: rows", ("request_id", "prompt_token_ids")),
    _hook(
        "vllm.v1.engine:EngineCoreOutput",
        "made: a hypothesis is a member's whole output",
        ("request_id", "new_token_ids", "new_logprobs"),
    ),
    _hook(
        "vllm.sampling_params:SamplingParams._verify_greedy_sampling",
        "wrapped: n above 1 at temperature 0 is fine for beam requests",
        (),
        point="distinct_outputs",
    ),
    _hook(
        "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
        "wrapped: checks beam requests before they reach the engine",
        ("request_id", "prompt", "params"),
        point="request_extension",
    ),
    _hook(
        "vllm.v1.engine.output_processor:RequestState.make_request_output",
        "wrapped: takes the score out of the field it travels in",
        (
            "new_token_ids",
            "pooling_output",
            "finish_reason",
            "stop_reason",
            "kv_transfer_params",
        ),
        point="extension_result",
    ),
    _hook(
        "vllm.v1.engine.output_processor:RequestState._new_completion_output",
        "wrapped: attaches score and cumulative log-probability",
        ("token_ids", "finish_reason", "stop_reason"),
        point="extension_result",
    ),
    _hook(
        "vllm.entrypoints.generate.beam_search.offline:BeamSearchOfflineMixin.beam_search",
        "wrapped: LLM.beam_search on the native path",
        ("prompts", "params", "lora_request", "use_tqdm", "concurrency_limit"),
        point="beam_search_route",
    ),
    _hook(
        "vllm.entrypoints.generate.beam_search.online:BeamSearchOnlineMixin.beam_search",
        "wrapped: use_beam_search of the server on the native path",
        ("prompt", "request_id", "params", "lora_request", "trace_headers", "session_id"),
        point="beam_search_route",
    ),
    *(
        _hook(f"vllm.entrypoints.openai.{protocol}.{name}", reason, point=point)
        for protocol in (
            "completion.protocol:CompletionRequest",
            "chat_completion.protocol:ChatCompletionRequest",
        )
        for name, reason, point in (
            (
                "to_beam_search_params",
                "wrapped: keeps the request beside its parameters",
                "beam_search_route",
            ),
            (
                "to_sampling_params",
                "wrapped: refuses to stream a beam request",
                "request_extension",
            ),
        )
    ),
)
