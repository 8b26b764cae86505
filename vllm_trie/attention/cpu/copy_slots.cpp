// Copies slots of blocks to the same slots of other blocks in the caches of many layers.
//
// Layout of a cache: see panels.hpp. Elements are copied as they are, whatever their type.

#include <cstdint>
#include <cstring>

#include "../../native/parallel.hpp"

// Strides count bytes. `copies` holds the source block, the target block, and the first slot and
// the end of the range of each copy.
extern "C" void vllm_trie_copy_slots(void* const* caches, int64_t num_layers, int64_t block_stride,
                                     int64_t head_stride, int num_kv_heads, int block_size,
                                     int head_size, int element_size, const int64_t* copies,
                                     int64_t num_copies, int num_threads) {
  const int64_t key_row = static_cast<int64_t>(block_size) * element_size;
  const int64_t value_row = static_cast<int64_t>(head_size) * element_size;
  struct Piece {  // a head of one copy in one layer
    const char* source;
    char* target;
    int64_t first, count;  // slots
  };
  const auto piece = [&](int64_t i) -> Piece {
    const int64_t h = i % num_kv_heads, layer = i / num_kv_heads / num_copies;
    const int64_t* copy = copies + i / num_kv_heads % num_copies * 4;
    char* head = static_cast<char*>(caches[layer]) + h * head_stride;
    return {head + copy[0] * block_stride, head + copy[1] * block_stride, copy[2],
            copy[3] - copy[2]};
  };
  auto work = [&](int thread, int team) {
    const int64_t total = num_layers * num_copies * num_kv_heads;
    const int64_t begin = total * thread / team, end = total * (thread + 1) / team;
    for (int64_t i = begin; i < end; ++i) {
      const auto [source, target, first, count] = piece(i);
      if (count == block_size) {
        std::memcpy(target, source, 2 * head_size * key_row);
        continue;
      }
      // A few slots lie in as many cache lines as a key has elements, too far apart for the
      // processor to foresee them: ask for those of the next piece while this one is copied.
      const Piece next = piece(i + 1 < end ? i + 1 : i);
      const int64_t bytes = count * element_size, last = (next.count - 1) * element_size;
      const char* next_source = next.source + next.first * element_size;
      char* next_target = next.target + next.first * element_size;
      int64_t at = first * element_size;
      for (int d = 0; d < head_size; ++d, at += key_row) {
        __builtin_prefetch(next_source, 0);
        __builtin_prefetch(next_source + last, 0);
        __builtin_prefetch(next_target, 1);
        __builtin_prefetch(next_target + last, 1);
        next_source += key_row;
        next_target += key_row;
        std::memcpy(target + at, source + at, bytes);
      }
      at = head_size * key_row + first * value_row;
      std::memcpy(target + at, source + at, count * value_row);
    }
  };
  vllm_trie::run_parallel(num_threads, work);
}
