"""What an engine learned, saved while it runs and taken up by the next one."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vllm_trie.budget import NodeBudget
from vllm_trie.drafters import Drafter
from vllm_trie.ngrams.corpus_file import fingerprint
from vllm_trie.ngrams.tokenizers import load_corpus_tokenizer
from vllm_trie.store import (
    MAX_TOKENS,
    Identity,
    Slot,
    Store,
    StoredText,
    StoreHeader,
    merge_texts,
    read_folder,
    write_store,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_trie.drafters import DrafterContext
    from vllm_trie.vllm_hooks.setup.config import TreeConfig

INTERVAL = 60.0
"""Seconds between two saves, at least."""
_LAST_SAVE = 30.0  # seconds that a shutdown waits for a save that runs

_State = dict[str, list[float]]

logger = logging.getLogger(__name__)


class Origin(NamedTuple):
    """Where the learned comes from, and what may take it up.

    Attributes:
        identity: of the texts.
        drafter: of the acceptance rates: the method and its options.
        machine: of the step costs.
    """

    identity: Identity
    drafter: str
    machine: str


class WarmStart:
    """Reads the files of earlier engines at the start, and saves while the engine runs.

    A snapshot is taken between two steps: references to texts, which never change, and some dozens
    of numbers. A thread writes it. Nothing here raises: what cannot be read or written is logged,
    and the engine goes on.

    Args:
        folder: of the files of all engines.
        origin: of this engine.
        drafter: whose texts are saved and restored.
        budget: whose acceptance rates and step costs are, None for engines without one.
        interval: seconds between two saves, at least.
    """

    def __init__(
        self,
        folder: Path,
        origin: Origin,
        drafter: Drafter,
        budget: NodeBudget | None,
        interval: float = INTERVAL,
    ) -> None:
        self._folder = folder
        self._origin = origin
        self._drafter = drafter
        self._budget = budget
        self._interval = interval
        self._next_save = time.monotonic() + interval
        self._has_served = False
        self._failed = False
        self._writer: threading.Thread | None = None
        self._slot: Slot | None = None
        try:
            self._restore(read_folder(folder, origin.identity, logger.warning))
        except Exception:
            logger.warning("warm start from %s failed; the start is cold", folder, exc_info=True)
        try:
            self._slot = Slot.claim(folder, origin.identity)
        except OSError as error:
            logger.warning("store_path=%r: %s; this engine saves nothing there", str(folder), error)
        atexit.register(_close, weakref.ref(self))

    def tick(self) -> None:
        """Save if it is time to; to be called at the end of each step."""
        self._has_served = True
        if time.monotonic() < self._next_save or self._slot is None:
            return
        self._next_save = time.monotonic() + self._interval
        if self._writer is None or not self._writer.is_alive():
            snapshot = self._snapshot()
            self._writer = threading.Thread(target=self._write, args=snapshot, daemon=True)
            self._writer.start()

    def close(self) -> None:
        """Save and give the file back, for the engine's shutdown.

        An engine that served nothing leaves the file as it is.
        """
        slot = self._slot
        if slot is None:
            return
        if self._writer is not None:
            self._writer.join(_LAST_SAVE)
        if self._has_served and not (self._writer and self._writer.is_alive()):
            self._write(*self._snapshot())
        self._slot = None
        slot.release()

    def _snapshot(self) -> tuple[StoreHeader, Sequence[StoredText]]:
        identity, drafter, machine = self._origin
        budget = self._budget
        header = StoreHeader(
            model=identity.model,
            tokenizer=identity.tokenizer,
            vocab_size=identity.vocab_size,
            saved_at=time.time(),
            drafter=drafter,
            acceptance={} if budget is None else budget.acceptance.state(),
            machine=machine,
            step_cost={} if budget is None else budget.cost.state(),
        )
        try:
            texts = self._drafter.finished_texts()
        except Exception:  # a drafter of somebody else's
            logger.warning("drafter %r has no texts to save", self._drafter.name, exc_info=True)
            texts = ()
        return header, texts

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
        """Take up texts of all files, and what was learned of the newest that fits."""
        if not stores:
            logger.info("cold start: %s has no file of this model", self._folder)
            return
        texts = merge_texts([store.texts for store in stores], MAX_TOKENS)
        self._drafter.restore_texts(texts)
        taken = [f"{len(texts)} texts of {len(stores)} files"]
        if self._budget is not None:
            _, drafter, machine = self._origin
            rates = (s.header.acceptance for s in stores if s.header.drafter == drafter)
            costs = (s.header.step_cost for s in stores if s.header.machine == machine)
            if self._take_up("acceptance rates", rates, self._budget.acceptance.restore):
                taken.append("acceptance rates")
            if self._take_up("step costs", costs, self._budget.cost.restore):
                taken.append("step costs")
        logger.info("warm start from %s: %s", self._folder, ", ".join(taken))

    def _take_up(
        self, name: str, states: Iterable[_State], restore: Callable[[_State], None]
    ) -> bool:
        """Go on from the first state that is not empty; return whether there is a sound one."""
        state = next(filter(None, states), None)
        if state is None:
            return False
        try:
            restore(state)
        except ValueError as error:
            logger.warning("%s: the %s are not taken up: %s", self._folder, name, error)
            return False
        return True


def open_warm_start(
    vllm_config: VllmConfig,
    tree_config: TreeConfig,
    context: DrafterContext,
    drafter: Drafter,
    budget: NodeBudget | None,
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
    drafted = (tree_config.method, tree_config.draft_model, tree_config.drafter_options)
    machine = (
        _device_name(context.device),
        len(os.sched_getaffinity(0)),
        context.dtype,
        context.tensor_parallel_size,
        options.verification,
        vllm_config.model_config.enforce_eager,
    )
    origin = Origin(identity, repr(drafted), repr(machine))
    return WarmStart(Path(options.store_path), origin, drafter, budget)


def _tokenizer_fingerprint(context: DrafterContext) -> str:
    try:
        tokenizer = load_corpus_tokenizer(context.tokenizer or context.model)
    except ValueError:  # a model that is given token ids has none
        return ""
    return fingerprint(tokenizer.vocabulary)


def _device_name(device: str) -> str:
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return device
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), device)


def _close(reference: weakref.ref[WarmStart]) -> None:
    """Save at the exit of a process whose engine was not shut down."""
    warm_start = reference()
    if warm_start is not None:
        warm_start.close()
