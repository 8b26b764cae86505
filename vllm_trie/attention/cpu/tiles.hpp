// Products in AMX tiles, for a cache in pairs: a tile of it lies as the processor loads it, so that
// nothing is packed. Products of bfloat16 are exact, and their sums float32.
#pragma once

#include "panels.hpp"

#if defined(VLLM_TRIE_BF16_PRODUCTS) && defined(__AMX_BF16__) && defined(__linux__)
#define VLLM_TRIE_TILES 1
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace vllm_trie {

constexpr int kTile = 16;                // rows of a tile, and columns of its sums
constexpr int kDepthOfTile = 32;         // products of a sum
constexpr int kRowsOfTiles = 2 * kTile;  // multiplied at a time: two tiles of rows, two of columns

#if defined(VLLM_TRIE_TILES)

constexpr bool kCompiledTiles = true;

// Whether the processor has tiles, and the operating system lets this process use them.
inline bool have_tiles() {
  static const bool usable = [] {
    constexpr unsigned kBf16 = 1u << 22, kTiles = 1u << 24;
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & kBf16) || !(d & kTiles)) return false;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return usable;
}

// Sets up the calling thread's tiles, all of the full size, and gives them back.
class TileScope {
 public:
  explicit TileScope(bool uses_tiles) : uses_tiles_(uses_tiles) {
    if (!uses_tiles) return;
    struct alignas(64) Configuration {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    };
    const Configuration configuration;
    _tile_loadconfig(&configuration);
  }
  ~TileScope() {
    if (uses_tiles_) _tile_release();
  }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;

 private:
  bool uses_tiles_;
};

// The compiler does not know that loads of tiles read memory.
inline void write_memory() { __asm__ volatile("" ::: "memory"); }

// scores[rows, count] = query[rows, head_size] * keys, for at most kRowsOfTiles rows. Whole tiles
// are read and written.
inline void multiply_keys_in_tiles(const Chunk<Pairs>& chunk, int rows, const BFloat16* query,
                                   float* scores) {
  const int64_t head_size = chunk.layout.head_size;
  const int64_t query_bytes = head_size * sizeof(BFloat16), score_bytes = kChunk * sizeof(float);
  const bool both = rows > kTile;
  write_memory();
  for (int slot = 0; slot < chunk.count; slot += 2 * kTile) {
    const BFloat16* keys = chunk.keys_of[slot / kSegment];
    const BFloat16* more_keys = keys + chunk.layout.key(kTile, 0);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t d = 0; d < head_size; d += kDepthOfTile) {
      _tile_loadd(4, query + d, query_bytes);
      _tile_loadd(6, keys + d * kTile, 64);
      _tile_loadd(7, more_keys + d * kTile, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if (both) {
        _tile_loadd(5, query + kTile * head_size + d, query_bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, scores + slot, score_bytes);
    _tile_stored(1, scores + slot + kTile, score_bytes);
    if (both) {
      _tile_stored(2, scores + kTile * kChunk + slot, score_bytes);
      _tile_stored(3, scores + kTile * kChunk + slot + kTile, score_bytes);
    }
  }
}

// Weights of 2 * kLanes slots in place of as many floats: their upper halves, then what is left of
// them in bfloat16. Together they have 16 bits.
inline void split_weights(Floats first, Floats second, float* to) {
  alignas(64) static constexpr auto kOddWords = [] {
    struct { uint16_t of[32]; } words{};
    for (int i = 0; i < 32; ++i) words.of[i] = static_cast<uint16_t>(2 * i + 1);
    return words;
  }();
  const Ints upper = static_cast<int32_t>(0xffff0000) - Ints{};
  const __m512 first_rest = (__m512)(first - (Floats)((Ints)first & upper));
  const __m512 second_rest = (__m512)(second - (Floats)((Ints)second & upper));
  _mm512_storeu_si512(to, _mm512_permutex2var_epi16((__m512i)first, _mm512_load_si512(&kOddWords),
                                                    (__m512i)second));
  _mm512_storeu_si512(to + kLanes, (__m512i)_mm512_cvtne2ps_pbh(second_rest, first_rest));
}

// sums[rows, head_size] = weights[rows, count] * values + sums * factors, for at most kRowsOfTiles
// rows and split weights, which are zero behind the last slot. `last_values` is scratch memory for
// kDepthOfTile values. factors: one per row, or null to overwrite the sums.
inline void multiply_values_in_tiles(const Chunk<Pairs>& chunk, int rows, const float* weights,
                                     const float* factors, float* sums, BFloat16* last_values) {
  const int64_t head_size = chunk.layout.head_size, block_size = chunk.layout.block_size;
  const int64_t weight_bytes = kChunk * sizeof(float), sum_bytes = head_size * sizeof(float);
  const bool both = rows > kTile;
  for (int row = 0; factors && row < rows; ++row) {
    if (factors[row] == 1.0f) continue;
    float* sum = sums + row * head_size;
    for (int64_t d = 0; d < head_size; d += kLanes) store(sum + d, load(sum + d) * factors[row]);
  }
  // What lies behind the last slot may be NaN, and a weight of zero would not undo it.
  const int rest = chunk.count % kDepthOfTile, whole = chunk.count - rest;
  if (rest) {
    const Pairs layout = chunk.layout;
    for (int64_t d = 0; d < head_size; d += kTile) {
      for (int pair = 0; pair < kDepthOfTile / 2; ++pair) {
        const __mmask32 kept = 2 * pair + 1 < rest ? ~0u : 2 * pair < rest ? 0x55555555u : 0u;
        const BFloat16* from = chunk.values_of[whole / kSegment] + layout.value(2 * pair, d);
        _mm512_storeu_si512(last_values + (d + pair) * 2 * kTile,
                            _mm512_maskz_loadu_epi16(kept, from));
      }
    }
  }
  write_memory();
  for (int64_t d = 0; d < head_size; d += 2 * kTile) {
    if (factors) {
      _tile_loadd(0, sums + d, sum_bytes);
      _tile_loadd(1, sums + d + kTile, sum_bytes);
      if (both) {
        _tile_loadd(2, sums + kTile * head_size + d, sum_bytes);
        _tile_loadd(3, sums + kTile * head_size + d + kTile, sum_bytes);
      }
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int slot = 0; slot < chunk.count; slot += kDepthOfTile) {
      const bool is_last = slot == whole;
      const BFloat16* values =
          is_last ? last_values + d * 2 * kTile
                  : chunk.values_of[slot / kSegment] + chunk.layout.value(0, d);
      _tile_loadd(6, values, 64);
      _tile_loadd(7, values + (is_last ? 2 * kTile : block_size) * kTile, 64);
      for (int half = 0; half < 2; ++half) {
        const float* some = weights + slot + half * kLanes;
        _tile_loadd(4, some, weight_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (both) {
          _tile_loadd(5, some + kTile * kChunk, weight_bytes);
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        }
      }
    }
    _tile_stored(0, sums + d, sum_bytes);
    _tile_stored(1, sums + d + kTile, sum_bytes);
    if (both) {
      _tile_stored(2, sums + kTile * head_size + d, sum_bytes);
      _tile_stored(3, sums + kTile * head_size + d + kTile, sum_bytes);
    }
  }
}

#else

constexpr bool kCompiledTiles = false;
inline bool have_tiles() { return false; }
struct TileScope {
  explicit TileScope(bool) {}
};
void multiply_keys_in_tiles(const Chunk<Pairs>&, int, const BFloat16*, float*);
void split_weights(Floats, Floats, float*);
void multiply_values_in_tiles(const Chunk<Pairs>&, int, const float*, const float*, float*,
                              BFloat16*);

#endif
}  // namespace vllm_trie
