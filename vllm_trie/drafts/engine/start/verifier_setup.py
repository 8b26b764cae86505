"""Speculation of one rank, whatever the runner: its drafter and verifier, the same on all ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger

from vllm_trie.drafts import DrafterContext, get_drafter_class
from vllm_trie.drafts.budget import NodeBudget
from vllm_trie.drafts.engine import config
from vllm_trie.drafts.engine.guard import GuardedDrafter
from vllm_trie.drafts.engine.observers import StepObserver
from vllm_trie.drafts.engine.verifier import TreeVerifier
from vllm_trie.extras import loaded
from vllm_trie.tree import TokenTree
from vllm_trie.tree.batch import LIBRARY

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.parallel_state import GroupCoordinator

logger = init_logger(f"vllm.{__name__}")


def make_verifier(vllm_config: VllmConfig) -> TreeVerifier:
    """Return the verifier of this rank, with its drafter.

    Args:
        vllm_config: As written by :func:`vllm_trie.drafts.engine.start.translate.translate`.
    """
    tree_config = config.read(vllm_config)
    assert tree_config is not None, "config.read refuses a class without a method"
    context = drafter_context(vllm_config, tree_config.draft_model)
    stores = [s for stores in loaded("text_stores") for s in stores(vllm_config, context)]
    context = replace(context, text_stores=stores)
    drafter = get_drafter_class(tree_config.method)(tree_config.drafter_options, context)
    options = tree_config.engine_options
    budget = None
    if options.node_budget == "adaptive":
        budget = NodeBudget(drafting_waits=vllm_config.use_v2_model_runner)
    share_trees = None
    if context.tensor_parallel_size > 1:
        share_trees = partial(same_on_all_ranks, group=get_tp_group(), budget=budget)
    LIBRARY.load()  # fails here, at the start, if it cannot be used
    sources = [make() for make in loaded("draft_source")]
    observers = [make(tree_config, drafter) for make in loaded("step_observer")]
    return TreeVerifier(
        GuardedDrafter(drafter, context.vocab_size, options.draft_timeout_s, logger, sources),
        budget,
        share_trees,
        observers=[one for one in (*stores, *sources, *observers) if isinstance(one, StepObserver)],
    )


def same_on_all_ranks(
    trees: list[TokenTree], group: GroupCoordinator, budget: NodeBudget | None = None
) -> list[TokenTree]:
    """Return rank 0's trees, without their probabilities, on every tensor-parallel rank; pause the
    other ranks' budgets as it does.

    Drafters are deterministic, so ranks agree by themselves; but a time-out or a fault can hit one
    rank alone, and ranks that verify different trees would write wrong KV without noticing. The
    ranks call it together with the same number of trees.
    """
    if group.world_size == 1 or not trees:
        return trees
    if group.rank_in_group == 0:
        arrays = [(t.token_ids, t.parents, None, t.never_accept) for t in trees]
        group.broadcast_object((arrays, None if budget is None else budget.pause))
        return trees
    arrays, pause = group.broadcast_object()
    if budget is not None:
        budget.pause = pause
    return [TokenTree(*of_tree) for of_tree in arrays]


def drafter_context(vllm_config: VllmConfig, draft_model: str | None) -> DrafterContext:
    """Return what drafters may know about the engine."""
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    speculative = vllm_config.speculative_config
    assert speculative is not None
    return DrafterContext(
        vocab_size=model.get_vocab_size(),
        max_model_len=model.max_model_len,
        max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
        num_nodes=speculative.num_speculative_tokens,
        hidden_size=model.get_hidden_size(),
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(vllm_config.device_config.device),
        tensor_parallel_size=parallel.tensor_parallel_size,
        rank=parallel.rank % parallel.tensor_parallel_size,
        model=model.model,
        tokenizer=model.tokenizer,
        draft_model=draft_model,
        revision=model.revision,
        tokenizer_revision=model.tokenizer_revision,
        draft_revision=speculative.revision,
        trust_remote_code=model.trust_remote_code,
        download_dir=vllm_config.load_config.download_dir,
    )
