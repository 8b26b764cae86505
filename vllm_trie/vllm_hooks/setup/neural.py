"""Engines with a trained drafter of vLLM's as a part: what they cannot run with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from vllm_trie.vllm_hooks.ledger import offered
from vllm_trie.vllm_hooks.setup import config, runner_choice
from vllm_trie.vllm_hooks.setup.config_keys import Verification
from vllm_trie.vllm_hooks.setup.limits import is_cuda

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_trie.drafters.neural import NeuralOptions


def check(vllm_config: VllmConfig, neural: NeuralOptions, asked: Verification) -> None:
    """Refuse a complete configuration that the trained drafter cannot draft in.

    Args:
        vllm_config: of the engine.
        neural: the trained drafter.
        asked: the option `verification`.

    Raises:
        ValueError: every reason at once.
    """
    if found := [*_problems_of_runner(vllm_config, asked), *_problems(vllm_config, neural)]:
        raise ValueError(
            f"trie_union cannot run with {{'method': {neural.method!r}}} among its drafters here:"
            "\n- " + "\n- ".join(found)
        )


def _problems_of_runner(vllm_config: VllmConfig, asked: Verification) -> Iterator[str]:
    speculative: Any = vllm_config.speculative_config
    if offered("draft_verifier"):
        yield "a patched vLLM has no extension point for it yet; run stock vLLM"
    if not vllm_config.use_v2_model_runner:
        if vllm_config.scheduler_config.async_scheduling:
            yield "async_scheduling=True; leave it out or set it to False"
        return
    if asked == "tree":
        yield (
            "on Model Runner V2, which VLLM_USE_V2_MODEL_RUNNER asks for, vLLM's speculators read "
            "chains; leave verification='tree' out, or unset the variable"
        )
    if speculative.use_multi_module_mtp():
        yield (
            "MTP with several modules has not run on Model Runner V2; unset "
            "VLLM_USE_V2_MODEL_RUNNER"
        )


def _problems(vllm_config: VllmConfig, neural: NeuralOptions) -> Iterator[str]:
    speculative: Any = vllm_config.speculative_config
    parallel = vllm_config.parallel_config
    if speculative.method != neural.method:
        yield (
            f"vLLM takes the checkpoint {neural.model!r} for method {speculative.method!r}; write "
            f"'method': {speculative.method!r} if it is allowed, or rename the folder, whose name "
            "vLLM goes by"
        )
    elif speculative.use_gemma4_mtp() or speculative.use_step3p5_mtp():
        yield (
            "the MTP layers of this model share the model's KV cache, which the plugin does not "
            "handle; use vLLM's own method 'mtp' without trie_union"
        )
    for name, instead in (
        ("data_parallel_size", "start one engine for each replica"),
        ("tensor_parallel_size", "use vLLM's own method on several devices"),
        ("pipeline_parallel_size", "use vLLM's own method on several devices"),
    ):
        if (size := getattr(parallel, name)) > 1:
            # A drafter that one rank alone gives up would leave the others waiting for it.
            yield f"{name}={size} is not supported; set it to 1, or {instead}"
    if vllm_config.kv_transfer_config is not None:
        yield "KV connectors (kv_transfer_config) are not supported; leave the setting out"
    if vllm_config.model_config.supports_multimodal_inputs:
        yield "models with multimodal inputs are not supported; use a text model"
    if speculative.draft_model_config.uses_mrope:
        yield "drafters with multimodal rotary positions (M-RoPE) are not supported"
    for name, allowed in (
        ("parallel_drafting", False),
        ("draft_sample_method", "greedy"),
        ("rejection_sample_method", "standard"),
        ("use_local_argmax_reduction", False),
        ("enable_adaptive_verification", False),
    ):
        if (value := getattr(speculative, name)) != allowed:
            yield f"{name}={value!r} is not supported; leave it out or set it to {allowed!r}"


def wrap_unsupported_features(original: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """Let vLLM choose Model Runner V1, which verifies trees, where these run by default."""

    @functools.wraps(original)
    def unsupported_features(self: VllmConfig) -> list[str]:
        found = original(self)
        tree_config = config.read(self)
        if tree_config is None or tree_config.neural is None:
            return found
        takes_chains = is_cuda() and tree_config.engine_options.verification != "tree"
        if not takes_chains and runner_choice.stands_for() == runner_choice.V1_METHOD:
            found.append("trie_union with a trained drafter")
        return found

    return unsupported_features
