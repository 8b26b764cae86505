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

}  // namespace ngram
