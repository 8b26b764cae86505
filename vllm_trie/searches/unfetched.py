"""A result that a device still computes, and what makes of it what the host wants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

T_co = TypeVar("T_co", covariant=True)
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Unfetched(Generic[T_co]):
    """A result whose shapes the host knows, so that nobody has to wait before it is needed.

    Attributes:
        tensors: Of any device.
        finish: Makes the result of their values on the host.
    """

    tensors: tuple[torch.Tensor, ...]
    finish: Callable[..., T_co]
    copied_from: tuple[torch.Tensor, ...] = ()
    """They must live until their copies are done."""

    def then(self, finish: Callable[[T_co], _Result]) -> Unfetched[_Result]:
        """Return what a function makes of the result."""
        of_values = self.finish
        return Unfetched(self.tensors, lambda *values: finish(of_values(*values)), self.copied_from)

    def copied(self) -> Unfetched[T_co]:
        """Return the result with its tensors on their way to the host, in the present stream.

        Whoever fetches it must know that the copies are done.
        """
        copies = (tensor.to("cpu", non_blocking=True, copy=True) for tensor in self.tensors)
        return Unfetched(tuple(copies), self.finish, self.tensors)

    def fetch(self) -> T_co:
        """Return the result; waits for a device."""
        return self.finish(*(tensor.cpu().numpy() for tensor in self.tensors))
