// Products of vectors, in the type that the machine multiplies weights (or keys) of a type in.
#pragma once

#include "vectors.hpp"

namespace vllm_trie {

// Weights are multiplied with rows of floats, or of their own type where the machine multiplies
// pairs of it, exactly, and adds them in float32.
template <typename Weight>
struct Multiplier {
  using Row = float;
  using Vector = Floats;
  static constexpr int kSize = kLanes;  // weights that one instruction multiplies
  static Vector load_row(const Row* from) { return load(from); }
  static Vector repeat(const Row* from) { return broadcast(*from); }
  static Floats add(Floats sum, Vector row, Vector weights) {
    return sum + row * weights;  // the compiler decides whether to round in between
  }
};

#if defined(VLLM_TRIE_BF16_PRODUCTS)
template <>
struct Multiplier<BFloat16> {
  using Row = BFloat16;
  using Vector = __m512bh;
  static constexpr int kSize = 2 * kLanes;
  static Vector load_row(const BFloat16* from) { return (Vector)_mm512_loadu_si512(from); }
  static Vector repeat(const BFloat16* from) {
    int32_t pair;
    std::memcpy(&pair, from, sizeof(pair));
    return (Vector)_mm512_set1_epi32(pair);
  }
  static Floats add(Floats sum, Vector row, Vector weights) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, row, weights);
  }
};
#endif

template <typename Weight>
using RowOf = typename Multiplier<Weight>::Row;

}  // namespace vllm_trie
