"""Counts of drafts in the log of offline engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from vllm.logger import init_logger

from vllm_trie.drafts.engine import config
from vllm_trie.hooks.ledger.record import STATS, Symbols

logger = init_logger(f"vllm.{__name__}")

_COUNTS = ("num_accepted_draft_tokens", "num_draft_tokens", "num_spec_steps")
"""Fields of vLLM's ``RequestSpecDecodeMetrics``."""


@Symbols("entrypoints.common.offline:OfflineInferenceMixin.", STATS).wraps(
    "_run_engine", "logs how many draft tokens were accepted"
)
def run_engine(
    original: Callable[..., list[Any]], self: Any, output_type: Any, use_tqdm: Any = True
) -> list[Any]:
    results = original(self, output_type, use_tqdm=use_tqdm)
    tree_config = config.read(self.llm_engine.vllm_config)
    if tree_config is not None and use_tqdm:
        _log_counts(tree_config.method, results)
    return results


def _log_counts(method: str, results: Iterable[object]) -> None:
    outputs = [out for result in results for out in getattr(result, "outputs", ())]
    metrics = (getattr(out, "spec_decode_metrics", None) for out in outputs)
    counts = Counter[str]()
    for of_output in filter(None, metrics):
        figures = of_output.to_dict()
        counts.update({name: figures[name] for name in _COUNTS})
    if not counts:
        return
    logger.info(
        "vllm-trie %s: %d of %d drafted tokens accepted, in %d drafts; %d output tokens",
        method,
        *(counts[name] for name in _COUNTS),
        sum(len(out.token_ids) for out in outputs),
    )
