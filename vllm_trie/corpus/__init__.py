"""The commands `vllm-trie corpus`: corpora out of texts, and out of the model itself."""

from __future__ import annotations

from vllm_trie.corpus.answers_file import Answer, AnswersFile
from vllm_trie.corpus.prompt_format import PromptFormat
from vllm_trie.corpus.synthesis import Completion, Engine, Plan

__all__ = ["Answer", "AnswersFile", "Completion", "Engine", "Plan", "PromptFormat"]
