// For functions of a C interface.
#pragma once

#include <exception>

#include "index.hpp"

namespace ngram {

// Returns the result of `work`, or kNone if it throws (out of memory, or a size that cannot be):
// nothing may throw across a C interface.
template <typename Work>
int32_t without_throwing(const Work& work) noexcept {
    try {
        return work();
    } catch (const std::exception&) {
        return kNone;
    }
}

inline Index* new_index(int32_t max_order) noexcept {
    if (max_order < 1 || max_order > kMaxOrder) return nullptr;
    Index* index = nullptr;
    without_throwing([&] {
        index = new Index(max_order);
        return 0;
    });
    return index;
}

}  // namespace ngram
