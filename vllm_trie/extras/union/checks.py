"""Configurations that a trained drafter cannot draft in, and what of vLLM it relies on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_trie.hooks.ledger.record import Symbols
from vllm_trie.refusal import RefusedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# fmt: off
_refused = Symbols(
    "config.speculative:SpeculativeConfig.",
    "a proposer can be a part of another, and gets the accepted tokens of a tree")
_refused("use_gemma4_mtp", "called", "refuses MTP layers that share the model's KV cache", "")
_refused("use_multi_module_mtp", "called",
    "refuses MTP with several modules on Model Runner V2", "")
_refused("use_step3p5_mtp", "called", "the same", "")
_refused("parallel_drafting", "read", "refuses drafters whose logits are not shown")
_refused("num_speculative_tokens", "set", "a speculator is made for the positions that it predicts")
_speculator = Symbols(
    "v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator.",
    "a speculator can be a part of another")
_speculator("__init__", "relied on",
    "makes draft_tokens, and num_speculative_steps, which is N while CUDA graphs are chosen",
    "vllm_config device")
_speculator("load_model", "relied on",
    "marks the drafter's layers, which see no trees and whose KV stays", "target_model")
_speculator("_maybe_predict_acceptance", "set",
    "keeps the likeliest tokens of each position", "logits idx_mapping draft_step")
_speculator("init_cudagraph_manager", "set",
    "chooses graphs of whole batches, which verify N tokens a request", "cudagraph_mode")
_speculator("propose", "set",
    "drafts for the union, whose drafts it returns, from a step without trees",
    "input_batch attn_metadata slot_mappings last_hidden_states aux_hidden_states dummy_run "
    "num_speculative_tokens")
_parallel = Symbols("v1.worker.gpu.spec_decode.", "a speculator can be a part of another")
_parallel("dflash.speculator:DFlashSpeculator._generate_draft", "relied on",
    "shows the logits of all positions in one call", "num_reqs")
_parallel("dflash2.speculator:CandidateSampler.sample", "set",
    "keeps the candidates of all positions and their scores after each candidate",
    "candidate_ids scores num_reqs sample_pos idx_mapping")
_parallel("dflash2.speculator:CandidateSampler.__init__", "relied on",
    "makes scores, which are then those along the chain", "max_num_reqs num_steps top_k device")
_parallel("dflash2.speculator:DFlash2Speculator.__init__", "relied on",
    "makes candidate_sampler", "vllm_config device")
_parallel("dspark.speculator:DSparkSpeculator._sample_logits", "relied on",
    "shows logits of the drafter's vocabulary, which its model maps to the target's", "logits step")
# fmt: on

_PARALLEL = ("DFlashDraftModel", "DFlash2DraftModel", "LiLiCorrDraftModel", "Qwen3DSparkModel")
"""Architectures that predict all positions in one pass, and show the logits of each or its
candidates."""


def check_trained_drafter(vllm_config: VllmConfig, method: str, model: str | None) -> None:
    """Refuse a complete configuration that the trained drafter cannot draft in.

    Raises:
        RefusedError: Every reason at once.
    """
    speculative: Any = vllm_config.speculative_config
    parallel = vllm_config.parallel_config
    is_other = speculative.method != method
    other_vocabulary = speculative.use_heterogeneous_vocab  # vLLM then takes Model Runner V1
    architectures = speculative.draft_model_config.architectures
    problems = {
        "this engine runs on Model Runner V1, and trained drafters in a union need V2; run on an "
        "NVIDIA GPU without VLLM_USE_V2_MODEL_RUNNER=0, or leave trie_union out for vLLM's own "
        f"method {speculative.method!r}": not vllm_config.use_v2_model_runner
        and not other_vocabulary,
        "use_heterogeneous_vocab=True is not supported, as Model Runner V2 maps no tokens; take a "
        "draft model with the model's vocabulary, or leave trie_union out for vLLM's own method "
        "'draft_model'": other_vocabulary,
        "MTP with several modules is not supported; use vLLM's own method 'mtp'": (
            speculative.use_multi_module_mtp()
        ),
        f"vLLM takes the checkpoint {model!r} for method {speculative.method!r}; write "
        f"'method': {speculative.method!r} if it is allowed, or rename the folder, whose name vLLM "
        "goes by": is_other,
        "the MTP layers of this model share the model's KV cache, which the plugin does not "
        "handle; use vLLM's own method 'mtp' without trie_union": not is_other
        and (speculative.use_gemma4_mtp() or speculative.use_step3p5_mtp()),
        "KV connectors (kv_transfer_config) are not supported; leave the setting out": (
            vllm_config.kv_transfer_config is not None
        ),
        f"parallel drafting by {', '.join(architectures)} is not supported; allowed: "
        f"{', '.join(_PARALLEL)}": speculative.parallel_drafting
        and not {*architectures} & {*_PARALLEL},
        "models with multimodal inputs are not supported; use a text model": (
            vllm_config.model_config.supports_multimodal_inputs
        ),
        "drafters with multimodal rotary positions (M-RoPE) are not supported": (
            speculative.draft_model_config.uses_mrope
        ),
    }
    reasons = [reason for reason, applies in problems.items() if applies]
    # A drafter that one rank alone gives up would leave the others waiting for it.
    for part, name, allowed in (
        (parallel, "data_parallel_size", 1),
        (parallel, "tensor_parallel_size", 1),
        (parallel, "pipeline_parallel_size", 1),
        (speculative, "draft_sample_method", "greedy"),
        (speculative, "rejection_sample_method", "standard"),
        (speculative, "use_local_argmax_reduction", False),
        (speculative, "enable_adaptive_verification", False),
    ):
        if (value := getattr(part, name)) != allowed:
            reasons.append(f"{name}={value!r} is not supported; set it to {allowed!r}")
    if reasons:
        raise RefusedError(
            f"trie_union cannot run with {{'method': {method!r}}} among its drafters here:"
            "\n- " + "\n- ".join(reasons)
        )
