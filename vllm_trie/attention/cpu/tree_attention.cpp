// Tree attention over vLLM's paged CPU cache: all requests of a batch in one call.
//
// The rows of a unit of work are the query heads of one KV head for some of a request's queries.
// They walk over the request's slots in chunks with one online softmax (Milakov and Gimelshein,
// "Online normalizer calculation for softmax", Algorithm 3). The prefix is dense; only the last
// chunks, where the tree's own slots lie, look at ancestor words, and the first ones at a window.
// Sums are float32.
//
// Threads take one task after another, small ones last, so that a thread that was held up leaves
// its share to the others. A task is a unit or, towards the end, a part of one: these leave a
// partial result each (maximum, sum, weighted values), and whoever ends the last part joins them.

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <type_traits>
#include <vector>

#include "../../native/parallel.hpp"
#include "panels.hpp"
#include "tasks.hpp"
#include "tiles.hpp"
#include "visibility.hpp"

namespace vllm_trie {
namespace {

// Memory that a thread keeps between calls, aligned for the widest vectors.
class Workspace {
 public:
  float* take(size_t floats) {
    if (floats > size_) {
      memory_.reset(static_cast<float*>(std::aligned_alloc(64, (floats * 4 + 63) / 64 * 64)));
      size_ = memory_ ? floats : 0;
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(float* memory) const { std::free(memory); }
  };
  std::unique_ptr<float, Free> memory_;
  size_t size_ = 0;
};

// The state of a unit's online softmax, one entry per row.
struct Partial {
  float* maximum;  // of the scores before scaling
  float* total;    // of the weights
  float* weighted;  // [rows, head_size], sum of weights times values

  static size_t floats(int rows, int head_size) {
    return static_cast<size_t>(rows) * (head_size + 2) + 64;
  }
  static Partial at(float* memory, int rows) {
    const size_t padded = (static_cast<size_t>(rows) + 15) / 16 * 16;
    return {memory, memory + padded, memory + 2 * padded};
  }
};

template <typename Layout>
class Attention {
 public:
  using T = typename Layout::Element;
  using Product = typename Multiplier<T>::Element;
  static constexpr bool kMayUseTiles = kCompiledTiles && std::is_same_v<Layout, Pairs>;

  explicit Attention(const Arguments& arguments)
      : arguments_(arguments),
        near_words_(near_words(arguments)),
        units_(make_units(arguments, near_words_.empty() ? arguments.words : near_words_.data())),
        group_(arguments.num_heads / arguments.num_kv_heads),
        rows_((std::max(max_rows(arguments.head_size), group_) + kTile - 1) / kTile * kTile),
        uses_tiles_(kMayUseTiles && have_tiles()) {}

  void run() {
    int64_t work = 0;
    for (const Unit& unit : units_) work += unit.cost();
    if (!work) return;
    // So little that starting another thread costs more is left to one.
    const int num_threads = static_cast<int>(
        std::clamp<int64_t>(work * group_ / 16, 1, std::max(1, arguments_.num_threads)));
    const std::vector<Task> tasks = make_tasks(units_, num_threads);
    const Task& last = tasks.back();
    const int num_partials = last.first_partial + (last.num_parts > 1 ? last.num_parts : 0);
    static thread_local Workspace shared;
    if (num_partials) partials_ = shared.take(num_partials * partial_floats());
    parts_left_ = std::vector<std::atomic<int>>(units_.size());
    for (const Task& task : tasks) parts_left_[task.unit] = task.num_parts;
    std::atomic<size_t> next{0};
    auto attend = [&](int, int) {
      const TileScope scope(uses_tiles_);
      for (size_t index; (index = next++) < tasks.size();) attend_task(tasks[index]);
    };
    run_parallel(num_threads, attend);
  }

 private:
  size_t partial_floats() const { return Partial::floats(rows_, arguments_.head_size); }

  float* partial(const Task& task, int part) const {
    return partials_ + (task.first_partial + part) * partial_floats();
  }

  void attend_task(const Task& task) {
    const Unit& unit = units_[task.unit];
    if (task.num_parts == 1) {
      attend_unit(unit, 0, unit.num_chunks, nullptr);
      return;
    }
    attend_unit(unit, task.first_chunk, task.last_chunk, partial(task, task.part));
    if (--parts_left_[task.unit] == 0) join(task);
  }

  // The chunks [first, last) of a unit; writes the output if `partial` is null.
  void attend_unit(const Unit& unit, int64_t first, int64_t last, float* partial) {
    static thread_local Workspace workspace;
    const int head_size = arguments_.head_size;
    const int rows = static_cast<int>(unit.num_queries) * group_;
    const size_t strip_size = static_cast<size_t>(std::max(kChunk, head_size)) * kStrip;
    const size_t state = Partial::floats(rows_, head_size);
    const size_t per_row = head_size + kChunk + 1;  // query, scores, factor
    float* memory = workspace.take(state + strip_size + rows_ * per_row + 64);
    Partial sums = Partial::at(partial ? partial : memory, rows_);
    float* strip = memory + (state + 15) / 16 * 16;
    float* scores = strip + strip_size;
    float* query = scores + static_cast<size_t>(rows_) * kChunk;
    float* factors = query + static_cast<size_t>(rows_) * head_size;
    Product* query_rows = reinterpret_cast<Product*>(query);

    load_query(unit, query_rows);
    const bool has_sinks = arguments_.sinks && first == 0;
    for (int row = 0; row < rows; ++row) {
      sums.maximum[row] = has_sinks ? of_head(arguments_.sinks, unit, row) : kMinusInfinity;
      sums.total[row] = has_sinks ? 1.0f : 0.0f;
    }
    const PagedHead<Layout> head{
        static_cast<const T*>(arguments_.cache) + unit.kv_head * arguments_.head_stride,
        arguments_.block_stride,
        arguments_.block_table + unit.row->batch_index * arguments_.block_table_stride,
        layout()};
    const int strips = kChunk / kStrip + (head_size + kStrip - 1) / kStrip;
    Chunk<Layout> chunk(head, unit.first_slot + first * kChunk, unit.end_slot);
    for (int64_t index = first; index < last; ++index) {
      const int64_t slot = unit.first_slot + index * kChunk;
      const Chunk<Layout> next(head, slot + kChunk, index + 1 < last ? unit.end_slot : 0);
      const float* earlier = index == first ? nullptr : factors;  // of the sums so far
      if (uses_tiles_) {
        if constexpr (kMayUseTiles) {
          Prefetcher<Layout> prefetch(next, (rows + kRowsOfTiles - 1) / kRowsOfTiles);
          for (int row = 0; row < rows; row += kRowsOfTiles) {
            prefetch();
            const int end = std::min(rows, row + kRowsOfTiles);
            float* weighted = sums.weighted + static_cast<int64_t>(row) * head_size;
            multiply_keys_in_tiles(chunk, end - row, query_rows + row * head_size, scores);
            weigh_rows<true>(unit, slot, chunk.count, row, end, scores, sums, factors);
            multiply_values_in_tiles(chunk, end - row, scores, earlier, weighted,
                                     reinterpret_cast<BFloat16*>(strip));
          }
        }
      } else {
        Prefetcher<Layout> prefetch(next, count_tiles(rows) * strips);
        multiply_keys(chunk, rows, query_rows, reinterpret_cast<Product*>(strip), scores,
                      prefetch);
        weigh_rows<false>(unit, slot, chunk.count, 0, rows, scores, sums, factors);
        multiply_values(chunk, rows, scores, strip, earlier, sums.weighted, prefetch);
      }
      chunk = next;
    }
    if (unit.row->num_shared && last == unit.num_chunks) attend_own_slots(unit, scores, sums);
    if (!partial) write(unit, sums);
  }

  // Scores of the rows [begin, end) -> weights, as weigh() does; factors of the same rows.
  template <bool kSplit>
  void weigh_rows(const Unit& unit, int64_t slot, int count, int begin, int end, float* scores,
                  const Partial& sums, float* factors) const {
    float positions[kChunk];
    if (arguments_.alibi_slopes) place_slots(unit, slot, count, positions);
    for (int row = begin; row < end; ++row, scores += kChunk) {
      if (arguments_.soft_cap) cap(count, scores);
      if (arguments_.alibi_slopes) {
        add_bias(of_head(arguments_.alibi_slopes, unit, row),
                 static_cast<float>(unit.position(row / group_)), positions, count, scores);
      }
      *factors++ = weigh<kSplit>(visibility(unit, row / group_), slot, count, scores,
                                 sums.maximum + row, sums.total + row);
    }
  }

  Layout layout() const { return {arguments_.block_size, arguments_.head_size}; }

  // The slots behind those that queries share: each query's own, of its own request. A cache line
  // holds a key's numbers for kLanes slots, so slots in front and behind cost nothing.
  void attend_own_slots(const Unit& unit, float* scores, const Partial& sums) {
    const Layout layout = this->layout();
    const int head_size = arguments_.head_size, block_size = arguments_.block_size;
    const T* cache =
        static_cast<const T*>(arguments_.cache) + unit.kv_head * arguments_.head_stride;
    const int64_t begin = unit.row->num_shared, end = unit.row->seq_len;
    const Visibility every{0, end + kLanes, nullptr, 0};
    for (int row = 0; row < static_cast<int>(unit.num_queries) * group_; ++row) {
      const int64_t place = unit.first_query + row / group_;
      const T* query = static_cast<const T*>(arguments_.query) +
                       (unit.row->query_start + place) * arguments_.query_stride +
                       (static_cast<int64_t>(unit.kv_head) * group_ + row % group_) * head_size;
      const int32_t* blocks = arguments_.block_table +
                              (unit.row->batch_index + place) * arguments_.block_table_stride;
      float* weighted = sums.weighted + static_cast<int64_t>(row) * head_size;
      for (int64_t slot = begin / kLanes * kLanes; slot < end; slot += kLanes) {
        const T* keys = cache + blocks[slot / block_size] * arguments_.block_stride;
        const T* values = keys + static_cast<int64_t>(block_size) * head_size;
        const int64_t offset = slot % block_size;
        Floats products = {};
        for (int d = 0; d < head_size; ++d) {
          products += broadcast(to_float(query[d])) * layout.keys(keys, offset, d);
        }
        const int first = static_cast<int>(std::max<int64_t>(0, begin - slot));
        const int count = static_cast<int>(std::min<int64_t>(kLanes, end - slot));
        const uint32_t bits = (uint32_t{1} << count) - (uint32_t{1} << first);
        store(scores, products);
        if (arguments_.soft_cap) cap(kLanes, scores);
        store(scores, keep_visible(load(scores), bits));
        const float factor =
            weigh<false>(every, slot, kLanes, scores, sums.maximum + row, sums.total + row);
        for (int d = 0; d < head_size; d += kLanes) {
          Floats sum = load(weighted + d) * factor;
          for (int i = first; i < count; ++i) {
            sum += broadcast(scores[i]) * layout.values(values, offset + i, d);
          }
          store(weighted + d, sum);
        }
      }
    }
  }

  void load_query(const Unit& unit, Product* to) const {
    for (int64_t query = 0; query < unit.num_queries; ++query) {
      const T* from = static_cast<const T*>(arguments_.query) +
                      (unit.row->query_start + unit.first_query + query) * arguments_.query_stride +
                      static_cast<int64_t>(unit.kv_head) * group_ * arguments_.head_size;
      const int count = group_ * arguments_.head_size;
      if constexpr (std::is_same_v<Product, T>) {
        std::memcpy(to, from, count * sizeof(T));
      } else {
        for (int d = 0; d < count; d += kLanes) store(to + d, load_floats(from + d));
      }
      to += count;
    }
  }

  Visibility visibility(const Unit& unit, int64_t query) const {
    const Row& row = *unit.row;
    if (row.num_shared) return {0, row.num_shared, nullptr, 0};
    const bool is_partial = arguments_.window || arguments_.chunk;
    const int64_t first = is_partial ? first_seen(arguments_, unit.position(query)) : 0;
    const int64_t committed = row.seq_len - row.num_nodes;
    const int64_t node = unit.first_query + query - (row.num_queries - row.num_nodes);
    if (node < 0) return {first, committed + node + 1, nullptr, 0};
    const int64_t num_words = (row.num_nodes + 63) / 64;
    return {std::min(first, committed), committed, unit.words + node * num_words, num_words};
  }

  // The ancestor words without the ancestors that a node is too far from to see; empty without a
  // window.
  static std::vector<uint64_t> near_words(const Arguments& arguments) {
    if (!arguments.window && !arguments.chunk) return {};
    std::vector<uint64_t> result;
    const int64_t* offset = arguments.offsets;
    for (int64_t index = 0; index < arguments.num_rows; ++index) {
      const Row& row = arguments.rows[index];
      const int64_t num_words = (row.num_nodes + 63) / 64;
      const int64_t committed = row.seq_len - row.num_nodes;
      const uint64_t* words = arguments.words + result.size();
      result.insert(result.end(), words, words + row.num_nodes * num_words);
      for (int64_t node = row.num_nodes; node > 0; --node, ++offset) {
        drop_ancestors(result.data() + result.size() - node * num_words,
                       first_seen(arguments, committed + *offset) - committed);
      }
    }
    return result;
  }

  static void place_slots(const Unit& unit, int64_t start, int count, float* positions) {
    const int64_t committed = unit.row->seq_len - unit.row->num_nodes;
    for (int i = 0; i < count; ++i) {
      const int64_t node = start + i - committed;
      const int64_t position = node < 0 ? start + i : committed + unit.offsets[node];
      positions[i] = static_cast<float>(position);
    }
    std::fill(positions + count, positions + kChunk, 0.0f);
  }

  // A number of a row's head, in units of scores before scaling.
  float of_head(const float* numbers, const Unit& unit, int row) const {
    return numbers[unit.kv_head * group_ + row % group_] / arguments_.scale;
  }

  void cap(int count, float* scores) const {
    const Floats most = broadcast(arguments_.soft_cap / arguments_.scale);
    const Floats factor = broadcast(arguments_.scale / arguments_.soft_cap);
    for (int column = 0; column < count; column += kLanes) {
      store(scores + column, most * tanh_of(load(scores + column) * factor));
    }
  }

  // Distances are exact, and those that matter are short.
  static void add_bias(float slope, float own, const float* positions, int count, float* scores) {
    const Floats slopes = broadcast(slope), from = broadcast(own);
    for (int column = 0; column < count; column += kLanes) {
      const Floats bias = slopes * (load(positions + column) - from);
      store(scores + column, load(scores + column) + bias);
    }
  }

  // One row's scores of a chunk -> weights relative to the row's new maximum, in place. Updates
  // the maximum and the total; returns what earlier sums must be multiplied with. kSplit: the
  // weights are split_weights(), and zero up to the next multiple of kDepthOfTile.
  template <bool kSplit>
  float weigh(const Visibility& visible, int64_t start, int count, float* scores, float* maximum,
              float* total) const {
    constexpr int kStep = kSplit ? kDepthOfTile : kLanes;
    const int columns = (count + kStep - 1) / kStep * kStep;
    auto hide = [&](int64_t column, int64_t end) {
      for (; column < end; column += kLanes) {
        const uint32_t bits = visible.bits(start + column, kLanes);
        store(scores + column, keep_visible(load(scores + column), bits));
      }
    };
    if (start < visible.first) hide(0, std::min<int64_t>(columns, visible.first - start));
    if (start + columns > visible.dense) {
      hide(std::max<int64_t>(0, visible.dense - start) / kLanes * kLanes, columns);
    }
    Floats largest_scores = load(scores);
    for (int column = kLanes; column < columns; column += kLanes) {
      largest_scores = larger(load(scores + column), largest_scores);
    }
    const float before = *maximum;
    const float now = any(largest_scores > before) ? largest(largest_scores) : before;
    const float scale = arguments_.scale * 1.44269504f;  // weights are powers of two
    // A row may see nothing of a chunk: its maximum must not be subtracted from itself then.
    const Floats shift = broadcast(now == kMinusInfinity ? 0.0f : now * scale);
    const Floats scales = broadcast(scale);
    Floats sums = {};
    const auto weights = [&](int column) {
      const Floats result = exp2_nonpositive(load(scores + column) * scales - shift);
      sums += result;
      return result;
    };
    for (int column = 0; column < columns; column += kStep) {
      const Floats some = weights(column);
      if constexpr (kSplit) {
        split_weights(some, weights(column + kLanes), scores + column);
      } else {
        store(scores + column, some);
      }
    }
    // exp2(-infinity) is 0: nothing was seen before.
    const float factor = before == now ? 1.0f : std::exp2((before - now) * scale);
    *maximum = now;
    *total = *total * factor + sum(sums);
    return factor;
  }

  // Output of a unit's rows, rounded once.
  void write(const Unit& unit, const Partial& sums) const {
    const int head_size = arguments_.head_size;
    const int rows = static_cast<int>(unit.num_queries) * group_;
    for (int row = 0; row < rows; ++row) {
      const int64_t token = unit.row->query_start + unit.first_query + row / group_;
      T* to = static_cast<T*>(arguments_.output) + token * arguments_.output_stride +
              (static_cast<int64_t>(unit.kv_head) * group_ + row % group_) * head_size;
      const float factor = 1.0f / sums.total[row];
      const float* from = sums.weighted + static_cast<int64_t>(row) * head_size;
      for (int d = 0; d < head_size; ++d) from_float(from[d] * factor, to + d);
    }
  }

  // The partial results of the task's unit into the first of them, and its output.
  void join(const Task& task) const {
    const Unit& unit = units_[task.unit];
    const int head_size = arguments_.head_size;
    const float scale = arguments_.scale * 1.44269504f;
    const int rows = static_cast<int>(unit.num_queries) * group_;
    const Partial joined = Partial::at(partial(task, 0), rows_);
    for (int part = 1; part < task.num_parts; ++part) {
      const Partial other = Partial::at(partial(task, part), rows_);
      for (int row = 0; row < rows; ++row) {
        const float maximum = std::max(joined.maximum[row], other.maximum[row]);
        // A row may have seen nothing of either part.
        const float shift = maximum == kMinusInfinity ? 0.0f : maximum;
        const float own_weight = std::exp2((joined.maximum[row] - shift) * scale);
        const float other_weight = std::exp2((other.maximum[row] - shift) * scale);
        float* to = joined.weighted + static_cast<int64_t>(row) * head_size;
        const float* from = other.weighted + static_cast<int64_t>(row) * head_size;
        for (int d = 0; d < head_size; ++d) to[d] = to[d] * own_weight + from[d] * other_weight;
        joined.total[row] = joined.total[row] * own_weight + other.total[row] * other_weight;
        joined.maximum[row] = maximum;
      }
    }
    write(unit, joined);
  }

  const Arguments& arguments_;
  std::vector<uint64_t> near_words_;
  std::vector<Unit> units_;
  int group_;
  int rows_;  // of the largest unit, in whole tiles
  bool uses_tiles_;
  float* partials_ = nullptr;
  std::vector<std::atomic<int>> parts_left_;  // of each unit
};

}  // namespace
}  // namespace vllm_trie

// Returns 0, or 1 if the shapes are not supported.
extern "C" int vllm_trie_tree_attention(const vllm_trie::Arguments* packed) {
  using namespace vllm_trie;
  const Arguments& arguments = *packed;
  const int group = arguments.num_heads / arguments.num_kv_heads;
  if (arguments.head_size % kSegment || arguments.block_size % kSegment ||
      arguments.num_heads % arguments.num_kv_heads || group > kMaxRows ||
      !(arguments.scale > 0.0f)) {
    return 1;
  }
  if (arguments.in_pairs) {
    Attention<Pairs>(arguments).run();
  } else {
    with_dtype(arguments.dtype,
               [&](auto type) { Attention<Columns<decltype(type)>>(arguments).run(); });
  }
  return 0;
}

extern "C" int vllm_trie_lanes() { return vllm_trie::kLanes; }

extern "C" int vllm_trie_bf16_products() {
#if defined(VLLM_TRIE_BF16_PRODUCTS)
  return 1;
#else
  return 0;
#endif
}

extern "C" int vllm_trie_tiles() { return vllm_trie::have_tiles(); }

extern "C" int vllm_trie_has_openmp() { return vllm_trie::have_openmp(); }
