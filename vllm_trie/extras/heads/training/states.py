"""Hidden states of the training rows on disk, so that later epochs need not compute them."""

from __future__ import annotations

import math
import os
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm_trie.extras.heads.training.backbone import Backbone


def training_inputs(model: Backbone, rows: np.ndarray) -> dict[str, Any]:
    """Identify what a run trains on: the text, as rows, and the model."""
    # Further training of a model changes every row of its output layer; reading all takes long.
    weights = model.output_weight[::64].cpu().numpy()
    return {
        "text": sha256(rows.tobytes()).hexdigest()[:16],
        "context": rows.shape[1],
        "model": model.path,
        "output_weight": sha256(weights.tobytes()).hexdigest()[:16],
    }


class StateCache:
    """Hidden states and the model's predictions for each row of a text.

    They are computed at a row's first visit and kept in two files that outlive an interrupted run:
    bfloat16 states, and predictions plus 1, so that 0 says that a row was not computed yet.
    """

    def __init__(self, folder: Path, model: Backbone, rows: np.ndarray) -> None:
        """Open or make the files.

        Args:
            folder: Theirs; must exist.
            model: Stays as it is.
            rows: int32 [rows, length], as in `TokenRows`.

        Raises:
            OSError: They cannot be made, for example for lack of space.
        """
        self._model = model
        digest = sha256(repr(training_inputs(model, rows)).encode()).hexdigest()[:16]
        hidden_size = model.output_weight.shape[1]
        self._files = [folder / f"{name}-{digest}.cache" for name in ("states", "predictions")]
        try:
            self._states = _open(self._files[0], np.dtype(np.int16), (*rows.shape, hidden_size))
            self._predictions = _open(self._files[1], np.dtype(np.int32), rows.shape)
        except OSError:
            self.delete()
            raise

    def rows(self, numbers: np.ndarray, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return states [rows, length, hidden_size] and predictions int64 [rows, length].

        Args:
            numbers: int [rows], which rows of the text these are.
            token_ids: int64 [rows, length], their tokens.
        """
        absent = np.flatnonzero(self._predictions[numbers, 0] == 0)
        if len(absent):
            hidden = self._model.hidden_states(token_ids[absent])
            stored = hidden.to(torch.bfloat16).cpu().view(torch.int16)
            self._states[numbers[absent]] = stored.numpy()
            self._predictions[numbers[absent]] = self._model.predictions(hidden).cpu().numpy() + 1
        states = torch.from_numpy(self._states[numbers]).view(torch.bfloat16)
        predictions = torch.from_numpy(self._predictions[numbers].astype(np.int64) - 1)
        device = self._model.device
        return states.to(device), predictions.to(device)

    def delete(self) -> None:
        """Delete the files."""
        for file in self._files:
            file.unlink(missing_ok=True)


def _open(file: Path, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    file.touch()
    with file.open("r+b") as opened:
        # A full disk would kill the process where it writes to a sparse file's memory.
        os.posix_fallocate(opened.fileno(), 0, math.prod(shape) * dtype.itemsize)
    mapped: np.ndarray = np.memmap(str(file), dtype=dtype, mode="r+", shape=shape)
    return mapped  # a new file reads as zeros
