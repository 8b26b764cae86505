"""The class that vLLM's ``custom_class`` method instantiates as its proposer."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger

from vllm_trie.budget import NodeBudget
from vllm_trie.drafters import DrafterContext, get_drafter_class
from vllm_trie.vllm_hooks.setup import config
from vllm_trie.vllm_hooks.worker.drafting.guard import GuardedDrafter

logger = init_logger(__name__)


class TreeProposer:
    """Holds the drafter of this rank; the model runner's mixin asks it for trees.

    Args:
        vllm_config: the engine's configuration, as written by
            :func:`vllm_trie.vllm_hooks.setup.config.translate`.
    """

    def __init__(self, vllm_config: Any) -> None:
        tree_config = config.read(vllm_config)
        if tree_config is None:
            raise ValueError(
                f"{config.PROPOSER_CLASS} needs the method's name; set "
                "speculative_config={'method': NAME} instead of naming the class"
            )
        context = drafter_context(vllm_config, tree_config.draft_model)
        drafter = get_drafter_class(tree_config.method)(tree_config.drafter_options, context)
        self.method = tree_config.method
        self.context = context
        adaptive = tree_config.engine_options.node_budget == "adaptive"
        self.node_budget = NodeBudget() if adaptive else None
        self.guarded = GuardedDrafter(
            drafter, context.vocab_size, tree_config.engine_options.draft_timeout_s, logger
        )

    def load_model(self, target_model: Any, *unused: Any, **unused_too: Any) -> None:
        """Load the drafter's own weights, if it has any."""
        self.guarded.drafter.load_model(target_model)

    def propose(self, *unused: Any, **unused_too: Any) -> None:
        """vLLM's entrance for chains of drafts; the trees go another way.

        Raises:
            RuntimeError: always. A runner without the plugin's mixin would get here.
        """
        raise RuntimeError(
            "vllm-trie's drafters need the plugin's worker class, and this engine runs another "
            "one; leave worker_cls at 'auto'"
        )


def drafter_context(vllm_config: Any, draft_model: str | None) -> DrafterContext:
    """What drafters are told about the engine."""
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    return DrafterContext(
        vocab_size=model.get_vocab_size(),
        max_model_len=model.max_model_len,
        max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
        num_nodes=vllm_config.speculative_config.num_speculative_tokens,
        hidden_size=model.get_hidden_size(),
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(vllm_config.device_config.device),
        tensor_parallel_size=parallel.tensor_parallel_size,
        rank=parallel.rank % parallel.tensor_parallel_size,
        model=model.model,
        tokenizer=model.tokenizer,
        eos_token_ids=_eos_token_ids(model),
        draft_model=draft_model,
    )


def _eos_token_ids(model: Any) -> tuple[int, ...]:
    for source in (model.try_get_generation_config(), vars(model.hf_config)):
        eos = source.get("eos_token_id")
        if eos is not None:
            return tuple(eos) if isinstance(eos, list | tuple) else (int(eos),)
    return ()
