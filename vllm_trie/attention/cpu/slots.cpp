// Moves slots within the caches of many layers, and copies them between blocks, in one call.
//
// Layout of a cache: see panels.hpp. Elements are moved as they are, whatever their type. Keys of a
// slot lie in as many cache lines as they have elements; prefetching them saved 0.1 ms of a step of
// 60 ms for moves, which are few, and pays for the many copies of wide beam searches.

#include <cstdint>
#include <cstring>
#include <vector>

#include "../../native/parallel.hpp"

namespace {

template <typename T>
void move_slots(void* const* caches, int64_t num_layers, int64_t block_stride, int64_t head_stride,
                int num_kv_heads, int block_size, int head_size, const int64_t* sources,
                const int64_t* targets, int64_t num_moves, int num_threads) {
  const auto key = [=](T* head, int64_t slot) {
    return head + slot / block_size * block_stride + slot % block_size;
  };
  const auto value = [=](T* head, int64_t slot) {
    return head + slot / block_size * block_stride +
           (block_size + slot % block_size) * static_cast<int64_t>(head_size);
  };
  auto work = [&](int thread, int team) {
    const int64_t total = num_layers * num_kv_heads;
    std::vector<T> read(2 * num_moves * head_size);
    for (int64_t i = total * thread / team; i < total * (thread + 1) / team; ++i) {
      T* head = static_cast<T*>(caches[i / num_kv_heads]) + i % num_kv_heads * head_stride;
      // Every source is read before a target is written.
      T* to = read.data();
      for (int64_t m = 0; m < num_moves; ++m, to += 2 * head_size) {
        const T* from = key(head, sources[m]);
        for (int d = 0; d < head_size; ++d) to[d] = from[d * block_size];
        std::memcpy(to + head_size, value(head, sources[m]), head_size * sizeof(T));
      }
      const T* from = read.data();
      for (int64_t m = 0; m < num_moves; ++m, from += 2 * head_size) {
        T* column = key(head, targets[m]);
        for (int d = 0; d < head_size; ++d) column[d * block_size] = from[d];
        std::memcpy(value(head, targets[m]), from + head_size, head_size * sizeof(T));
      }
    }
  };
  vllm_trie::run_parallel(num_threads, work);
}

}  // namespace

// element_size: 2 or 4 bytes. Strides count elements.
extern "C" void vllm_trie_move_slots(int element_size, void* const* caches, int64_t num_layers,
                                    int64_t block_stride, int64_t head_stride, int num_kv_heads,
                                    int block_size, int head_size, const int64_t* sources,
                                    const int64_t* targets, int64_t num_moves, int num_threads) {
  const auto move = element_size == 2 ? move_slots<uint16_t> : move_slots<uint32_t>;
  move(caches, num_layers, block_stride, head_stride, num_kv_heads, block_size, head_size, sources,
       targets, num_moves, num_threads);
}

// The first arguments are the same. `copies` holds the source block, the target block, and the first
// slot and the end of the range of each copy.
extern "C" void vllm_trie_copy_slots(int element_size, void* const* caches, int64_t num_layers,
                                     int64_t block_stride, int64_t head_stride, int num_kv_heads,
                                     int block_size, int head_size, const int64_t* copies,
                                     int64_t num_copies, int num_threads) {
  block_stride *= element_size;
  head_stride *= element_size;
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
