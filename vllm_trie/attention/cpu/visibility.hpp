// Which KV slots a query row sees.
#pragma once

#include <algorithm>
#include <cstdint>

namespace vllm_trie {

// A request's slots [first, dense) are all seen, slot dense + j behind them if bit j of `words` is
// set. Committed tokens have no words: causal attention is `dense` alone.
struct Visibility {
  int64_t first;  // at most dense
  int64_t dense;
  const uint64_t* words;
  int64_t num_words;

  // Bit i of the result: slot `start + i` is seen, for i < lanes <= 32.
  uint32_t bits(int64_t start, int lanes) const {
    const int64_t hidden = std::clamp<int64_t>(first - start, 0, lanes);
    const uint64_t all = (uint64_t{1} << lanes) - (uint64_t{1} << hidden);
    const int64_t offset = start - dense;
    if (offset + lanes <= 0) return static_cast<uint32_t>(all);
    uint64_t result;
    if (offset < 0) {
      result = (num_words ? words[0] << -offset : 0) | ((uint64_t{1} << -offset) - 1);
    } else {
      const int64_t word = offset / 64;
      const int shift = static_cast<int>(offset % 64);
      if (word >= num_words) return 0;
      result = words[word] >> shift;
      if (shift && word + 1 < num_words) result |= words[word + 1] << (64 - shift);
    }
    return static_cast<uint32_t>(result & all);
  }
};

// Clears the lowest `count` bits that are set: the ancestors of a node that are nearest to the root.
inline void drop_ancestors(uint64_t* words, int64_t count) {
  for (; count > 0; --count) {
    while (!*words) ++words;
    *words &= *words - 1;
  }
}

}  // namespace vllm_trie
