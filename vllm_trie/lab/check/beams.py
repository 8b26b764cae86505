"""Native beam search on this device, by the check of engines on GPUs at their start."""

from __future__ import annotations

from vllm.platforms import current_platform

from vllm_trie.extras.device_checks.search_check import BLIND, reason_against_searches
from vllm_trie.hooks.start.limits import problems, reason_off
from vllm_trie.lab.check.engines import start_engine
from vllm_trie.lab.check.parts import Outcome, Settings

_LONGEST_PROMPT, _MAX_TOKENS = 200, 60


def check_beams(settings: Settings, dtype: str) -> Outcome:
    """Search, and compute every hypothesis again as a prompt."""
    llm = start_engine(settings, dtype, _LONGEST_PROMPT, _MAX_TOKENS, max_num_seqs=32)
    config = llm.llm_engine.vllm_config
    if reason := next(problems("beams", config), None):
        return Outcome(status="not applicable", summary=f"native beam search is off: {reason}")
    core = llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
    # On a GPU the engine has made the check at its start, too.
    if reason := reason_off(config) or reason_against_searches(core):
        is_blind = reason == BLIND and current_platform.is_cpu()  # the model's, not the device's
        return Outcome(status="not applicable" if is_blind else "failed", summary=reason)
    return Outcome(
        status="passed",
        summary="scores and log-probabilities of hypotheses are those of the same tokens as a "
        "prompt",
    )
