"""Texts that replicas share through a real server, which fails and lies."""

from __future__ import annotations

import socket
import threading
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from tests.extras.memory.unit.redis_server import RedisServer
from tests.unit.drafters.support import end, make_drafter, make_request
from vllm_trie.drafts.text_store import StoredText, salt_digest
from vllm_trie.extras.memory import bounded_reply, replicas
from vllm_trie.extras.memory.replicas import Replicas, connect, decode, encode
from vllm_trie.extras.memory.store_file import Identity

IDENTITY = Identity("model", "tokenizer", 1000)
SALT = salt_digest("tenant")
SOON = 1.0


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture
def server(running):
    running.client.flushall()
    return running


@pytest.fixture
def join(monkeypatch):
    """Return what makes a replica, which is closed at the end."""
    monkeypatch.setattr(replicas, "_TIMEOUT", 0.5)
    monkeypatch.setattr(replicas, "LONGEST_PAUSE", 0.3)
    monkeypatch.setattr(replicas, "WAIT", 0.05)
    monkeypatch.setattr(replicas, "CHECK", 0.1)
    made: list[Replicas] = []

    def make(url: str, identity: Identity = IDENTITY) -> Replicas:
        made.append(Replicas(url, identity))
        return made[-1]

    yield make
    for replica in made:
        replica.closed()


def text(start: int, salt: bytes = SALT, length: int = 20) -> StoredText:
    return StoredText(salt, np.arange(start, start + length, dtype=np.int32), b"12345678")


def receive(replica: Replicas, number: int, seconds: float = SOON) -> list[StoredText]:
    """Return `number` texts or more, fewer if no more come in time."""
    texts: list[StoredText] = []
    end = time.monotonic() + seconds
    while len(texts) < number and time.monotonic() < end:
        texts += replica.receive(1 << 30)
        time.sleep(0.01)
    return texts


def warned(plugin_log: pytest.LogCaptureFixture, text: str) -> int:
    """Count warnings."""
    warnings = (record for record in plugin_log.records if record.levelname == "WARNING")
    return sum(text in record.getMessage() for record in warnings)


def wait_for(condition: Callable[[], Any], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.01)


def test_a_text_reaches_the_other_replicas_in_less_than_a_second(server, join, monkeypatch):
    monkeypatch.setattr(replicas, "MAX_TOKENS", 16)
    first, second, late = (join(server.url) for _ in range(3))
    foreign = join(server.url, IDENTITY._replace(tokenizer="another"))
    for replica in (first, second, foreign):
        replica.listen(SALT)
    first.add(text(0))
    first.add(text(100, salt_digest("another")))
    [got] = receive(second, 1)
    assert got.token_ids.tolist() == list(range(4, 20)), "of a longer text the end"
    assert got[0] == SALT
    assert got.prompt == b"12345678"
    late.listen(SALT)
    assert len(receive(late, 1)) == 1, "it starts with what others know"
    assert not receive(second, 1, 0.3)
    assert not first.receive(1000), "its own text comes back"
    assert not foreign.receive(1000), "another tokenizer's tokens mean something else"


def test_the_server_holds_no_salt(server, join):
    first = join(server.url)
    first.add(text(0, salt_digest("tenant")))
    wait_for(server.client.keys)
    [name] = server.client.keys()
    content = name + b"".join(b"".join(fields.values()) for _, fields in server.client.xrange(name))
    assert b"tenant" not in content
    assert SALT not in content
    assert SALT.hex().encode() not in content


def test_streams_are_bounded_in_length_and_age(server, join, monkeypatch):
    """As is what waits for an engine, but for the last read."""
    monkeypatch.setattr(replicas, "MAX_ENTRIES", 200)
    monkeypatch.setattr(replicas, "MAX_INCOMING", 20)
    first, idle = join(server.url), join(server.url)
    idle.listen(SALT)
    first.add(text(0))
    wait_for(server.client.keys)
    [name] = server.client.keys()
    server.client.delete(name)
    for number in range(200):
        server.client.xadd(name, {"old": 1}, id=f"{number + 1}-0")
    for _ in range(5):
        for start in range(100):
            first.add(text(start))
        wait_for(lambda: not first._outgoing)
    time.sleep(0.1)
    assert server.client.xlen(name) <= 400  # the server drops entries by the hundred
    assert server.client.xrange(name, count=1)[0][0] > b"1000000"
    assert 0 < server.client.ttl(name) <= replicas.MAX_AGE
    wait_for(lambda: idle._incoming)
    assert len(idle._incoming) <= replicas._ENTRIES_AT_ONCE


def test_own_texts_leave_while_those_of_others_never_end(server, join, monkeypatch):
    first, is_reading = join(server.url), threading.Event()

    def read(names: Any, block: Any) -> Any:
        is_reading.set()
        time.sleep(0.001)
        return names

    monkeypatch.setattr(first, "_read_streams", read)
    first.listen(SALT)
    assert is_reading.wait(5.0)
    first.add(text(0))
    wait_for(server.client.keys)


def test_without_the_server_nothing_waits(tmp_path, join, plugin_log):
    server = RedisServer(tmp_path)
    first, second = join(server.url), join(server.url)
    for replica in (first, second):
        replica.listen(SALT)
    first.add(text(0))
    assert len(receive(second, 1)) == 1
    server.kill()
    start = time.perf_counter()
    for number in range(2 * replicas.MAX_WAITING):
        first.listen(salt_digest(str(number)))
        first.add(text(number % 900))
        assert not first.receive(1000)
    assert time.perf_counter() - start < 20.0, "calls waited"
    wait_for(lambda: warned(plugin_log, "nothing is shared") == 2)
    time.sleep(1.0)
    assert warned(plugin_log, "nothing is shared") == 2, "each warns once"
    server.start()
    wait_for(lambda: warned(plugin_log, "shared with replicas again") == 2)
    second.add(text(500))
    first.listen(SALT)
    assert 500 in [got.token_ids[0] for got in receive(first, 1, 20.0)]
    server.kill()


@pytest.mark.parametrize("fault", ["full", "silent"])
def test_a_server_that_refuses_costs_the_sharing_alone(fault, tmp_path, join, plugin_log):
    server = RedisServer(tmp_path, *(["--maxmemory", "1mb"] if fault == "full" else []))
    url, silent = server.url, socket.create_server(("127.0.0.1", 0))
    if fault == "silent":
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}"
    first = join(url)
    first.listen(SALT)
    for start in range(100):
        first.add(text(start, length=900))
    wait_for(lambda: warned(plugin_log, "nothing is shared"))
    assert not first.receive(1000)
    assert warned(plugin_log, "nothing is shared") == 1
    assert "12345678" not in plugin_log.text, "the log has an entry"
    server.kill()
    silent.close()


def lies(name: bytes, honest: dict[bytes, bytes], other: bytes) -> list[dict[bytes, bytes]]:
    """Entries that no engine of this stream wrote."""
    outside = np.array([5, IDENTITY.vocab_size], dtype=np.int32)
    negative = np.array([-1], dtype=np.int32)
    return [
        {b"x": b"y"},
        {**honest, b"more": b"1"},
        {**honest, b"v": b"2"},
        {**honest, b"t": honest[b"t"][:-1]},
        {**honest, b"t": b""},
        {**honest, b"t": honest[b"t"][4:]},
        {**honest, b"p": b"1234567"},
        {**honest, b"p": b"87654321"},
        {**honest, b"e": b"e" * 100},
        encode(other, b"engine", text(0)),
        *(encode(name, b"engine", text(0)._replace(token_ids=t)) for t in (outside, negative)),
    ]


def test_lies_are_counted_and_dropped(server, join, plugin_log):
    first = join(server.url)
    name, other = first._stream(SALT), first._stream(salt_digest("other"))
    honest = encode(name, b"engine", text(0))
    told = lies(name, honest, other)
    for fields in told:
        server.client.xadd(name, fields)
        assert decode(name, SALT, fields, IDENTITY.vocab_size) is None
    server.client.xadd(name, honest)
    first.listen(SALT)
    [got] = receive(first, 1)
    assert got.token_ids.tolist() == list(range(20))
    assert first.num_dropped == len(told)
    assert warned(plugin_log, "foreign entries were dropped") == 1


@pytest.mark.parametrize(
    ("victim", "attacker"), [("a", "b"), (None, "b"), ("a", None), ("\0" + "2:xya", "\0" + "1:xya")]
)
def test_no_text_crosses_salts_or_adapters(server, join, victim, attacker):
    """The victim's entries, copied into the attacker's stream, and a prompt that both ask."""
    prompt, secret = list(range(40)), list(range(500, 540))
    drafters = []
    for _ in range(2):
        replica = join(server.url)
        drafter: Any = make_drafter(text_stores=[replica], store_tokens=10_000)
        drafters.append((drafter, replica))
    (origin, _), (target, inbox) = drafters
    request = make_request([*prompt, *secret], "v", len(prompt), cache_salt=victim)
    end(origin, request)
    wait_for(server.client.keys)
    [name] = server.client.keys()

    def ask(drafter: Any, salt: str | None) -> Any:
        request = make_request([*prompt, 500, 501], "q", len(prompt), cache_salt=salt)
        [tree] = drafter.propose([request])
        end(drafter, request)
        return tree

    alone: Any = make_drafter(store_tokens=10_000)
    for drafter in (alone, target):
        ask(drafter, attacker)
    for _, fields in server.client.xrange(name):
        server.client.xadd(inbox._stream(salt_digest(attacker)), fields)
    wait_for(lambda: inbox.num_dropped == 1)
    time.sleep(0.3)
    leaking, without = ask(target, attacker), ask(alone, attacker)
    for field in ("token_ids", "parents", "probabilities"):
        np.testing.assert_array_equal(getattr(leaking, field), getattr(without, field))
    # The victim's own requests find it there.
    ask(target, victim)
    wait_for(lambda: inbox._incoming)
    assert ask(target, victim).chain().token_ids[:8].tolist() == secret[2:10]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("folder", "must be redis://HOST"),
        ("http://host", "must be redis://HOST"),
        ("redis://host:port/0", "is no URL of a server"),
        ("redis://user:secret@host/abc", "its database is .abc.; it must be a number"),
    ],
)
def test_an_address_that_cannot_be_one(url, said):
    pytest.importorskip("redis", reason="the package redis is not installed")
    with pytest.raises(ValueError, match=said):
        connect(url)


def test_salts_in_use_are_heard(server, join, monkeypatch):
    monkeypatch.setattr(replicas, "MAX_STREAMS", 2)
    replica = join(server.url)
    for salt in (b"a", b"b", b"a", b"c"):
        replica.listen(salt)
    assert [*replica._salts.values()] == [b"a", b"c"]
    # What was read before all was forgotten comes too late.
    replica.forget()
    replica._move(replica._stream(b"a"), b"0-0", b"9-9", [text(0)])
    assert not replica.receive(1000)


@pytest.mark.parametrize("hours", [-1, 0, 1])
def test_what_was_published_before_is_forgotten(server, join, monkeypatch, hours):
    """Whatever this machine's clock says; streams of salts that come later included."""
    late = salt_digest("late")
    first, second = join(server.url), join(server.url)
    for replica in (first, second):
        replica.listen(SALT)
    for start in range(50):
        first.add(text(start))
        first.add(text(start, late))
    wait_for(lambda: len(second._incoming) == 50)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3600 * hours)
    second.forget()
    assert second.receive(1000) == []
    wait_for(lambda: None not in (second._first, *second._streams.values()))
    second.listen(late)
    wait_for(lambda: second._streams[second._stream(late)] != second._first)
    first.add(text(500))
    first.add(text(600, late))
    assert {int(got.token_ids[0]) for got in receive(second, 2)} == {500, 600}
    assert not receive(second, 1, 0.3)


def test_streams_that_begin_anew_are_heard(server, join):
    """After FLUSHALL on a server whose clock was put back, ids are before those that were read."""
    first, second = join(server.url), join(server.url)
    for replica in (first, second):
        replica.listen(SALT)
    name = first._stream(SALT)
    ahead = f"{int(1000 * (time.time() + 3600))}-0"
    server.client.xadd(name, encode(name, b"engine", text(0)), id=ahead)
    assert len(receive(second, 1)) == 1
    server.client.flushall()
    first.add(text(500))
    assert [got.token_ids[0] for got in receive(second, 1, 3.0)] == [500]


def test_one_key_that_is_no_stream_stops_one_salt(server, join, plugin_log, monkeypatch):
    first, second, other = join(server.url), join(server.url), salt_digest("another")
    server.client.set(first._stream(other), "no stream")
    for replica in (first, second):
        replica.listen(other)
        replica.listen(SALT)
    for start in range(3):
        first.add(text(start, other))
        first.add(text(start))
        assert [got.token_ids[0] for got in receive(second, 1)] == [start]
    assert warned(plugin_log, "delete it: WRONGTYPE") == 2, "each warns once"
    assert warned(plugin_log, "nothing is shared") == 0
    monkeypatch.setattr(replicas, "MAX_STREAMS", 1)
    assert second._unusable
    second.listen(SALT)
    assert not second._unusable, "no name is kept of a salt that went"


@pytest.mark.parametrize("command", ["xinfo", "xread"])
def test_a_command_that_the_server_refuses_is_said_once(tmp_path, join, plugin_log, command):
    """Whatever the number of salts; the rest goes on once it is allowed."""
    server = RedisServer(tmp_path)
    server.client.execute_command("ACL", "SETUSER", "default", f"-{command}")
    first, second = join(server.url), join(server.url)
    for number in range(10):
        second.listen(salt_digest(str(number)))
    second.listen(SALT)
    first.add(text(0))
    wait_for(lambda: warned(plugin_log, "nothing is shared"))
    time.sleep(0.5)
    assert not second._unusable
    server.client.execute_command("ACL", "SETUSER", "default", "+@all")
    first.listen(SALT)
    first.add(text(500))
    assert 500 in [got.token_ids[0] for got in receive(second, 2, 5.0)]
    assert warned(plugin_log, "nothing is shared") == 1
    assert warned(plugin_log, "delete it") == 0
    server.kill()


def test_of_entries_that_are_too_large_little_is_read(server, join, plugin_log, monkeypatch):
    monkeypatch.setattr(replicas, "_TIMEOUT", 10.0)
    monkeypatch.setattr(bounded_reply, "MAX_LINES", 5000)
    first = join(server.url)
    name, other = first._stream(SALT), first._stream(salt_digest("another"))
    large, honest = b"x" * (8 << 20), encode(name, b"engine", text(0))
    for _ in range(3):
        server.client.xadd(name, {**honest, b"t": large})
    server.client.xadd(name, honest)
    crowd = {str(number): 1 for number in range(bounded_reply.MAX_LINES)}
    server.client.xadd(other, crowd)
    del large, crowd
    tracemalloc.start()
    first.listen(SALT)
    [got] = receive(first, 1, 10.0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert got.token_ids.tolist() == list(range(20))
    assert first.num_dropped == 3
    assert peak < 4 << 20
    first.listen(salt_digest("another"))
    wait_for(lambda: warned(plugin_log, "delete it: more than"), 30.0)
    server.client.xadd(name, honest)
    assert len(receive(first, 1)) == 1, "the others are heard"
    assert warned(plugin_log, "nothing is shared") == 0


def test_each_reply_has_bounds_of_its_own(server, monkeypatch):
    monkeypatch.setattr(bounded_reply, "MAX_KEPT", 2500)
    monkeypatch.setattr(bounded_reply, "MAX_LINES", 9)
    client = connect(server.url)
    client.set("a", b"x" * 1000)
    for _ in range(3):
        assert list(map(len, client.mget(["a"] * 3))) == [1000, 1000, 0]
    client.close()


@pytest.mark.parametrize("reply", [b"$9999999999\r\n", b"+", b"*9999999999\r\n"])
def test_a_reply_without_an_end_is_not_read(join, plugin_log, reply):
    listening = socket.create_server(("127.0.0.1", 0))
    part = b":1\r\n" * 10_000 if reply.startswith(b"*") else b"x" * 40_000
    sent = 0

    def serve() -> None:
        nonlocal sent
        with suppress(OSError):
            while True:
                connection, _ = listening.accept()
                with suppress(OSError), connection:
                    connection.sendall(reply)
                    while True:
                        connection.sendall(part)
                        sent += len(part)

    threading.Thread(target=serve, daemon=True).start()
    first = join(f"redis://127.0.0.1:{listening.getsockname()[1]}")
    first.listen(SALT)
    wait_for(lambda: warned(plugin_log, "nothing is shared"), 30.0)
    assert sent < 32 << 20
    listening.close()
