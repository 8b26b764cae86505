"""What all data files have in common: damage, other files and other versions are refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit import numbers_file
from tests.unit.numbers_file import FORMAT
from vllm_trie.files.checked_file import PREFIX, CheckedFormat


@pytest.fixture
def path(tmp_path):
    """A file of one kind; all kinds are read by `CheckedFormat.read`."""
    path = numbers_file.write(tmp_path / "file", 40)
    numbers_file.read(path)
    return path


def refusal(path: Path, content: bytes | None = None) -> str:
    """Return what is said to a file, once it has this content."""
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(FORMAT.error) as refused:
        numbers_file.read(path)
    assert f"{path}: " in str(refused.value)
    assert str(refused.value).endswith(FORMAT.remedy)
    return str(refused.value)


def test_a_write_that_fails_leaves_what_another_has_written_meanwhile(path):
    def body() -> Iterator[bytes]:
        yield bytes(8)
        numbers_file.write(path, 3)
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        FORMAT.write(path, numbers_file.Header(count=2), body())
    assert [*path.parent.iterdir()] == [path]
    assert numbers_file.read(path) == [0, 1, 2]


def test_files_have_the_mode_of_others(path):
    umask = os.umask(0o027)
    try:
        numbers_file.write(path, 2)
    finally:
        os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o640


def test_every_truncation_is_noticed(path):
    content = path.read_bytes()
    for size in [*range(0, 200), *range(200, len(content), 97), len(content) - 1]:
        said = refusal(path, content[:size])
        assert any(word in said for word in ("truncated", "it is not a", "damaged")), said
    assert "longer than it should be" in refusal(path, content + b"\0")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_every_changed_byte_is_noticed(path, data):
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    changed = path.with_suffix(".changed")
    refusal(changed, bytes(content))
    with pytest.raises(FORMAT.error):
        FORMAT.read(changed, check=False)  # as it is not the copy of another process


def test_missing_foreign_and_newer_files(path):
    version = FORMAT.version
    assert "No such file" in refusal(path.with_suffix(".nothing"))
    content = path.read_bytes()
    newer = FORMAT.magic + (version + 1).to_bytes(4, "little") + content[12:]
    said = refusal(path, newer)
    assert f"version {version + 1}, this program reads {version}" in said
    for other in (b"", b"PK\x03\x04 a zip file", b"\0" * 1000, b"VTRIEXXX" + content[8:]):
        assert "it is not a" in refusal(path, other)


@pytest.mark.parametrize("step", ["pathlib.Path.stat", f"{CheckedFormat.__module__}.sealed_copy"])
def test_a_file_that_may_not_be_looked_for_or_copied(path, monkeypatch, step):
    def fail(self: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(step, fail)
    with pytest.raises(FORMAT.error, match="Permission denied"):
        numbers_file.read(path)


def test_a_large_header_is_not_read(path):
    with path.open("r+b") as opened:
        opened.write(PREFIX.pack(FORMAT.magic, FORMAT.version, 1 << 31, bytes(32)))
        opened.truncate(1 << 33)  # sparse
    assert "header" in refusal(path)
