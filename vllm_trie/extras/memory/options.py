"""Options of what an engine learns for later ones and for replicas."""

from __future__ import annotations

from pydantic import BaseModel, Field


class MemoryOptions(BaseModel):
    """The place of finished requests' texts; ``exclude`` keeps that out of traces."""

    store_path: str | None = Field(
        default=None,
        exclude=True,
        description="A folder for a warm start: text to draft from is saved there every minute and "
        "at shutdown, and read at the next start. Engines of one model may share it. Its files "
        "hold text of users.",
    )
    store: str | None = Field(
        default=None,
        exclude=True,
        description="A Redis or Valkey server, redis://HOST:6379/0 (rediss:// with TLS), through "
        "which replicas of one model draft from one another's finished texts. User and password "
        "may stand in VLLM_TRIE_STORE_USER and VLLM_TRIE_STORE_PASSWORD. The server holds text of "
        "users.",
    )
