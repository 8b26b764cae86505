"""A parser of a server's replies that bounds what it keeps of them.

A string's length comes before it. What is too long is read in small parts and dropped, so that an
empty string takes its place, and the reply goes on behind it.
"""

from __future__ import annotations

from typing import Any

from redis._parsers import _RESP2Parser
from redis._parsers.socket import SocketBuffer
from redis.exceptions import ConnectionError

SHORT = 64
"""Bytes of a string that is always kept, as ids are."""
MAX_STRING = 1 << 18
MAX_KEPT = 1 << 25
"""Bytes of all strings of a reply."""
MAX_DROPPED = 1 << 29
"""Bytes of a reply that are read and dropped: a server's longest string by default."""
MAX_LINE = 1 << 16
MAX_LINES = 1 << 18
"""Lines of a reply: each string, number and list is one."""
_PART = 1 << 16


class ReplyTooLarge(ConnectionError):
    """A reply has more than is worth dropping; the connection ends."""


class _BoundedBuffer(SocketBuffer):
    """The bytes that a connection has received."""

    _num_kept = _num_dropped = _num_lines = 0  # of the present reply

    def read(self, length: int, *arguments: Any, **options: Any) -> bytes:
        if length > SHORT:
            if length > MAX_STRING or self._num_kept + length > MAX_KEPT:
                self._drop(length)
                return b""
            self._num_kept += length
        data: bytes = super().read(length, *arguments, **options)
        return data

    def readline(self, *arguments: Any, **options: Any) -> bytes:
        self._num_lines += 1
        data = self._buffer.readline()
        while not data.endswith(b"\r\n"):
            if len(data) > MAX_LINE:
                raise ReplyTooLarge(f"a line of more than {MAX_LINE} bytes")
            self._read_from_socket(*arguments, **options)
            data += self._buffer.readline()
        if self._num_lines > MAX_LINES:
            raise ReplyTooLarge(f"more than {MAX_LINES} parts")
        return data[:-2]

    def purge(self) -> None:
        super().purge()
        self._num_kept = self._num_dropped = self._num_lines = 0

    def _drop(self, length: int) -> None:
        self._num_dropped += length
        if self._num_dropped > MAX_DROPPED:
            raise ReplyTooLarge(f"{self._num_dropped} bytes of strings that are too long")
        left = length + 2  # with the end of the line
        left -= len(self._buffer.read(left))
        part = memoryview(bytearray(min(_PART, left)))
        while left:
            size = self._sock.recv_into(part[:left])
            if not size:
                raise ConnectionError("the server closed the connection within a reply")
            left -= size


class BoundedParser(_RESP2Parser):
    """The client's parser of version 2 of the protocol, with a bounded buffer."""

    def on_connect(self, connection: Any) -> None:
        super().on_connect(connection)
        self._buffer = _BoundedBuffer(
            connection._sock, self.socket_read_size, connection.socket_timeout
        )
