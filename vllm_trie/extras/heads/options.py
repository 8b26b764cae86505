"""Options of the method `medusa_dynamic`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vllm_trie.drafts.drafter import DrafterOptions


class MedusaOptions(DrafterOptions):
    """Options of `medusa_dynamic`; the node limit n is `num_speculative_tokens`."""

    joint: Literal["context", "product"] = Field(
        default="context",
        description="Probability of a path. 'product': the product of the heads' probabilities, as "
        "in the paper. 'context': the probabilities of the request's text for sequences that occur "
        "there, and the heads' for the rest.",
    )
    num_heads: int | None = Field(
        default=None, ge=1, le=16, description="K, heads that are used; default all."
    )
    top_tokens: int = Field(default=32, ge=1, le=256, description="m, candidates of each head.")
    max_depth: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description="Deepest node. Default: K, and with joint='context' as deep as the text "
        "supports.",
    )
    max_context_len: int = Field(
        default=15,
        ge=1,
        le=15,
        description="With joint='context': longest context, in tokens.",
    )
    calibrate: bool = Field(
        default=True,
        description="Correct the heads' probabilities by the temperatures in the checkpoint.",
    )
