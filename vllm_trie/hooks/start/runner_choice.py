"""Which of vLLM's two model runners serves an engine with a method of vllm-trie.

vLLM chooses Model Runner V1 for ``custom_class``, the method that the plugin's are rewritten to,
and V2 for ``ngram_gpu``, and for ``custom_speculator`` if it is patched. Drafts run where vLLM runs
an engine without speculation: on V2 on GPUs, and elsewhere where the user asks for V2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from vllm_trie.hooks.ledger.entry import Scope
from vllm_trie.hooks.start.limits import is_cuda

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

V1_METHOD = "custom_class"
V2_METHOD = "ngram_gpu"
PATCHED_V2_METHOD = "custom_speculator"
METHODS = (V1_METHOD, V2_METHOD, PATCHED_V2_METHOD)
"""Methods of vLLM in whose place a method of the plugin goes. The last is of patch 0009 in
`patches/`, by which vLLM makes the speculator that is named."""


def vllm_method() -> str:
    """Return the method of vLLM that a method of the plugin is rewritten to: one for which vLLM
    takes V2 where the user asks for that, or on a GPU leaves the choice to vLLM."""
    import vllm.envs as envs
    from vllm.config import speculative
    from vllm.triton_utils import HAS_TRITON

    takes_v2 = envs.VLLM_USE_V2_MODEL_RUNNER
    if takes_v2 is None:
        takes_v2 = is_cuda() and HAS_TRITON
    if not takes_v2:
        return V1_METHOD
    is_patched = PATCHED_V2_METHOD in get_args(getattr(speculative, "SpeculativeMethod", None))
    return PATCHED_V2_METHOD if is_patched else V2_METHOD


def takes_any_length(engine_args: EngineArgs) -> bool:
    """Return whether CUDA graphs are expected to take drafts of any length in one batch.

    Those of FlashAttention 3, which is chosen on a Hopper GPU, and of vLLM's Triton attention do.
    Workers find out for certain; this only decides how many drafts the scheduler makes room for,
    before the model is known.
    """
    from vllm.platforms import current_platform

    if not is_cuda() or engine_args.enforce_eager:
        return True  # without CUDA graphs
    capability = current_platform.get_device_capability()
    backend = str(engine_args.attention_backend or "").rpartition(".")[2].upper()
    return backend == "TRITON_ATTN" or (capability is not None and capability.major == 9)


def runner_scopes(
    vllm_config: VllmConfig, verification: Literal["tree", "chain"]
) -> tuple[Scope, ...]:
    """Return the scopes of the patches that make this rank's model runner."""
    if not vllm_config.use_v2_model_runner:
        return ("tree_runner" if verification == "tree" else "chain_runner",)
    parallel = vllm_config.parallel_config
    # The last pipeline stage samples and drafts, and vLLM sends its drafts to those before it.
    is_last_stage = parallel.rank >= parallel.world_size - parallel.tensor_parallel_size
    return ("v2_stage", "v2_runner") if is_last_stage else ("v2_stage",)
