// Where vLLM's kernels keep the keys and the values of a block of one KV head: the first half of its
// elements are keys, the second half values. Indices count from the first element of a half.
#pragma once

#include "../../native/vectors.hpp"

namespace vllm_trie {

// Slots whose keys (and values) lie as those of any other such slots: a block holds a multiple.
constexpr int kSegment = 16;

// The layout of `vec` and `vec16`:
//
//     keys    [head_size, block_size]   column by column
//     values  [block_size, head_size]   row by row
template <typename T>
struct Columns {
  using Element = T;
  int64_t block_size, head_size;

  // The element with number `d` of a slot's key or value.
  int64_t key(int64_t slot, int64_t d) const { return d * block_size + slot; }
  int64_t value(int64_t slot, int64_t d) const { return slot * head_size + d; }

  // Number `d` of the keys of kLanes slots of a segment; kLanes numbers of a slot's value.
  Floats keys(const T* half, int64_t slot, int64_t d) const {
    return load_floats(half + key(slot, d));
  }
  Floats values(const T* half, int64_t slot, int64_t d) const {
    return load_floats(half + value(slot, d));
  }
};

// The layout of `amx`, whose tiles multiply and add two numbers at a time:
//
//     keys    [block_size / 16, head_size / 2, 16 slots, 2 numbers]
//     values  [head_size / 16, block_size / 2, 16 numbers, 2 slots]
struct Pairs {
  using Element = BFloat16;
  int64_t block_size, head_size;  // multiples of 32

  int64_t key(int64_t slot, int64_t d) const {
    return slot / 16 * 16 * head_size + d / 2 * 32 + slot % 16 * 2 + d % 2;
  }
  int64_t value(int64_t slot, int64_t d) const {
    return d / 16 * 16 * block_size + slot / 2 * 32 + d % 16 * 2 + slot % 2;
  }
  Floats keys(const BFloat16* half, int64_t slot, int64_t d) const {
    return one_of_pairs(half + key(slot, d / 2 * 2), d % 2);
  }
  Floats values(const BFloat16* half, int64_t slot, int64_t d) const {
    return one_of_pairs(half + value(slot / 2 * 2, d), slot % 2);
  }

 private:
  static Floats one_of_pairs(const BFloat16* from, bool second) {
    Ints pairs;
    std::memcpy(&pairs, from, sizeof(pairs));
    return (Floats)(second ? pairs & static_cast<int32_t>(0xffff0000) : pairs << 16);
  }
};

}  // namespace vllm_trie
