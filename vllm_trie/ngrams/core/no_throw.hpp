// For functions of a C interface.
#pragma once

#include <exception>

#include "index.hpp"

namespace ngram {

// Nothing may throw across a C interface: what runs out of memory, or would need more than there
// can be, returns kNone instead of the result of `work`.
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
