"""Texts of other replicas, taken up between two steps."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from vllm_trie.drafters import Drafter
from vllm_trie.drafters.request_texts import STEP_TOKENS
from vllm_trie.store.replicas import PASSWORD, USER, Replicas
from vllm_trie.vllm_hooks.worker.warm_start import engine_identity

if TYPE_CHECKING:
    from vllm_trie.drafters import DrafterContext

logger = logging.getLogger(__name__)


class Sharing:
    """Gives the drafter what other replicas publish, and them what it stores.

    Args:
        url: Of the server.
        revision: Of the model.
        context: Of the engine.
        drafter: Whose texts are shared.
    """

    def __init__(
        self, url: str, revision: str | None, context: DrafterContext, drafter: Drafter
    ) -> None:
        self._drafter = drafter
        identity = engine_identity(context, revision)
        self.replicas = Replicas(url, identity, os.environ.get(USER), os.environ.get(PASSWORD))
        drafter.share(self.replicas)

    def tick(self) -> None:
        """Take up what came in; to be called at the end of each step."""
        texts = self.replicas.receive(STEP_TOKENS)
        if not texts:
            return
        try:
            self._drafter.restore(texts)
        except Exception:  # a drafter of somebody else's
            logger.warning("texts of replicas were not taken up", exc_info=True)

    def close(self) -> None:
        """Publish what waits."""
        self.replicas.close()
