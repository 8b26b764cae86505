"""Entry point of the plugin: vLLM calls :func:`register` in each of its processes."""

from __future__ import annotations

from vllm_trie.hooks import ledger
from vllm_trie.hooks.start.limits import ENV_SWITCH
from vllm_trie.refusal import turned_off

FEATURES: tuple[ledger.Feature, ...] = ("speculation", "beam")

_installed: dict[str, str] = {}


def status() -> dict[str, str]:
    """Return feature -> "ok", or why it stepped aside; empty before :func:`register`."""
    return dict(_installed)


def register() -> None:
    """Patch vLLM, once per process.

    Never raises: a feature whose part of vLLM is not as the ledger expects it steps aside with one
    message, and plain vLLM goes on. With ``VLLM_TRIE_BEAM=0`` the patches that only recognize beam
    requests, to say that the native search is off, are installed nevertheless.
    """
    if _installed:
        return
    for feature in FEATURES:
        _installed[feature] = _install(feature)


def _install(feature: ledger.Feature) -> str:
    from vllm.logger import init_logger

    logger = init_logger("vllm.vllm_trie")
    try:
        reason = ledger.mismatch(feature)
        if not reason:
            ledger.install(feature, native_search=not turned_off(ENV_SWITCH))
            return "ok"
    except Exception as error:
        logger.exception("vllm-trie: hooking %s failed", feature)
        reason = f"{type(error).__name__}: {error}"
    logger.error(
        "vllm-trie steps aside (%s): %s. vLLM goes on without it. Supported versions of vLLM: %s; "
        "run `vllm-trie doctor` for the whole list.",
        feature,
        reason,
        supported(),
    )
    try:
        ledger.install(feature, steps_aside=True)
    except Exception:
        logger.debug("vLLM itself answers who asks for %s", feature, exc_info=True)
    return reason


def supported() -> str:
    """Return the releases of vLLM that the plugin was written for, for messages."""
    return ", ".join(f"{series}.x" for series in ledger.SUPPORTED_VLLM_VERSIONS)
