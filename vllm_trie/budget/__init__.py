"""How many nodes each step's trees may have: what verification costs against what it brings."""

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
