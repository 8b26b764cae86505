"""The node budget of a step: the expected gain of verifying nodes against its cost."""

from __future__ import annotations

from vllm_trie.budget.acceptance import AcceptanceCalibration
from vllm_trie.budget.allocation import Allocation, best_allocation, best_allocation_reference
from vllm_trie.budget.controller import NodeBudget
from vllm_trie.budget.step_cost import StepCost

__all__ = [
    "AcceptanceCalibration",
    "Allocation",
    "NodeBudget",
    "StepCost",
    "best_allocation",
    "best_allocation_reference",
]
