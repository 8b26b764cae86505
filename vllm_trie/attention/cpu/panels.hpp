// A chunk of the paged KV cache as a factor of products: copied into one strip after another, which
// stays in the first-level cache while all rows are multiplied with it.
#pragma once

#include <type_traits>
#include <vector>

#include "layouts.hpp"
#include "products.hpp"

namespace vllm_trie {

// Slots that are attended to at a time, and rows of a unit of work.
constexpr int kChunk = 128;
constexpr int kMaxRows = 256;

// One request's blocks of one KV head.
template <typename Layout>
struct PagedHead {
  const typename Layout::Element* cache;  // of this head in block 0
  int64_t block_stride;
  const int32_t* block_table;
  Layout layout;
};

// Where a chunk's keys and values lie.
template <typename Layout>
struct Chunk {
  using T = typename Layout::Element;
  int count = 0;  // of slots
  Layout layout;
  const T* keys_of[kChunk / kSegment];  // of each segment
  const T* values_of[kChunk / kSegment];

  Chunk(const PagedHead<Layout>& head, int64_t first, int64_t end) : layout(head.layout) {
    for (int segment = 0; first < end && segment < kChunk / kSegment; ++segment) {
      const T* block = head.cache + head.block_table[first / layout.block_size] * head.block_stride;
      const int64_t offset = first % layout.block_size;
      keys_of[segment] = block + layout.key(offset, 0);
      values_of[segment] = block + layout.block_size * layout.head_size + layout.value(offset, 0);
      const int64_t size = end - first < kSegment ? end - first : kSegment;
      count += static_cast<int>(size);
      first += kSegment;
    }
  }
};

// Asks for a chunk's cache lines in equal shares, one at each call: while one chunk is multiplied,
// the next one arrives.
template <typename Layout>
class Prefetcher {
 public:
  Prefetcher(const Chunk<Layout>& chunk, int num_calls) : chunk_(chunk), num_calls_(num_calls) {}

  // No part is a function of its own: one that does nothing but ask counts as doing nothing.
  void operator()() {
    constexpr int kLine = 64 / sizeof(typename Layout::Element);
    const Layout layout = chunk_.layout;
    const int head_size = static_cast<int>(layout.head_size), count = chunk_.count;
    const int rows = count ? head_size : 0;
    const int next = call_ < num_calls_ ? call_ + 1 : call_;
    if constexpr (std::is_same_v<Layout, Pairs>) {
      // A segment's keys have a line for two numbers, and its values for two slots and 16 numbers.
      for (int d = rows / 2 * call_ / num_calls_; d < rows / 2 * next / num_calls_; ++d) {
        for (int slot = 0; slot < count; slot += kSegment) {
          const int segment = slot / kSegment;
          __builtin_prefetch(chunk_.keys_of[segment] + layout.key(0, 2 * d), 0, 2);
          __builtin_prefetch(chunk_.values_of[segment] + layout.value(d % 8 * 2, d / 8 * 16), 0, 2);
        }
      }
    } else {
      for (int d = rows * call_ / num_calls_; d < rows * next / num_calls_; ++d) {
        for (int slot = 0; slot < count; slot += kLine) {
          const auto* from = chunk_.keys_of[slot / kSegment];
          __builtin_prefetch(from + layout.key(slot % kSegment, d), 0, 2);
        }
      }
      for (int slot = count * call_ / num_calls_; slot < count * next / num_calls_; ++slot) {
        const auto* from = chunk_.values_of[slot / kSegment] + layout.value(slot % kSegment, 0);
        for (int d = 0; d < head_size; d += kLine) __builtin_prefetch(from + d, 0, 2);
      }
    }
    call_ = next;
  }

 private:
  const Chunk<Layout>& chunk_;
  int num_calls_;
  int call_ = 0;
};

// Keys of the slots [first, first + kStrip) of a chunk -> strip [head_size, kStrip]. Up to
// kLanes - 1 slots behind the last one are copied too, whatever they hold; their scores are masked.
template <typename Layout>
void pack_keys(const Chunk<Layout>& chunk, int first, float* strip) {
  const int end = first + kStrip < chunk.count ? first + kStrip : chunk.count;
  for (int slot = first; slot < end; slot += kLanes, strip += kLanes) {
    const auto* from = chunk.keys_of[slot / kSegment];
    for (int64_t d = 0; d < chunk.layout.head_size; ++d) {
      store(strip + d * kStrip, chunk.layout.keys(from, slot % kSegment, d));
    }
  }
}

#if defined(VLLM_TRIE_BF16_PRODUCTS)
// Two numbers of the keys of 16 slots, interleaved.
inline __m512i key_pairs(const Columns<BFloat16>& layout, const BFloat16* from, int64_t d) {
  const auto half = [&](int64_t d) {
    const void* numbers = from + layout.key(0, d);
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(numbers)));
  };
  return _mm512_or_si512(half(d), _mm512_slli_epi32(half(d + 1), 16));
}
inline __m512i key_pairs(const Pairs& layout, const BFloat16* from, int64_t d) {
  return _mm512_loadu_si512(from + layout.key(0, d));
}

// The same without conversion: strip [head_size / 2, kStrip, 2], two rows interleaved.
template <typename Layout>
void pack_keys(const Chunk<Layout>& chunk, int first, BFloat16* strip) {
  const int end = first + kStrip < chunk.count ? first + kStrip : chunk.count;
  for (int slot = first; slot < end; slot += kLanes, strip += 2 * kLanes) {
    const BFloat16* from = chunk.keys_of[slot / kSegment];
    for (int64_t d = 0; d < chunk.layout.head_size; d += 2) {
      _mm512_storeu_si512(strip + d * kStrip, key_pairs(chunk.layout, from, d));
    }
  }
}
#endif

// Columns [first, first + kStrip) of a chunk's values -> strip [kChunk, kStrip]. Nothing behind the
// last slot is read: what lies there may be NaN, and a weight of zero would not undo it.
template <typename Layout>
void pack_values(const Chunk<Layout>& chunk, int first, float* strip) {
  const bool whole = chunk.layout.head_size - first > kLanes;
  for (int slot = 0; slot < chunk.count; ++slot, strip += kStrip) {
    const auto* from = chunk.values_of[slot / kSegment];
    store(strip, chunk.layout.values(from, slot % kSegment, first));
    if (whole) store(strip + kLanes, chunk.layout.values(from, slot % kSegment, first + kLanes));
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
template <typename Layout, typename Product>
void multiply_keys(const Chunk<Layout>& chunk, int rows, const Product* query, Product* strip,
                   float* scores, Prefetcher<Layout>& prefetch) {
  const int head_size = static_cast<int>(chunk.layout.head_size);
  for (int first = 0; first < chunk.count; first += kStrip) {
    pack_keys(chunk, first, strip);
    multiply_key_strip(rows, chunk.count - first, head_size, query, strip, scores + first,
                       prefetch);
  }
}

// sums[rows, head_size] = weights[rows, count] * values + sums * factors; `strip` is scratch.
// factors: one per row, or null to overwrite the sums.
template <typename Layout>
void multiply_values(const Chunk<Layout>& chunk, int rows, const float* weights, float* strip,
                     const float* factors, float* sums, Prefetcher<Layout>& prefetch) {
  const int head_size = static_cast<int>(chunk.layout.head_size);
  for (int first = 0; first < head_size; first += kStrip) {
    pack_values(chunk, first, strip);
    multiply_strip(rows, head_size - first, chunk.count, weights, kChunk, strip, factors,
                   sums + first, head_size, prefetch);
  }
}

}  // namespace vllm_trie
