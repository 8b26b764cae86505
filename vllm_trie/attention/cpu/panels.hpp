// A chunk of the paged KV cache as a factor of products: copied into one strip after another, which
// stays in the first-level cache while all rows are multiplied with it.
//
// The cache of one layer, vLLM's `vec` and `vec16` layouts, per block and KV head:
//
//     keys    [head_size, block_size]   column by column
//     values  [block_size, head_size]   row by row, right behind the keys
#pragma once

#include <type_traits>
#include <vector>

#include "products.hpp"

namespace vllm_trie {

// Slots that are attended to at a time, and rows of a unit of work.
constexpr int kChunk = 128;
constexpr int kMaxRows = 256;

// Slots whose keys (and values) lie at fixed distances: a block holds a multiple of them.
constexpr int kSegment = 16;

// One request's blocks of one KV head.
template <typename T>
struct PagedHead {
  const T* cache;  // of this head in block 0
  int64_t block_stride;
  const int32_t* block_table;
  int block_size, head_size;  // multiples of kSegment
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
};

// Asks for a chunk's cache lines in equal shares, one at each call: while one chunk is multiplied,
// the next one arrives.
template <typename T>
class Prefetcher {
 public:
  Prefetcher(const Chunk<T>& chunk, int num_calls) : chunk_(chunk), num_calls_(num_calls) {}

  void operator()() {
    constexpr int kLine = 64 / sizeof(T);
    const int rows = chunk_.count ? chunk_.head_size : 0;
    const int64_t block_size = chunk_.block_size, head_size = chunk_.head_size;
    const int next = call_ < num_calls_ ? call_ + 1 : call_;
    for (int d = rows * call_ / num_calls_; d < rows * next / num_calls_; ++d) {
      for (int slot = 0; slot < chunk_.count; slot += kLine) {
        __builtin_prefetch(chunk_.keys[slot / kSegment] + slot % kSegment + d * block_size, 0, 2);
      }
    }
    for (int slot = chunk_.count * call_ / num_calls_; slot < chunk_.count * next / num_calls_;
         ++slot) {
      const T* from = chunk_.values[slot / kSegment] + slot % kSegment * head_size;
      for (int d = 0; d < head_size; d += kLine) __builtin_prefetch(from + d, 0, 2);
    }
    call_ = next;
  }

 private:
  const Chunk<T>& chunk_;
  int num_calls_;
  int call_ = 0;
};

// Keys of the slots [first, first + kStrip) of a chunk -> strip [head_size, kStrip]. Up to
// kLanes - 1 slots behind the last one are copied too, whatever they hold; their scores are masked.
template <typename T>
void pack_keys(const Chunk<T>& chunk, int first, float* strip) {
  const int end = first + kStrip < chunk.count ? first + kStrip : chunk.count;
  for (int slot = first; slot < end; slot += kLanes, strip += kLanes) {
    const T* from = chunk.keys[slot / kSegment] + slot % kSegment;
    for (int d = 0; d < chunk.head_size; ++d, from += chunk.block_size) {
      store(strip + d * kStrip, load_floats(from));
    }
  }
}

#if defined(VLLM_TRIE_BF16_PRODUCTS)
// The same without conversion: strip [head_size / 2, kStrip, 2], two rows interleaved.
inline void pack_keys(const Chunk<BFloat16>& chunk, int first, BFloat16* strip) {
  const int end = first + kStrip < chunk.count ? first + kStrip : chunk.count;
  for (int slot = first; slot < end; slot += kLanes, strip += 2 * kLanes) {
    const BFloat16* from = chunk.keys[slot / kSegment];
    for (int d = 0; d < chunk.head_size; d += 2, from += 2 * chunk.block_size) {
      const __m256i even = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
      const __m256i odd =
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + chunk.block_size));
      const __m512i pairs = _mm512_or_si512(_mm512_cvtepu16_epi32(even),
                                            _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
      _mm512_storeu_si512(strip + d * kStrip, pairs);
    }
  }
}
#endif

// Columns [first, first + kStrip) of a chunk's values -> strip [kChunk, kStrip]. Nothing behind the
// last slot is read: what lies there may be NaN, and a weight of zero would not undo it.
template <typename T>
void pack_values(const Chunk<T>& chunk, int first, float* strip) {
  const bool whole = chunk.head_size - first > kLanes;
  for (int slot = 0; slot < chunk.count; ++slot, strip += kStrip) {
    const T* from = chunk.values[slot / kSegment] +
                    static_cast<int64_t>(slot % kSegment) * chunk.head_size + first;
    store(strip, load_floats(from));
    if (whole) store(strip + kLanes, load_floats(from + kLanes));
  }
}

// Sums of this many products of floats at most are added up one by one: shorter sums are more
// exact.
constexpr int kDepth = 128;

template <typename Product, typename Meanwhile>
void multiply_key_strip(int rows, int columns, int head_size, const Product* query,
                        const Product* strip, float* scores, Meanwhile& meanwhile) {
  static const std::vector<float> ones(kMaxRows, 1.0f);
  const int most = std::is_same_v<Product, float> ? kDepth : head_size;
  for (int d = 0; d < head_size; d += most) {
    multiply_strip(rows, columns, head_size - d < most ? head_size - d : most, query + d,
                   head_size, strip + d * kStrip, d ? ones.data() : nullptr, scores, kChunk,
                   meanwhile);
  }
}

// scores[rows, count] = query[rows, head_size] * keys; `strip` is scratch memory.
template <typename T, typename Product>
void multiply_keys(const Chunk<T>& chunk, int rows, const Product* query, Product* strip,
                   float* scores, Prefetcher<T>& prefetch) {
  for (int first = 0; first < chunk.count; first += kStrip) {
    pack_keys(chunk, first, strip);
    multiply_key_strip(rows, chunk.count - first, chunk.head_size, query, strip, scores + first,
                       prefetch);
  }
}

// sums[rows, head_size] = weights[rows, count] * values + sums * factors; `strip` is scratch.
// factors: one per row, or null to overwrite the sums.
template <typename T>
void multiply_values(const Chunk<T>& chunk, int rows, const float* weights, float* strip,
                     const float* factors, float* sums, Prefetcher<T>& prefetch) {
  for (int first = 0; first < chunk.head_size; first += kStrip) {
    pack_values(chunk, first, strip);
    multiply_strip(rows, chunk.head_size - first, chunk.count, weights, kChunk, strip,
                   factors, sums + first, chunk.head_size, prefetch);
  }
}

}  // namespace vllm_trie
