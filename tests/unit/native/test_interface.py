"""Structures and functions as Python reads them from C++, against the compiler's."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from tests.compiled import compile_library
from vllm_trie.native import NativeLibrary
from vllm_trie.native.interface import Interface

HEADER = """
#pragma once
#include <cstdint>

namespace shapes {
struct Size {
    double height;  // a comment with struct Job { in it
    int32_t width;
};
}  // namespace shapes
"""
SOURCE = """
#include "shapes.hpp"

// Longer than its members: it begins and ends with padding around what it holds.
struct Job {
    int32_t first, second;
    const int32_t* const* numbers;
    float ratio;
    shapes::Size size;
    int32_t flag;
    int64_t number;
    int32_t last;
};

extern "C" int32_t size_of_job() { return sizeof(Job); }

extern "C" double sum_job(const Job* jobs, int32_t index, double* out,
                          float factor) {
    const Job& job = jobs[index];
    *out = factor * job.ratio;
    return job.first + 2 * job.second + 3 * **job.numbers + 4 * job.size.height +
           5 * job.size.width + 6 * job.flag + 7 * static_cast<double>(job.number) + 8 * job.last;
}

extern "C" void double_last(Job* job) { job->last *= 2; }
static int32_t hidden(int32_t value) { return value; }
"""


@pytest.fixture
def library(tmp_path, monkeypatch):
    header, source = tmp_path / "shapes.hpp", tmp_path / "shapes.cpp"
    header.write_text(HEADER)
    source.write_text(SOURCE)
    compile_library(source, monkeypatch)
    return NativeLibrary("shapes", [source], [header])


def test_a_packed_structure_is_the_compilers(library):
    core, layout = library.functions, library.layout("Job")
    assert layout.size == core.size_of_job()
    number = ctypes.c_int32(5)
    address = ctypes.c_void_p(ctypes.addressof(number))
    members = (1, 2, ctypes.addressof(address), 0.5, 1.25, 7, True, 1 << 40, 11)
    jobs = layout.pack(*(0,) * len(members)) + layout.pack(*members)
    out = ctypes.c_double()
    expected = 1 + 2 * 2 + 3 * 5 + 4 * 1.25 + 5 * 7 + 6 + 7 * float(1 << 40) + 8 * 11
    assert core.sum_job(jobs, 1, ctypes.byref(out), 3.0) == expected
    assert out.value == 1.5


def test_results_are_read_back(library):
    layout = library.layout("Job")
    job = ctypes.create_string_buffer(layout.pack(*[3] * 9), layout.size)
    library.functions.double_last(job)
    assert layout.unpack(job) == (3, 3, 3, 3.0, 3.0, 3, 3, 3, 6)


def read(tmp_path: Path, text: str) -> Interface:
    file = tmp_path / "some.cpp"
    file.write_text(text)
    return Interface([file])


def test_functions_are_found_by_their_definitions(library, tmp_path):
    assert set(read(tmp_path, SOURCE).functions()) == {"size_of_job", "sum_job", "double_last"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("struct Job {\n    int32_t a[3];\n};", "'int32_t a.3.' is not a plain declaration"),
        ("struct Job {\n    int32_t *a, *b;\n};", "is not a plain declaration"),
        ("struct Job {\n    short a;\n};", "define 0 structures named short, not 1"),
        ("struct Job {\n    int a;\n};\nstruct Job {\n    int b;\n};", "define 2 structures"),
    ],
)
def test_what_cannot_be_read_is_an_error(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, text).layout("Job")


def test_a_function_of_other_types_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="'short' is not a type that Python can pass; use int, "):
        read(tmp_path, 'extern "C" int half(short value) { return value / 2; }').functions()
