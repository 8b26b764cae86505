// A chunk of the paged KV cache, converted and rearranged into strips for the products.
//
// The cache of one layer, vLLM's `vec` and `vec16` layouts, per block and KV head:
//
//     keys    [head_size, block_size]   column by column
//     values  [block_size, head_size]   row by row, right behind the keys
#pragma once

#include "products.hpp"

namespace vllm_trie {

// Slots that are attended to at a time.
constexpr int kChunk = 128;

// Slots whose keys (and values) lie at fixed distances: a block holds a multiple of them.
constexpr int kSegment = 16;

// One request's blocks of one KV head.
template <typename T>
struct PagedHead {
  const T* cache;  // of this head in block 0
  int64_t block_stride;
  const int32_t* block_table;
  int block_size;  // a multiple of kSegment
  int head_size;   // a multiple of kSegment
};

// Where a chunk's keys and values lie.
template <typename T>
struct Chunk {
  int count = 0;  // of slots
  int block_size, head_size;
  const T* keys[kChunk / kSegment];
  const T* values[kChunk / kSegment];

  Chunk(const PagedHead<T>& head, int64_t first, int64_t end)
      : block_size(head.block_size), head_size(head.head_size) {
    for (int segment = 0; first < end && segment < kChunk / kSegment; ++segment) {
      const T* block = head.cache + head.block_table[first / block_size] * head.block_stride;
      const int64_t offset = first % block_size;
      keys[segment] = block + offset;
      values[segment] = block + (block_size + offset) * head_size;
      const int64_t size = end - first < kSegment ? end - first : kSegment;
      count += static_cast<int>(size);
      first += kSegment;
    }
  }

  // Ask for the part-th of `parts` equal shares of the chunk. The keys' and the values' cache
  // lines would otherwise be waited for one after another when the chunk is packed.
  void prefetch(int part, int parts) const {
    constexpr int kLine = 64 / sizeof(T);
    const int last_key_row = head_size * (part + 1) / parts;
    for (int d = head_size * part / parts; d < last_key_row; ++d) {
      for (int slot = 0; slot < count; slot += kLine) {
        __builtin_prefetch(keys[slot / kSegment] + static_cast<int64_t>(d) * block_size, 0, 2);
      }
    }
    const int last_slot = count * (part + 1) / parts;
    for (int slot = count * part / parts; slot < last_slot; ++slot) {
      const T* from = values[slot / kSegment] + static_cast<int64_t>(slot % kSegment) * head_size;
      for (int d = 0; d < head_size; d += kLine) __builtin_prefetch(from + d, 0, 2);
    }
  }
};

// Keys of a chunk -> strips [head_size, kStrip]. Up to kLanes - 1 slots behind the last one are
// packed too, whatever they hold; their scores are masked.
template <typename T>
void pack_keys(const Chunk<T>& chunk, float* to) {
  for (int column = 0; column < chunk.count; column += kLanes) {
    const T* from = chunk.keys[column / kSegment] + column % kSegment;
    float* strip = to + static_cast<int64_t>(column / kStrip) * chunk.head_size * kStrip +
                   column % kStrip;
    for (int d = 0; d < chunk.head_size; ++d) {
      store(strip + d * kStrip, load_floats(from + static_cast<int64_t>(d) * chunk.block_size));
    }
  }
}

#if defined(VLLM_TRIE_BF16_PRODUCTS)
// The same without conversion: strips [head_size / 2, kStrip, 2], two rows interleaved.
inline void pack_keys(const Chunk<BFloat16>& chunk, BFloat16* to) {
  for (int column = 0; column < chunk.count; column += kLanes) {
    const BFloat16* from = chunk.keys[column / kSegment];
    BFloat16* strip = to + static_cast<int64_t>(column / kStrip) * chunk.head_size * kStrip +
                      column % kStrip * 2;
    for (int d = 0; d < chunk.head_size; d += 2) {
      const BFloat16* row = from + static_cast<int64_t>(d) * chunk.block_size;
      const __m256i even = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row));
      const __m256i odd =
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + chunk.block_size));
      const __m512i pairs = _mm512_or_si512(_mm512_cvtepu16_epi32(even),
                                            _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
      _mm512_storeu_si512(strip + d * kStrip, pairs);
    }
  }
}
#endif

// Values of a chunk -> strips [kChunk, kStrip]. Nothing behind the last slot is read: what lies
// there may be NaN, and a weight of zero would not undo it.
template <typename T>
void pack_values(const Chunk<T>& chunk, float* to) {
  for (int slot = 0; slot < chunk.count; ++slot) {
    const T* from = chunk.values[slot / kSegment] +
                    static_cast<int64_t>(slot % kSegment) * chunk.head_size;
    for (int d = 0; d < chunk.head_size; d += kLanes) {
      store(to + static_cast<int64_t>(d / kStrip) * kChunk * kStrip + slot * kStrip + d % kStrip,
            load_floats(from + d));
    }
  }
}

}  // namespace vllm_trie
