"""Native beam search against the same tokens computed as prompts."""

from __future__ import annotations

from vllm_trie.validate.engines import ALLOWED, start_engine
from vllm_trie.validate.parts import Outcome, Settings

_LONGEST_PROMPT = 200


def check_beams(settings: Settings, dtype: str) -> Outcome:
    """Search, and rescore every hypothesis by a plain forward pass."""
    from vllm_trie.vllm_hooks.frontend import beam_check
    from vllm_trie.vllm_hooks.setup import support

    widths, max_tokens = ((2, 4), 24) if settings.quick else ((2, 4, 8), 40)
    llm = start_engine(
        settings,
        dtype,
        _LONGEST_PROMPT,
        max_tokens,
        max_num_seqs=32,
        additional_config={"vllm_trie": ALLOWED},
    )
    if reason := support.reason_off(llm.llm_engine.vllm_config):
        return Outcome(status="not applicable", summary=f"native beam search is off: {reason}")
    found = beam_check.check(llm, widths, max_tokens)
    return Outcome(
        status="passed" if found.passed else "failed",
        summary=f"{found.num_hypotheses} hypotheses, {found.num_pairs} pairs with a common "
        f"beginning: scores and log-probabilities differ by {found.found:.2g} a token from the "
        f"same tokens as a prompt, allowed is {found.allowed:.2g} (ordinary requests: "
        f"{found.ordinary:.2g}); {found.out_of_order} out of order",
        measured={**found._asdict(), "allowed": found.allowed},
    )
