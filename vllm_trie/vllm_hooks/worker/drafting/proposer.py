"""The class that vLLM's ``custom_class`` method instantiates as its proposer."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger

from vllm_trie.budget import NodeBudget
from vllm_trie.drafters import Drafter, DrafterContext, get_drafter_class
from vllm_trie.tree.batch import LIBRARY
from vllm_trie.vllm_hooks.setup import config
from vllm_trie.vllm_hooks.worker.drafting.guard import GuardedDrafter
from vllm_trie.vllm_hooks.worker.drafting.tree_exchange import same_on_all_ranks
from vllm_trie.vllm_hooks.worker.recorder import TraceRecorder
from vllm_trie.vllm_hooks.worker.verifier import TreeVerifier
from vllm_trie.vllm_hooks.worker.warm_start import open_warm_start

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = init_logger(__name__)


class TreeProposer:
    """Makes the drafter and the verifier of this rank from the engine's configuration.

    Args:
        vllm_config: as written by :func:`vllm_trie.vllm_hooks.setup.config.translate`.

    Attributes:
        trees: the verifier, which the model runner's adapter calls.
        chain_only: whether vLLM verifies the drafts, as chains.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        tree_config = config.read(vllm_config)
        if tree_config is None:
            raise ValueError(
                f"{config.PROPOSER_CLASS} needs the method's name; set "
                "speculative_config={'method': NAME} instead of naming the class"
            )
        context = drafter_context(vllm_config, tree_config.draft_model)
        drafter = get_drafter_class(tree_config.method)(tree_config.drafter_options, context)
        options = tree_config.engine_options
        self.chain_only = options.verification == "chain"
        share_trees = None
        if context.tensor_parallel_size > 1:
            share_trees = partial(same_on_all_ranks, group=get_tp_group())
        LIBRARY.is_available()  # compiles at start-up, not in the first step
        budget = NodeBudget() if options.node_budget == "adaptive" else None
        self.trees = TreeVerifier(
            GuardedDrafter(drafter, context.vocab_size, options.draft_timeout_s, logger),
            budget,
            share_trees,
            warm_start=open_warm_start(vllm_config, tree_config, context, drafter),
            recorder=_recorder(tree_config, drafter),
        )

    def load_model(self, target_model: Any, *unused: Any, **unused_too: Any) -> None:
        """Load the drafter's own weights, if it has any."""
        self.trees.guard.drafter.load_model(target_model)

    def propose(self, *unused: Any, **unused_too: Any) -> None:
        """Refuse a model runner that expects chains of drafts from a proposer.

        Raises:
            RuntimeError: always. Only a runner without the plugin's adapter calls this.
        """
        raise RuntimeError(
            "vllm-trie's drafters need the plugin's worker class, and this engine runs another "
            "one; leave worker_cls at 'auto'"
        )


def _recorder(tree_config: config.TreeConfig, drafter: Drafter) -> TraceRecorder | None:
    """Return the recorder of an engine with a folder for traces; all ranks see the same."""
    trace_path = tree_config.engine_options.trace_path
    if trace_path is None or drafter.context.rank:
        return None
    return TraceRecorder(Path(trace_path), tree_config, drafter)


def drafter_context(vllm_config: VllmConfig, draft_model: str | None) -> DrafterContext:
    """Return what drafters may know about the engine."""
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    assert vllm_config.speculative_config is not None
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


def _eos_token_ids(model: ModelConfig) -> tuple[int, ...]:
    for source in (model.try_get_generation_config(), vars(model.hf_config)):
        eos = source.get("eos_token_id")
        if eos is not None:
            return tuple(eos) if isinstance(eos, list | tuple) else (int(eos),)
    return ()
