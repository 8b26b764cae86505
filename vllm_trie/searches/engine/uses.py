"""What searches call, read or rely on in vLLM, without code that could record it."""

from vllm_trie.hooks.ledger.record import TOKEN_LISTS, of_beams

# fmt: off

_beams = of_beams()
_beams("config.model:ModelConfig.get_vocab_size", "called",
    "the most candidates that a row can ask for, and the tokens of the check's prompts", "")
_beams("config.vllm:VllmConfig.num_lookahead_tokens", "read",
    "whether a drafter writes KV behind the last block of a beam")
_beams("config.speculative:SpeculativeConfig.parallel_drafting", "read",
    "whether a drafter has inputs for the step's tokens only")
_beams("v1.sample.logits_processor:LOGITSPROCS_GROUP", "read",
    "names the installed logits processors, whose arguments beam requests cannot have")
for _protocol in ("completion.protocol:Completion", "chat_completion.protocol:ChatCompletion"):
    _beams(f"entrypoints.openai.{_protocol}Request.extract_structured_outputs", "called",
        "the grammar of a request with use_beam_search", "")
_offline = "entrypoints.common.offline:OfflineInferenceMixin."
for _method_name, _parameters in (
    ("_preprocess_cmpl", "prompts"), ("_lora_request_to_seq", "lora_request num_requests"),
    ("_priority_to_seq", "priority num_requests"), ("_params_to_seq", "params num_requests"),
    ("_render_and_run_requests", "prompts params output_type lora_requests priorities use_tqdm"),
):
    _beams(_offline + _method_name, "called", "runs the searches of LLM.beam_search", _parameters)
_beams("v1.core.sched.scheduler:Scheduler._free_request", "called", "frees proxies", "request")
_beams("v1.core.sched.scheduler:Scheduler._free_encoder_inputs", "called",
    "releases images of prompts that are computed", "request")
_beams("v1.core.sched.output:NewRequestData", "made", "a beam's slot on Model Runner V2",
    "req_id prompt_token_ids mm_features sampling_params pooling_params block_ids "
    "num_computed_tokens lora_request prefill_token_ids")
_beams("v1.core.sched.output:CachedRequestData", "changed", "proxies whose beams decode leave it",
    "req_ids resumed_req_ids new_token_ids all_token_ids new_block_ids num_computed_tokens "
    "num_output_tokens")
_beams("v1.core.sched.output:SchedulerOutput", "changed",
    "carries the beams and the copies of their blocks; proxies whose beams decode leave its "
    "encoder_input_updates, which vLLM 0.33 adds", "kv_cache_block_copies")
_beams("v1.request:Request", "made", "its subclass stands for a group, the proxy",
    "request_id prompt_token_ids")
_beams("v1.request:Request.update_block_hashes", "relied on",
    "writes block_hashes, which proxies share with their search", "")
_beams("v1.request:Request.append_output_token_ids", "relied on",
    "writes _output_token_ids and _all_token_ids, which a proxy replaces", "token_ids")
_beams("v1.request:Request.take_prefill_stats", "called", "of a search's first output", "")
_beams("v1.engine:EngineCoreOutput", "made", "the whole output of a search",
    "request_id new_token_ids finish_reason kv_transfer_params")
for _method_name, _parameters in (
    ("accept_tokens", "request_id tokens"), ("rollback", "num_tokens"), ("reset", ""),
    ("fill_bitmask", "bitmask batch_index"),
):
    _beams(f"v1.structured_output.backend_types:StructuredOutputGrammar.{_method_name}", "called",
        "one matcher walks the hypotheses of a search", _parameters)
_beams("v1.structured_output.backend_types:StructuredOutputBackend.allocate_token_bitmask",
    "called", "the masks of a search's beams", "max_num_seqs")
_beams("v1.structured_output.request:StructuredOutputRequest.grammar", "read",
    "the grammar that vLLM has compiled for a search")
_beams("v1.worker.gpu.mm.rope:RopeState.init_prefill_positions", "relied on",
    "writes prefill_delta, which beams take over from their prompt", "req_idx")
_beams("v1.worker.gpu.async_utils:stream", "called",
    "copies candidates in the stream of a step's output", "to_stream from_stream",
    until=TOKEN_LISTS)
_beams("v1.worker.gpu.async_utils:AsyncOutput.get_output", "set",
    "sends the candidates of a step with its output", "", until=TOKEN_LISTS)
_beams("v1.worker.gpu_input_batch:InputBatch.req_ids", "relied on",
    "returns _req_ids, which the beams of a step enter")
_beams("v1.core.kv_cache_manager:KVCacheManager.estimate_cached_tokens", "called",
    "tokens of a prompt that need no blocks", "request")
_beams("v1.core.kv_cache_manager:KVCacheManager.allocate_slots", "set",
    "in the plugin's schedulers: takes blocks for all beams of a group where vLLM schedules the "
    "request that stands for it", "request")
_beams("v1.outputs:SamplerOutput", "made", "a step of beams only needs no sampler",
    "sampled_token_ids logprobs_tensors")
_beams("v1.outputs:ModelRunnerOutput", "changed", "carries the candidates", "req_ids")
_beams("v1.core.kv_cache_utils:KVCacheBlockCopy", "made", "the copy of a tail block",
    "src_block_id dst_block_id")
_manager = "v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager."
_beams(f"{_manager}get_num_skipped_tokens", "called", "blocks that a search does not need",
    "num_computed_tokens")
_beams(f"{_manager}records_new_block_ids", "read", "whether new blocks of beams are recorded")
_beams(f"{_manager}remove_skipped_blocks", "called", "gives back blocks before a prompt's window",
    "request_id processed_computed_tokens")
_beams("v1.core.block_pool:BlockPool.get_new_blocks", "called", "blocks of beams", "num_blocks")
_beams("v1.core.block_pool:BlockPool.free_blocks", "called", "gives back blocks of beams",
    "ordered_blocks")
# fmt: on
