// Small matrix products: a tile of rows times a strip of columns, accumulated in registers.
#pragma once

#include "../../native/vectors.hpp"

namespace vllm_trie {

// Products of elements of a type: of floats, or of the type itself where the machine multiplies
// pairs of it, exactly, and adds them in float32.
template <typename T>
struct Multiplier {
  using Element = float;
  using Vector = Floats;
  static constexpr int kSize = kLanes;  // elements that one instruction multiplies
  static Vector load_row(const float* from) { return load(from); }
  static Vector repeat(const float* from) { return broadcast(*from); }
  static Floats add(Floats sum, Vector left, Vector right) {
    return sum + left * right;  // the compiler decides whether to round in between
  }
};

#if defined(VLLM_TRIE_BF16_PRODUCTS)
template <>
struct Multiplier<BFloat16> {
  using Element = BFloat16;
  using Vector = __m512bh;
  static constexpr int kSize = 2 * kLanes;
  static Vector load_row(const BFloat16* from) { return (Vector)_mm512_loadu_si512(from); }
  static Vector repeat(const BFloat16* from) {
    int32_t pair;
    std::memcpy(&pair, from, sizeof(pair));
    return (Vector)_mm512_set1_epi32(pair);
  }
  static Floats add(Floats sum, Vector left, Vector right) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, left, right);
  }
};
#endif

// Columns of a strip: two registers wide. Rows of a tile: as many as the registers hold.
constexpr int kStrip = 2 * kLanes;
constexpr int kTileRows = kLanes == 16 ? 12 : 6;

// c[kRows, kVectors * kLanes] = a[kRows, depth] * b[depth, ...] + c * factor
//
// factors: one per row, or null to overwrite c. b's rows are kStrip apart; where the machine
// multiplies pairs (`depth` is even then), two rows are interleaved: [depth / 2, kStrip, 2].
template <int kRows, int kVectors, typename T>
inline void multiply_tile(const T* __restrict a, int64_t a_stride, const T* __restrict b,
                          int64_t depth, const float* factors, float* __restrict c,
                          int64_t c_stride) {
  using M = Multiplier<T>;
  Floats sums[kRows][kVectors];
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) {
    for (int v = 0; v < kVectors; ++v) sums[row][v] = Floats{};
  }
  for (int64_t k = 0; k < depth; k += M::kSize / kLanes) {
    typename M::Vector columns[kVectors];
    for (int v = 0; v < kVectors; ++v) columns[v] = M::load_row(b + k * kStrip + v * M::kSize);
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      const typename M::Vector value = M::repeat(a + row * a_stride + k);
      for (int v = 0; v < kVectors; ++v) sums[row][v] = M::add(sums[row][v], value, columns[v]);
    }
  }
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) {
    for (int v = 0; v < kVectors; ++v) {
      float* to = c + row * c_stride + v * kLanes;
      // Added last: a long sum that every product is added to would lose more bits.
      store(to, factors ? load(to) * factors[row] + sums[row][v] : sums[row][v]);
    }
  }
}

// multiply_tile for a number of rows that the compiler does not know.
template <int kVectors, int kRows = kTileRows, typename... Arguments>
void multiply_rows(int rows, Arguments... arguments) {
  if (rows == kRows) {
    multiply_tile<kRows, kVectors>(arguments...);
  } else if constexpr (kRows > 1) {
    multiply_rows<kVectors, kRows - 1>(rows, arguments...);
  }
}

inline int count_tiles(int rows) { return (rows + kTileRows - 1) / kTileRows; }

// c[rows, kStrip] = a[rows, depth] * strip (+ c * factors), for a strip [depth, kStrip] of which
// `columns` are wanted; c's columns up to the next multiple of kLanes are written. `meanwhile` is
// called before each of the num_tiles(rows) tiles.
template <typename T, typename Meanwhile>
void multiply_strip(int rows, int columns, int64_t depth, const T* a, int64_t a_stride,
                    const T* strip, const float* factors, float* c, int64_t c_stride,
                    Meanwhile& meanwhile) {
  const int num_tiles = count_tiles(rows);
  for (int tile = 0; tile < num_tiles; ++tile) {
    const int row = rows * tile / num_tiles;  // tiles of nearly equal height
    const int height = rows * (tile + 1) / num_tiles - row;
    const T* a_tile = a + row * a_stride;
    float* c_tile = c + row * c_stride;
    const float* tile_factors = factors ? factors + row : nullptr;
    meanwhile();
    if (columns > kLanes) {
      multiply_rows<2>(height, a_tile, a_stride, strip, depth, tile_factors, c_tile, c_stride);
    } else {
      multiply_rows<1>(height, a_tile, a_stride, strip, depth, tile_factors, c_tile, c_stride);
    }
  }
}

}  // namespace vllm_trie
