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
    static const Configuration configuration;  // of a local one GCC 12 may leave stores out
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

// Tiles 0 to 3 are sums of two tiles of rows and two of columns, [2 * kTile, 2 * kTile], or of the
// first tile of rows alone. Tiles 4 and 5 are factors with these rows, 6 and 7 with these columns.
// Strides count bytes.
inline void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

inline void load_sums(const float* from, int64_t stride, bool both) {
  _tile_loadd(0, from, stride);
  _tile_loadd(1, from + kTile, stride);
  if (both) {
    const float* below = from + kTile * stride / sizeof(float);
    _tile_loadd(2, below, stride);
    _tile_loadd(3, below + kTile, stride);
  }
}

inline void store_sums(float* to, int64_t stride, bool both) {
  _tile_stored(0, to, stride);
  _tile_stored(1, to + kTile, stride);
  if (both) {
    float* below = to + kTile * stride / sizeof(float);
    _tile_stored(2, below, stride);
    _tile_stored(3, below + kTile, stride);
  }
}

inline void load_columns(const BFloat16* columns, const BFloat16* more_columns) {
  _tile_loadd(6, columns, 64);
  _tile_loadd(7, more_columns, 64);
}

// Adds the products of rows of bfloat16 numbers and the loaded columns.
inline void add_products(const void* rows, int64_t stride, bool both) {
  _tile_loadd(4, rows, stride);
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  if (both) {
    _tile_loadd(5, static_cast<const char*>(rows) + kTile * stride, stride);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// scores[rows, count] = query[rows, head_size] * keys, for at most kRowsOfTiles rows. Whole tiles
// are read and written.
inline void multiply_keys_in_tiles(const Chunk<Pairs>& chunk, int rows, const BFloat16* query,
                                   float* scores) {
  const int64_t head_size = chunk.layout.head_size;
  const bool both = rows > kTile;
  write_memory();
  for (int slot = 0; slot < chunk.count; slot += 2 * kTile) {
    const BFloat16* keys = chunk.keys_of[slot / kSegment];
    zero_sums();
    for (int64_t d = 0; d < head_size; d += kDepthOfTile) {
      load_columns(keys + chunk.layout.key(0, d), keys + chunk.layout.key(kTile, d));
      add_products(query + d, head_size * sizeof(BFloat16), both);
    }
    store_sums(scores + slot, kChunk * sizeof(float), both);
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
  const int64_t head_size = chunk.layout.head_size;
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
      load_sums(sums + d, sum_bytes, both);
    } else {
      zero_sums();
    }
    for (int slot = 0; slot < chunk.count; slot += kDepthOfTile) {
      if (slot == whole) {
        load_columns(last_values + d * 2 * kTile, last_values + (d + kTile) * 2 * kTile);
      } else {
        const BFloat16* values = chunk.values_of[slot / kSegment];
        load_columns(values + chunk.layout.value(0, d), values + chunk.layout.value(0, d + kTile));
      }
      add_products(weights + slot, weight_bytes, both);
      add_products(weights + slot + kLanes, weight_bytes, both);  // their lower halves
    }
    store_sums(sums + d, sum_bytes, both);
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
