"""Texts of finished requests, shared with other replicas through a Redis or Valkey server.

A stream holds the texts of one model, tokenizer and cache salt, the latest `MAX_ENTRIES` of the
`MAX_AGE` seconds before the last. Its name is a digest of them. The fields of an entry:

    v    version of this layout
    e    the engine that wrote it, drawn at its start
    p    fingerprint of the prompt, or nothing
    t    tokens, int32, little-endian
    d    BLAKE2b of the stream's name and of the other fields

An engine reads the streams of the salts that its own requests have, each from a position that is an
id of the stream or a time of the server: clocks of engines may differ. Whoever may read the server
reads texts of users.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np

from vllm_trie.drafts.engine.observers import StepObserver
from vllm_trie.drafts.text_store import PROMPT_BYTES, StoredText, TextStore
from vllm_trie.extras.memory.store_file import Identity
from vllm_trie.refusal import RefusedError

if TYPE_CHECKING:
    from redis import Redis

VERSION = b"1"
MAX_ENTRIES = 4096
MAX_AGE = 24 * 3600
MAX_TOKENS = 1 << 16
"""A text has at most as many; of a longer one, the end is shared."""
MAX_STREAMS = 1024
"""Streams are read for this many salts, those that were used last."""
MAX_WAITING = 1024
"""Texts that wait for the server."""
MAX_INCOMING = 1 << 20
"""Tokens that wait for the engine, without those of the last read."""
CHECK = 5.0
"""Seconds between two looks whether streams began anew."""
RETRY = 300.0
"""Seconds without an attempt to read a stream that cannot be read."""
WAIT = 0.2
"""Seconds that a read waits for texts of others, and own texts for the read."""
LONGEST_PAUSE = 30.0
"""Seconds without an attempt to reach a server that is gone."""
_TIMEOUT = 5.0
_ENTRIES_AT_ONCE = 64
_FIELDS = frozenset((b"v", b"e", b"p", b"t", b"d"))
_MAX_ENGINE_BYTES = 32
_START = b"0-0"
_WRONG_TYPE = "WRONGTYPE"
USER, PASSWORD = "VLLM_TRIE_STORE_USER", "VLLM_TRIE_STORE_PASSWORD"
"""Environment variables."""

logger = logging.getLogger(f"vllm.{__name__}")


class Replicas(TextStore, StepObserver):
    """Publishes an engine's texts and receives those of others, in a thread of its own.

    No call waits for the server. Without it nothing is shared, and the thread tries again; it warns
    once each time that the server goes.

    Args:
        url: Of the server.
        identity: Of the engine; replicas of others are not heard.
        user, password: For a URL without them.

    Attributes:
        num_dropped: Entries that were not sound.
    """

    def __init__(
        self, url: str, identity: Identity, user: str | None = None, password: str | None = None
    ) -> None:
        self.num_dropped = 0
        self._identity = identity
        self._engine = os.urandom(8)
        self._client = connect(url, user, password)
        self._outgoing: deque[StoredText] = deque(maxlen=MAX_WAITING)
        self._incoming: deque[StoredText] = deque()
        # Of each salt in use, the last used one last: the stream's name, and the position behind
        # which it is read; None: behind what it holds.
        self._streams: OrderedDict[bytes, bytes | None] = OrderedDict()
        self._salts: dict[bytes, bytes] = {}
        self._first: bytes | None = _START  # position of other streams; None: the present time
        self._lock = threading.Lock()  # of the streams, the salts and this position
        self._unusable: dict[bytes, float] = {}  # streams, and when to try them again
        self._next_check = 0.0  # by time.monotonic
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vllm-trie-replicas", daemon=True)
        self._thread.start()

    def listen(self, salt: bytes) -> None:
        name = self._stream(salt)
        with self._lock:
            self._streams.setdefault(name, self._first)
            self._streams.move_to_end(name)
            self._salts[name] = salt
            if len(self._streams) > MAX_STREAMS:
                oldest, _ = self._streams.popitem(last=False)
                del self._salts[oldest]
                self._unusable.pop(oldest, None)

    def add(self, text: StoredText) -> None:
        """Share a text; of too many that wait, the oldest are dropped."""
        self._outgoing.append(text)

    def receive(self, max_tokens: int) -> list[StoredText]:
        texts = []
        while self._incoming and max_tokens > 0:
            texts.append(self._incoming.popleft())
            max_tokens -= len(texts[-1].token_ids)
        return texts

    def forget(self) -> None:
        with self._lock:
            self._first = None
            self._streams = OrderedDict.fromkeys(self._streams)
            self._incoming.clear()

    def closed(self) -> None:
        """Publish what waits, if the server is there, and end the thread."""
        self._ending.set()
        self._thread.join(_TIMEOUT)
        self._client.close()

    def _run(self) -> None:
        pause, has_warned = WAIT, False
        while not self._ending.is_set():
            try:
                self._publish_waiting()
                self._read()
            except Exception as error:  # the server is gone, full, or no Redis at all
                level = logging.DEBUG if has_warned else logging.WARNING
                logger.log(
                    level,
                    "the option 'store': nothing is shared with other replicas, the engine goes "
                    "on: %s: %s",
                    type(error).__name__,
                    error,
                )
                has_warned = True
                self._ending.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            else:
                if has_warned:
                    logger.warning("the option 'store': texts are shared with replicas again")
                pause, has_warned = WAIT, False
        try:
            self._publish_waiting()
        except Exception:
            logger.debug("texts were not shared at the end", exc_info=True)

    def _publish_waiting(self) -> None:
        while self._outgoing:
            with self._client.pipeline(transaction=False) as pipeline:
                seconds, _ = self._client.time()
                names = []
                for _ in range(min(len(self._outgoing), _ENTRIES_AT_ONCE)):
                    # Taken out first: a text that the server refuses does not stop the others.
                    text = self._outgoing.popleft()
                    name = self._stream(text.salt)
                    entry: Any = encode(name, self._engine, text)
                    pipeline.xadd(name, entry, maxlen=MAX_ENTRIES, approximate=True)
                    oldest = f"{(int(seconds) - MAX_AGE) * 1000}-0"
                    pipeline.xtrim(name, minid=oldest, approximate=False)
                    pipeline.expire(name, MAX_AGE)
                    names += [name] * 3
                # An error that the client raises would quote the text.
                for name, answer in zip(names, pipeline.execute(raise_on_error=False), strict=True):
                    if isinstance(answer, Exception):
                        self._set_aside(name, answer)

    def _read(self) -> None:
        """Read a few entries of each stream; wait for some if there are none."""
        with self._lock:
            streams = dict(self._streams)
            is_behind = None in (self._first, *streams.values())
        if is_behind or time.monotonic() >= self._next_check:
            self._check(streams)
            self._next_check = time.monotonic() + CHECK
        names = [name for name in streams if self._is_usable(name)]
        if not names or self._is_full:
            self._ending.wait(WAIT)
            return
        has_read = False
        for start in range(0, len(names), _ENTRIES_AT_ONCE):
            some = names[start : start + _ENTRIES_AT_ONCE]
            is_last = start + _ENTRIES_AT_ONCE >= len(names)
            block = int(1000 * WAIT) if is_last and not has_read else None
            while some := self._read_streams(some, block):  # those with more, perhaps
                has_read, block = True, None
                if self._outgoing or self._is_full or self._ending.is_set():
                    break

    @property
    def _is_full(self) -> bool:
        return sum(len(text.token_ids) for text in list(self._incoming)) >= MAX_INCOMING

    def _read_streams(self, names: Sequence[bytes], block: int | None) -> list[bytes]:
        """Read some entries of streams; return the streams that had any.

        One that cannot be read does not keep the others from it.
        """
        from redis.exceptions import ResponseError

        from vllm_trie.extras.memory.bounded_reply import ReplyTooLarge

        with self._lock:
            streams: Any = {name: self._streams.get(name) for name in names}
        streams = {name: position for name, position in streams.items() if position is not None}
        if not streams:
            return []
        count = max(_ENTRIES_AT_ONCE // len(streams), 1)
        try:
            answer: Any = self._client.xread(streams, count=count, block=block)
        except (ResponseError, ReplyTooLarge) as error:
            if len(streams) > 1:
                return [name for name in streams if self._read_streams([name], None)]
            [name] = streams
            try:  # one entry may be what is too large
                answer = self._client.xread(streams, count=1)
            except (ResponseError, ReplyTooLarge):
                self._set_aside(name, error)
                return []
        for name, entries in answer or ():
            salt = self._salts.get(name)
            if salt is None or not entries:  # dropped meanwhile
                continue
            texts = [self._checked(name, salt, fields) for _, fields in entries]
            heard = [text for text in texts if text is not None]
            self._move(name, streams[name], entries[-1][0], heard)
        return [name for name, _ in answer or ()]

    def _move(
        self,
        name: bytes,
        before: bytes | None,
        position: bytes,
        heard: Sequence[StoredText] = (),
    ) -> None:
        """Read a stream from another position on, and take in what was heard up to there, unless it
        was dropped or begun anew meanwhile."""
        with self._lock:
            if name in self._streams and self._streams[name] == before:
                self._streams[name] = position
                self._incoming.extend(heard)

    def _check(self, streams: Mapping[bytes, bytes | None]) -> None:
        """Find positions, and streams that have begun anew: their newest id is before what was
        read, as after FLUSHALL on a server whose clock was put back."""
        seconds, microseconds = self._client.time()
        now = b"%d-0" % (1000 * int(seconds) + int(microseconds) // 1000)
        with self._lock:
            first = self._first = self._first or now
        names = [name for name in streams if self._is_usable(name)]
        for name, info in zip(names, self._describe(names), strict=True):
            position, newest = streams[name], _START
            if not isinstance(info, Exception):
                newest = info["last-generated-id"]
            elif "no such key" not in str(info):
                self._set_aside(name, info)
                continue
            if position is None:
                self._move(name, None, newest)
            elif _order(newest) < _order(position):
                # Behind a time the stream may have nothing yet.
                self._move(name, position, newest if position == first else _START)

    def _describe(self, names: Sequence[bytes]) -> list[Any]:
        """Return what the server says of each stream, or the error that it makes."""
        from vllm_trie.extras.memory.bounded_reply import ReplyTooLarge

        with self._client.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.xinfo_stream(name)
            try:
                return pipeline.execute(raise_on_error=False)
            except ReplyTooLarge as error:
                if len(names) == 1:
                    return [error]
        return [info for name in names for info in self._describe([name])]

    def _is_usable(self, name: bytes) -> bool:
        return time.monotonic() >= self._unusable.get(name, 0.0)

    def _set_aside(self, name: bytes, error: Exception) -> None:
        """Leave a stream that cannot be read alone for a while; raise an error that is not of this
        stream alone, but of the server or of what its user may do."""
        from vllm_trie.extras.memory.bounded_reply import ReplyTooLarge

        if not isinstance(error, ReplyTooLarge) and not str(error).startswith(_WRONG_TYPE):
            raise error
        level = logging.DEBUG if name in self._unusable else logging.WARNING
        self._unusable[name] = time.monotonic() + RETRY
        logger.log(
            level,
            "the option 'store': the texts of one cache salt are not shared with other replicas, "
            "as the server's key %r cannot be used; delete it: %s",
            name.decode(),
            error,
        )

    def _checked(
        self, name: bytes, salt: bytes, fields: Mapping[bytes, bytes]
    ) -> StoredText | None:
        """Return the text of an entry, None if it is this engine's or not sound."""
        if fields.get(b"e") == self._engine:
            return None
        text = decode(name, salt, fields, self._identity.vocab_size)
        if text is None:
            self.num_dropped += 1
            level = logging.WARNING if self.num_dropped == 1 else logging.DEBUG
            logger.log(
                level, "the option 'store': %d foreign entries were dropped", self.num_dropped
            )
        return text

    def _stream(self, salt: bytes) -> bytes:
        digest = _digest(*map(_encoded, self._identity), salt).hex()[:32]
        return b"vllm-trie:" + digest.encode()


def connect(url: str, user: str | None = None, password: str | None = None) -> Redis:
    """Return a client, which connects with its first command.

    Raises:
        RefusedError: The URL is none of a server, or the package `redis` is missing.
    """
    try:
        from redis import Redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        from vllm_trie.extras.memory.bounded_reply import BoundedParser
    except ImportError:
        raise RefusedError(
            "the option 'store' needs the package redis: pip install 'vllm-trie[replicas]'"
        ) from None
    if not url.startswith(("redis://", "rediss://")):
        raise RefusedError(
            "the option 'store' must be redis://HOST:PORT/DATABASE or rediss:// with TLS; for a "
            "folder take the option 'store_path'"
        )
    try:
        database = urlsplit(url).path.strip("/")
        if database and not database.isdecimal():
            raise RefusedError(f"its database is {database!r}; it must be a number, 0 for example")
        client: Redis = Redis.from_url(
            url,
            protocol=2,
            parser_class=BoundedParser,
            retry=Retry(NoBackoff(), 0),
            socket_connect_timeout=_TIMEOUT,
            socket_timeout=_TIMEOUT,
            username=user or None,
            password=password or None,
        )
    except ValueError as error:
        raise RefusedError(f"the option 'store' is no URL of a server: {error}") from None
    return client


def encode(name: bytes, engine: bytes, text: StoredText) -> dict[bytes, bytes]:
    """Return the fields of an entry of the stream of this name."""
    tokens = text.token_ids[-MAX_TOKENS:].astype("<i4").tobytes()
    fields = {b"v": VERSION, b"e": engine, b"p": text.prompt, b"t": tokens}
    return {**fields, b"d": _digest(name, *fields.values())}


def decode(
    name: bytes, salt: bytes, fields: Mapping[bytes, bytes], vocab_size: int
) -> StoredText | None:
    """Return the text of an entry, None if it is not sound.

    An entry of another stream is not: its digest covers the name.
    """
    if fields.keys() != _FIELDS or fields[b"v"] != VERSION:
        return None
    prompt, packed = fields[b"p"], fields[b"t"]
    if len(prompt) not in (0, PROMPT_BYTES) or len(fields[b"e"]) > _MAX_ENGINE_BYTES:
        return None
    if not 0 < len(packed) <= 4 * MAX_TOKENS or len(packed) % 4:
        return None
    if fields[b"d"] != _digest(name, *(fields[key] for key in (b"v", b"e", b"p", b"t"))):
        return None
    tokens = np.frombuffer(packed, dtype="<i4").astype(np.int32)
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size:
        return None
    return StoredText(salt, tokens, prompt)


def _digest(*parts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=32, person=b"vllm-trie stream")
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def _order(position: bytes) -> list[int]:
    return list(map(int, position.split(b"-")))


def _encoded(part: object) -> bytes:
    return str(part).encode()
