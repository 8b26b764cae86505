"""The node budget of a step: the expected gain of verifying nodes against its cost."""

from vllm_trie.drafts.budget.acceptance import AcceptanceCalibration
from vllm_trie.drafts.budget.controller import NodeBudget
from vllm_trie.drafts.budget.forecast import DraftForecast, planned_lengths
from vllm_trie.drafts.budget.step_cost import StepCost

__all__ = [
    "AcceptanceCalibration",
    "DraftForecast",
    "NodeBudget",
    "StepCost",
    "planned_lengths",
]
