// Small matrix products: a tile of rows times a strip of columns, accumulated in registers.
#pragma once

#include "../../native/vectors.hpp"

namespace vllm_trie {

// Columns of a strip: two registers wide. Rows of a tile: as many as the registers hold.
constexpr int kStrip = 2 * kLanes;
constexpr int kTileRows = kLanes == 16 ? 12 : 6;

// c[kRows, kVectors * kLanes] = a[kRows, depth] * b[depth, ...] + c * factor
//
// factors: one per row, or null to overwrite c. b's rows are kStrip apart.
template <int kRows, int kVectors>
inline void multiply_tile(const float* __restrict a, int64_t a_stride, const float* __restrict b,
                          int64_t depth, const float* factors, float* __restrict c,
                          int64_t c_stride) {
  Floats sums[kRows][kVectors];
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) {
    for (int v = 0; v < kVectors; ++v) sums[row][v] = Floats{};
  }
  for (int64_t k = 0; k < depth; ++k) {
    Floats columns[kVectors];
    for (int v = 0; v < kVectors; ++v) columns[v] = load(b + k * kStrip + v * kLanes);
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      const Floats value = broadcast(a[row * a_stride + k]);
      for (int v = 0; v < kVectors; ++v) sums[row][v] += value * columns[v];
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

#if defined(VLLM_TRIE_BF16_PRODUCTS)
// The same for bfloat16 operands, whose products are exact in the float32 sums. `depth` is even; b
// holds pairs of rows interleaved: [depth / 2, kStrip, 2]. Overwrites c.
template <int kRows, int kVectors>
inline void multiply_tile(const BFloat16* __restrict a, int64_t a_stride,
                          const BFloat16* __restrict b, int64_t depth, const float*,
                          float* __restrict c, int64_t c_stride) {
  __m512 sums[kRows][kVectors];
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) {
    for (int v = 0; v < kVectors; ++v) sums[row][v] = _mm512_setzero_ps();
  }
  for (int64_t k = 0; k < depth / 2; ++k) {
    __m512i columns[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      columns[v] = _mm512_loadu_si512(b + (k * kStrip + v * kLanes) * 2);
    }
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      int32_t pair;
      std::memcpy(&pair, a + row * a_stride + 2 * k, 4);
      const __m512bh value = (__m512bh)_mm512_set1_epi32(pair);
      for (int v = 0; v < kVectors; ++v) {
        sums[row][v] = _mm512_dpbf16_ps(sums[row][v], value, (__m512bh)columns[v]);
      }
    }
  }
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) {
    for (int v = 0; v < kVectors; ++v) {
      _mm512_storeu_ps(c + row * c_stride + v * kLanes, sums[row][v]);
    }
  }
}
#endif

template <int kVectors, typename T>
void multiply_rows(int rows, const T* a, int64_t a_stride, const T* b, int64_t depth,
                   const float* factors, float* c, int64_t c_stride) {
  switch (rows) {
#define VLLM_TRIE_ROWS(n)                                                         \
  case n:                                                                         \
    if constexpr (n <= kTileRows)                                                 \
      multiply_tile<n, kVectors>(a, a_stride, b, depth, factors, c, c_stride);    \
    break;
    VLLM_TRIE_ROWS(1)
    VLLM_TRIE_ROWS(2)
    VLLM_TRIE_ROWS(3)
    VLLM_TRIE_ROWS(4)
    VLLM_TRIE_ROWS(5)
    VLLM_TRIE_ROWS(6)
    VLLM_TRIE_ROWS(7)
    VLLM_TRIE_ROWS(8)
    VLLM_TRIE_ROWS(9)
    VLLM_TRIE_ROWS(10)
    VLLM_TRIE_ROWS(11)
    VLLM_TRIE_ROWS(12)
#undef VLLM_TRIE_ROWS
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
