// Moves slots within the caches of many layers, and copies them between blocks, in one call.
//
// Elements are moved as they are, whatever their type. In columns, the keys of a slot lie in as many
// cache lines as they have elements; prefetching them saved 0.1 ms of a step of 60 ms for moves,
// which are few, and pays for the many copies of wide beam searches.

#include <cstdint>
#include <cstring>
#include <vector>

#include "../../native/parallel.hpp"
#include "layouts.hpp"

namespace {

using namespace vllm_trie;

template <typename Layout>
void move_slots(void* const* caches, int64_t num_layers, int64_t block_stride, int64_t head_stride,
                int num_kv_heads, Layout layout, const int64_t* sources, const int64_t* targets,
                int64_t num_moves, int num_threads) {
  using T = typename Layout::Element;
  const auto for_each_number = [=](T* head, int64_t slot, auto&& work) {
    T* keys = head + slot / layout.block_size * block_stride;
    T* values = keys + layout.block_size * layout.head_size;
    const int64_t offset = slot % layout.block_size;
    for (int64_t d = 0; d < layout.head_size; ++d) work(keys[layout.key(offset, d)]);
    for (int64_t d = 0; d < layout.head_size; ++d) work(values[layout.value(offset, d)]);
  };
  auto work = [&](int thread, int team) {
    const int64_t total = num_layers * num_kv_heads;
    std::vector<T> read(2 * num_moves * layout.head_size);
    for (int64_t i = total * thread / team; i < total * (thread + 1) / team; ++i) {
      T* head = static_cast<T*>(caches[i / num_kv_heads]) + i % num_kv_heads * head_stride;
      // Every source is read before a target is written.
      T* to = read.data();
      for (int64_t m = 0; m < num_moves; ++m) {
        for_each_number(head, sources[m], [&](const T& number) { *to++ = number; });
      }
      const T* from = read.data();
      for (int64_t m = 0; m < num_moves; ++m) {
        for_each_number(head, targets[m], [&](T& number) { number = *from++; });
      }
    }
  };
  run_parallel(num_threads, work);
}

}  // namespace

// element_size: 2 or 4 bytes. Strides count elements. in_pairs: as in Arguments.
extern "C" void vllm_trie_move_slots(int element_size, void* const* caches, int64_t num_layers,
                                    int64_t block_stride, int64_t head_stride, int num_kv_heads,
                                    int block_size, int head_size, int in_pairs,
                                    const int64_t* sources, const int64_t* targets,
                                    int64_t num_moves, int num_threads) {
  const auto move = [&](auto layout) {
    move_slots(caches, num_layers, block_stride, head_stride, num_kv_heads, layout, sources,
               targets, num_moves, num_threads);
  };
  if (in_pairs) {
    move(Pairs{block_size, head_size});
  } else if (element_size == 2) {
    move(Columns<uint16_t>{block_size, head_size});
  } else {
    move(Columns<uint32_t>{block_size, head_size});
  }
}

// The first arguments are the same. `copies` holds the source block, the target block, and the first
// slot and the end of the range of each copy.
extern "C" void vllm_trie_copy_slots(int element_size, void* const* caches, int64_t num_layers,
                                     int64_t block_stride, int64_t head_stride, int num_kv_heads,
                                     int block_size, int head_size, int in_pairs,
                                     const int64_t* copies, int64_t num_copies,
                                     int num_threads) {
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
      if (in_pairs) {  // lines hold two slots or numbers of 16: there are few
        const Pairs layout{block_size, head_size};
        const auto* from = reinterpret_cast<const BFloat16*>(source);
        auto* to = reinterpret_cast<BFloat16*>(target);
        for (int64_t slot = first; slot < first + count; ++slot) {
          for (int64_t d = 0; d < head_size; ++d) {
            const int64_t key = layout.key(slot, d);
            const int64_t value = int64_t{block_size} * head_size + layout.value(slot, d);
            to[key] = from[key];
            to[value] = from[value];
          }
        }
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
  run_parallel(num_threads, work);
}
