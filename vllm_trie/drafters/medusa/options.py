"""Options of the method `medusa_dynamic`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from vllm_trie.drafters.base import DrafterOptions
from vllm_trie.drafters.medusa.trees import PUBLISHED, Path, check_paths

TreeName = Literal["dynamic", "fixed", "mc_sim_7b_63", "vicuna_7b_stage2"]


class MedusaOptions(DrafterOptions):
    """Options of `medusa_dynamic`; the node budget n is `num_speculative_tokens`."""

    tree: TreeName | list[list[int]] = Field(
        default="dynamic",
        description="'dynamic': the best nodes of each step by the heads' own probabilities. "
        "'mc_sim_7b_63' (also 'fixed') and 'vicuna_7b_stage2': the same tree at every step, as "
        "Medusa published it. A list of paths, such as [[0], [0, 0], [1]]: that tree, where a "
        "path names the rank of the candidate to take from each head.",
    )
    joint: Literal["context", "product"] = Field(
        default="context",
        description="Probability of a path in a dynamic tree. 'product': the product of the "
        "heads' probabilities, as in the paper. 'context': what the request's own text says about "
        "the tokens that follow one another, with the heads for what it does not know.",
    )
    num_heads: int | None = Field(
        default=None, ge=1, le=16, description="K, how many of the heads are used; default all."
    )
    top_tokens: int = Field(
        default=32, ge=1, le=256, description="m, candidates that are taken from each head."
    )
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
        description="With joint='context': longest context that is looked up, in tokens.",
    )
    calibrate: bool = Field(
        default=True,
        description="Whether the heads' probabilities are corrected by the temperatures that "
        "training left in the checkpoint.",
    )

    @field_validator("tree")
    @classmethod
    def _check_tree(cls, tree: TreeName | list[list[int]]) -> TreeName | list[list[int]]:
        if isinstance(tree, list):
            check_paths(tree)
        return tree

    def fixed_paths(self) -> tuple[Path, ...] | None:
        """Return the paths of the fixed tree, None for a dynamic one."""
        if self.tree == "dynamic":
            return None
        if isinstance(self.tree, list):
            return check_paths(self.tree)
        return PUBLISHED["mc_sim_7b_63" if self.tree == "fixed" else self.tree]
