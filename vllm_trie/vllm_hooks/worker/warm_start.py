"""What an engine learned, saved while it runs and taken up by the next one."""

from __future__ import annotations

import atexit
import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_trie.drafters import Drafter
from vllm_trie.ngrams.corpus_file import fingerprint
from vllm_trie.ngrams.tokenizers import load_corpus_tokenizer
from vllm_trie.store import (
    MAX_TOKENS,
    Identity,
    SharedFolder,
    Slot,
    Store,
    StoredText,
    StoreHeader,
    merge_texts,
    prompt_key,
    write_store,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_trie.drafters import DrafterContext
    from vllm_trie.vllm_hooks.setup.config import TreeConfig

INTERVAL = 60.0
"""Seconds between two saves, at least."""
MAX_RELOAD_TOKENS = 65_536
"""Tokens of other engines' new texts that one reload takes up, those used last."""
_TOKENS_PER_STEP = 512  # of them, indexed between two steps
_LAST_SAVE = 30.0  # seconds that a shutdown waits for a save or a reload that runs

logger = logging.getLogger(__name__)


class WarmStart:
    """Reads the files of other engines, at the start and on request later, and saves its own.

    A snapshot is taken between two steps: references to texts, which never change. A thread writes
    it. The same thread reads what other engines have saved since, and their texts are
    indexed a few between two steps. Nothing here raises: what cannot be read or written is logged,
    and the engine goes on.

    Args:
        folder: Of the files of all engines.
        identity: Of this engine's model and tokenizer.
        drafter: Whose texts are saved and restored.
        reload_interval: Seconds between two readings of the other engines' files, None for none
            after the start.
    """

    def __init__(
        self,
        folder: Path,
        identity: Identity,
        drafter: Drafter,
        reload_interval: float | None = None,
    ) -> None:
        self._identity = identity
        self._drafter = drafter
        self._next_save = time.monotonic() + INTERVAL
        self._reload_interval = math.inf if reload_interval is None else reload_interval
        self._next_reload = time.monotonic() + self._reload_interval
        self._has_served = False
        self._failed = False
        self._job: threading.Thread | None = None
        self._arrived: deque[StoredText] = deque()
        self._slot: Slot | None = None
        self._folder = folder
        self._shared = SharedFolder(folder, identity, logger.warning)
        try:
            drafter.set_prompt_key(prompt_key(folder))
        except OSError as error:
            logger.warning("store_path=%r: %s; answers are not found by prompt", str(folder), error)
        try:
            self._restore(self._shared.read())
        except Exception:
            logger.warning("warm start from %s failed; the start is cold", folder, exc_info=True)
        try:
            self._slot = Slot.claim(folder, identity)
        except OSError as error:
            logger.warning("store_path=%r: %s; this engine saves nothing there", str(folder), error)
        atexit.register(_close, weakref.ref(self))

    def tick(self) -> None:
        """Save or read again if it is time to; to be called at the end of each step."""
        self._has_served = True
        if self._arrived:
            self._take_up_arrived()
        if self._job is not None and self._job.is_alive():
            return
        now = time.monotonic()
        if now >= self._next_save and self._slot is not None:
            self._next_save = now + INTERVAL
            self._job = threading.Thread(target=self._write, args=self._snapshot(), daemon=True)
            self._job.start()
        elif now >= self._next_reload:
            self._next_reload = now + self._reload_interval
            self._job = threading.Thread(target=self._reload, daemon=True)
            self._job.start()

    def close(self) -> None:
        """Save and give the file back, for the engine's shutdown.

        An engine that served nothing leaves the file as it is.
        """
        slot = self._slot
        if slot is None:
            return
        if self._job is not None:
            self._job.join(_LAST_SAVE)
        if self._has_served and not (self._job and self._job.is_alive()):
            self._write(*self._snapshot())
        self._slot = None
        slot.release()

    def _reload(self) -> None:
        """Find texts that other engines have saved since the last reading."""
        path = None if self._slot is None else self._slot.path
        try:
            stores = self._shared.read(path)
            texts = merge_texts([store.texts for store in stores], MAX_RELOAD_TOKENS)
        except Exception:
            logger.warning("%s could not be read again", self._folder, exc_info=True)
            return
        if texts:
            logger.info("new texts of other engines in %s: %d", self._folder, len(texts))
            self._arrived.extend(texts)

    def _take_up_arrived(self) -> None:
        """Restore some of the texts that a reload found, in their order."""
        texts: list[StoredText] = []
        num_tokens = 0
        while self._arrived and num_tokens < _TOKENS_PER_STEP:
            texts.append(self._arrived.popleft())
            num_tokens += len(texts[-1].token_ids)
        try:
            self._drafter.restore(texts)
        except Exception:  # a drafter of somebody else's
            logger.warning("texts of other engines are not taken up any more", exc_info=True)
            self._arrived.clear()
            self._next_reload = math.inf

    def _snapshot(self) -> tuple[StoreHeader, Sequence[StoredText]]:
        saved: Sequence[StoredText] = ()
        try:
            saved = self._drafter.save()
        except Exception:  # a drafter of somebody else's
            logger.warning("drafter %r has nothing to save", self._drafter.name, exc_info=True)
        return StoreHeader(**self._identity._asdict(), saved_at=time.time()), saved

    def _write(self, header: StoreHeader, texts: Sequence[StoredText]) -> None:
        slot = self._slot
        if slot is None:
            return
        try:
            write_store(slot.path, header, texts)
        except Exception as error:  # a full disk, a folder that is gone
            level = logging.DEBUG if self._failed else logging.WARNING
            logger.log(level, "%s could not be saved: %s; the engine goes on", slot.path, error)
            self._failed = True

    def _restore(self, stores: Sequence[Store]) -> None:
        """Take up texts of all files."""
        if not stores:
            logger.info("cold start: %s has no file of this model", self._folder)
            return
        texts = merge_texts([store.texts for store in stores], MAX_TOKENS)
        self._drafter.restore(texts)
        logger.info(
            "warm start from %s: %d texts of %d files", self._folder, len(texts), len(stores)
        )


def open_warm_start(
    vllm_config: VllmConfig,
    tree_config: TreeConfig,
    context: DrafterContext,
    drafter: Drafter,
) -> WarmStart | None:
    """Return the warm start of this worker, None where the option is not set.

    The first tensor-parallel rank alone has one: the others get its trees.
    """
    options = tree_config.engine_options
    if options.store_path is None or context.rank:
        return None
    identity = Identity(
        f"{context.model} {vllm_config.model_config.revision or ''}".strip(),
        _tokenizer_fingerprint(context),
        context.vocab_size,
    )
    minutes = options.store_reload_minutes
    return WarmStart(
        Path(options.store_path),
        identity,
        drafter,
        reload_interval=None if minutes is None else 60 * minutes,
    )


def _tokenizer_fingerprint(context: DrafterContext) -> str:
    try:
        tokenizer = load_corpus_tokenizer(context.tokenizer or context.model)
    except ValueError:  # a model that is given token ids has none
        return ""
    return fingerprint(tokenizer.vocabulary)


def _close(reference: weakref.ref[WarmStart]) -> None:
    """Save at the exit of a process whose engine was not shut down."""
    warm_start = reference()
    if warm_start is not None:
        warm_start.close()
