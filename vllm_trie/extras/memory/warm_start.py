"""What an engine learned: saved while it runs and taken up by the next one."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_trie.drafts.engine import config
from vllm_trie.drafts.engine.observers import StepObserver
from vllm_trie.drafts.text_store import StoredText, TextStore
from vllm_trie.extras.memory.options import MemoryOptions
from vllm_trie.extras.memory.replicas import PASSWORD, USER, Replicas
from vllm_trie.extras.memory.store_file import (
    Identity,
    StoreError,
    StoreHeader,
    read_store,
    write_store,
)
from vllm_trie.files.tokenizers import fingerprint, load_tokenizer

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_trie.drafts import DrafterContext
    from vllm_trie.drafts.engine.tree_step import TreeStep
    from vllm_trie.hooks.wire import TreeStats

INTERVAL = 60.0
"""Seconds between two saves, at least."""
_LAST_SAVE = 30.0  # seconds that a shutdown waits for a save that runs
_MAX_SAVE_S = 24 * 3600.0
"""Age from which a temporary file is that of a killed engine."""

logger = logging.getLogger(f"vllm.{__name__}")


class WarmStart(TextStore, StepObserver):
    """Starts from the file of the model, and saves it. Of several engines the last save stays.

    A snapshot is taken between two steps: references to texts, which never change. A thread writes
    it. Nothing here raises: what cannot be read or written is logged, and the engine goes on.

    Args:
        folder: Of the files of all models.
        identity: Of this engine's model and tokenizer.
    """

    def __init__(self, folder: Path, identity: Identity) -> None:
        self._path = folder / f"{identity.key}-0.store"
        self._identity = identity
        self._texts: Callable[[], Sequence[StoredText]] = tuple
        self._next_save = time.monotonic() + INTERVAL
        self._has_changed = False
        self._failed = False
        self._job: threading.Thread | None = None
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            _remove_temporaries(folder)
        except OSError as error:
            self._fail(error)
        atexit.register(_close, weakref.ref(self))

    def restore(self, texts: Callable[[], Sequence[StoredText]]) -> Sequence[StoredText]:
        self._texts = texts
        try:
            if not self._path.exists():
                logger.info("cold start: %s has no file of this model", self._path.parent)
                return ()
            saved = read_store(self._path, self._identity)
        except Exception as error:
            is_foreseen = isinstance(error, StoreError | OSError)
            logger.warning("%s; the start is cold", error, exc_info=not is_foreseen)
            return ()
        logger.info("warm start from %s: %d texts", self._path, len(saved))
        return saved

    def add(self, text: StoredText) -> None:
        self._has_changed = True

    def ended(self, step: TreeStep, new_tokens: Sequence[Sequence[int]], stats: TreeStats) -> None:
        """Save if it is time to."""
        now, is_saving = time.monotonic(), self._job is not None and self._job.is_alive()
        if self._has_changed and not is_saving and now >= self._next_save:
            self._next_save = now + INTERVAL
            self._start_job()

    def forget(self) -> None:
        """Save at once that nothing is left: no request may follow, nor a shutdown."""
        self._has_changed = True
        self._start_job()

    def closed(self) -> None:
        """Save, unless the engine kept nothing and forgot nothing."""
        if not self._has_changed:
            return
        self._has_changed = False
        if self._job is not None:
            self._job.join(_LAST_SAVE)
        if self._job is None or not self._job.is_alive():
            self._write(*self._snapshot())

    def _start_job(self) -> None:
        arguments = (*self._snapshot(), self._job)
        job = threading.Thread(target=self._write, args=arguments, daemon=True)
        try:
            job.start()
            self._job = job
        except RuntimeError as error:  # the process may have no more threads
            self._fail(error)

    def _snapshot(self) -> tuple[StoreHeader, Sequence[StoredText]]:
        header = StoreHeader(**self._identity._asdict(), saved_at=time.time())
        return header, self._texts()

    def _write(
        self,
        header: StoreHeader,
        texts: Sequence[StoredText],
        before: threading.Thread | None = None,
    ) -> None:
        """Write a snapshot, after the job that writes an earlier one."""
        if before is not None:
            before.join()
        try:
            write_store(self._path, header, texts)
            self._failed = False
        except Exception as error:  # a full disk, a folder that is gone
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        level = logging.DEBUG if self._failed else logging.WARNING
        logger.log(level, "%s cannot be saved: %s; the engine goes on", self._path, error)
        self._failed = True


def open_stores(vllm_config: VllmConfig, context: DrafterContext) -> Iterator[WarmStart | Replicas]:
    """Yield what the options of this worker name.

    The first tensor-parallel rank alone has any: the others get its trees.
    """
    tree_config = config.read(vllm_config)
    assert tree_config is not None
    options = tree_config.engine_options
    assert isinstance(options, MemoryOptions)
    if context.rank or (options.store_path is None and options.store is None):
        return
    identity = engine_identity(context)
    if options.store_path is not None:
        yield WarmStart(Path(options.store_path), identity)
    if options.store is not None:
        yield Replicas(options.store, identity, os.environ.get(USER), os.environ.get(PASSWORD))


def engine_identity(context: DrafterContext) -> Identity:
    """Return what the texts of an engine have in common with those of others like it."""
    model = f"{context.model} {context.revision or ''}".strip()
    return Identity(model, _tokenizer_fingerprint(context), context.vocab_size)


def _tokenizer_fingerprint(context: DrafterContext) -> str:
    try:
        tokenizer = load_tokenizer(
            context.tokenizer or context.model,
            context.tokenizer_revision,
            context.trust_remote_code,
        )
    except ValueError:  # a model that is given token ids has none
        return ""
    return fingerprint(tokenizer.vocabulary)


def _close(reference: weakref.ref[WarmStart]) -> None:
    """Save at the exit of a process whose engine was not shut down."""
    warm_start = reference()
    if warm_start is not None:
        warm_start.closed()


def _remove_temporaries(folder: Path) -> None:
    """Remove what killed engines left in the middle of a save."""
    for temporary in folder.glob(".*.store-*"):
        with suppress(OSError):
            if time.time() - temporary.stat().st_mtime > _MAX_SAVE_S:
                temporary.unlink()
