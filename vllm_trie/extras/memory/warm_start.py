"""What an engine learned: saved while it runs and taken up by the next one, and shared with
replicas."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_trie.drafts import Drafter
from vllm_trie.drafts.request_texts import STEP_TOKENS
from vllm_trie.extras.corpus.corpus_file import fingerprint
from vllm_trie.extras.memory import (
    Identity,
    Slot,
    StoredText,
    StoreHeader,
    prompt_key,
    read_newest,
    write_store,
)
from vllm_trie.extras.memory.options import MemoryOptions
from vllm_trie.extras.memory.replicas import PASSWORD, USER, Replicas
from vllm_trie.files.tokenizers import load_corpus_tokenizer

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_trie.drafts import DrafterContext
    from vllm_trie.hooks.start.config import TreeConfig

INTERVAL = 60.0
"""Seconds between two saves, at least."""
_LAST_SAVE = 30.0  # seconds that a shutdown waits for a save that runs

logger = logging.getLogger(__name__)


class WarmStart:
    """Starts from the newest file of the model, and saves a file of its own.

    A snapshot is taken between two steps: references to texts, which never change. A thread writes
    it. Nothing here raises: what cannot be read or written is logged, and the engine goes on.

    Args:
        folder: Of the files of all engines.
        identity: Of this engine's model and tokenizer.
        drafter: Whose texts are saved and restored.
    """

    def __init__(self, folder: Path, identity: Identity, drafter: Drafter) -> None:
        self._identity = identity
        self._drafter = drafter
        self._next_save = time.monotonic() + INTERVAL
        self._has_served = False
        self._failed = False
        self._job: threading.Thread | None = None
        self._slot: Slot | None = None
        try:
            drafter.set_prompt_key(prompt_key(folder))
        except OSError as error:
            logger.warning("store_path=%r: %s; answers are not found by prompt", str(folder), error)
        try:
            self._restore(folder)
        except Exception:
            logger.warning("warm start from %s failed; the start is cold", folder, exc_info=True)
        try:
            self._slot = Slot.claim(folder, identity)
        except OSError as error:
            logger.warning("store_path=%r: %s; this engine saves nothing there", str(folder), error)
        atexit.register(_close, weakref.ref(self))

    def tick(self) -> None:
        """Save if it is time to; to be called at the end of each step."""
        self._has_served = True
        now = time.monotonic()
        is_due = now >= self._next_save and self._slot is not None
        if is_due and not (self._job and self._job.is_alive()):
            self._next_save = now + INTERVAL
            arguments = (self._slot, *self._snapshot())
            self._job = threading.Thread(target=self._write, args=arguments, daemon=True)
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
        self._slot = None
        if self._job is not None and self._job.is_alive():
            return  # it writes to the file, whose lock goes with it
        if self._has_served:
            self._write(slot, *self._snapshot())
        slot.release()

    def _snapshot(self) -> tuple[StoreHeader, Sequence[StoredText]]:
        saved: Sequence[StoredText] = ()
        try:
            saved = self._drafter.save()
        except Exception:  # a drafter of somebody else's
            logger.warning("drafter %r has nothing to save", self._drafter.name, exc_info=True)
        return StoreHeader(**self._identity._asdict(), saved_at=time.time()), saved

    def _write(self, slot: Slot, header: StoreHeader, texts: Sequence[StoredText]) -> None:
        try:
            write_store(slot.path, header, texts)
        except Exception as error:  # a full disk, a folder that is gone
            level = logging.DEBUG if self._failed else logging.WARNING
            logger.log(level, "%s could not be saved: %s; the engine goes on", slot.path, error)
            self._failed = True

    def _restore(self, folder: Path) -> None:
        store = read_newest(folder, self._identity, logger.warning)
        if store is None:
            logger.info("cold start: %s has no file of this model", folder)
            return
        self._drafter.restore(store.texts)
        logger.info("warm start from %s: %d texts", folder, len(store.texts))


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


def open_memories(
    vllm_config: VllmConfig,
    tree_config: TreeConfig,
    context: DrafterContext,
    drafter: Drafter,
) -> Iterator[WarmStart | Sharing]:
    """Yield what the options of this worker name; the key of replicas takes the place of the
    folder's.

    The first tensor-parallel rank alone has any: the others get its trees.
    """
    options, revision = tree_config.engine_options, vllm_config.model_config.revision
    assert isinstance(options, MemoryOptions)
    if context.rank:
        return
    if options.store_path is not None:
        identity = engine_identity(context, revision)
        yield WarmStart(Path(options.store_path), identity, drafter)
    if options.store is not None:
        yield Sharing(options.store, revision, context, drafter)


def engine_identity(context: DrafterContext, revision: str | None) -> Identity:
    """Return what the texts of an engine have in common with those of others like it."""
    model = f"{context.model} {revision or ''}".strip()
    return Identity(model, _tokenizer_fingerprint(context), context.vocab_size)


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
