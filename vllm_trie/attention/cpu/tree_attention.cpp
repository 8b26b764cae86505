// Tree attention over vLLM's paged CPU cache: all requests of a batch in one call.
//
// The rows of a unit of work are the query heads of one KV head for some of a request's queries.
// They walk over the request's slots in chunks with one online softmax (Milakov and Gimelshein,
// "Online normalizer calculation for softmax", Algorithm 3). The prefix is dense; only the last
// chunks, where the tree's own slots lie, look at ancestor words. Sums are float32.
//
// Threads share the work by its cost. Where a thread's share ends inside a unit, each thread
// leaves a partial result (maximum, sum, weighted values), and these are joined at the end.

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <type_traits>
#include <vector>

#include "panels.hpp"
#include "../../native/parallel.hpp"
#include "visibility.hpp"

namespace vllm_trie {
namespace {

struct Row {  // as tree_batch.TreeRow
  int64_t batch_index, query_start, num_queries, num_nodes, seq_len;
};

struct Arguments {
  const void* query;
  int64_t query_stride;  // between tokens; heads lie side by side
  const void* cache;
  int64_t block_stride, head_stride;
  const int32_t* block_table;
  int64_t block_table_stride;
  const Row* rows;
  const uint64_t* words;  // of all rows, one after another
  int64_t num_rows;
  void* output;
  int64_t output_stride;
  int num_heads, num_kv_heads, head_size, block_size;
  float scale;
  const float* alibi_slopes;  // of each head, or null
  int num_threads;
};

struct Unit {
  const Row* row;
  const uint64_t* words;  // of the row's first node
  int kv_head;
  int64_t first_query, num_queries;
  int64_t num_slots;  // that any of the queries sees
  int64_t num_chunks;
  int64_t cost_before;  // of all units before this one

  int64_t cost_per_chunk() const { return num_queries; }
  int64_t cost() const { return num_chunks * cost_per_chunk(); }
};

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

// Rows of a unit: as many as keep its sums in the second-level cache.
int max_rows(int head_size) { return std::clamp(32768 / head_size, 64, kMaxRows); }

std::vector<Unit> make_units(const Arguments& arguments) {
  std::vector<Unit> units;
  const int group = arguments.num_heads / arguments.num_kv_heads;
  const int64_t max_queries = std::max(1, max_rows(arguments.head_size) / group);
  const uint64_t* words = arguments.words;
  int64_t cost = 0;
  for (int64_t index = 0; index < arguments.num_rows; ++index) {
    const Row& row = arguments.rows[index];
    const int64_t num_parts = (row.num_queries + max_queries - 1) / max_queries;
    for (int kv_head = 0; kv_head < arguments.num_kv_heads; ++kv_head) {
      for (int64_t part = 0; part < num_parts; ++part) {
        const int64_t first = row.num_queries * part / num_parts;
        const int64_t last = row.num_queries * (part + 1) / num_parts;
        const bool has_nodes = last > row.num_queries - row.num_nodes;
        const int64_t slots = has_nodes ? row.seq_len : row.seq_len - row.num_queries + last;
        const int64_t chunks = (slots + kChunk - 1) / kChunk;
        units.push_back({&row, words, kv_head, first, last - first, slots, chunks, cost});
        cost += units.back().cost();
      }
    }
    words += row.num_nodes * ((row.num_nodes + 63) / 64);
  }
  return units;
}

// A place in the work: chunk `chunk` of unit `unit`.
struct Place {
  size_t unit;
  int64_t chunk;
};

Place place_at(const std::vector<Unit>& units, int64_t cost) {
  const auto after = std::upper_bound(
      units.begin(), units.end(), cost,
      [](int64_t value, const Unit& unit) { return value < unit.cost_before + unit.cost(); });
  if (after == units.end()) return {units.size(), 0};
  return {static_cast<size_t>(after - units.begin()),
          (cost - after->cost_before) / after->cost_per_chunk()};
}

template <typename T>
class Attention {
 public:
#if defined(VLLM_TRIE_BF16_PRODUCTS)
  using Product = std::conditional_t<std::is_same_v<T, BFloat16>, BFloat16, float>;
#else
  using Product = float;
#endif

  explicit Attention(const Arguments& arguments)
      : arguments_(arguments),
        units_(make_units(arguments)),
        group_(arguments.num_heads / arguments.num_kv_heads),
        rows_(std::max(max_rows(arguments.head_size), group_)) {}

  void run() {
    if (units_.empty()) return;
    const int64_t work = units_.back().cost_before + units_.back().cost();
    // So little that starting another thread costs more is left to one.
    const int num_threads = static_cast<int>(
        std::clamp<int64_t>(work * group_ / 16, 1, std::max(1, arguments_.num_threads)));
    pieces_.resize(2 * num_threads);
    static thread_local Workspace shared;
    const size_t floats = Partial::floats(rows_, arguments_.head_size);
    if (num_threads > 1) partials_ = shared.take(pieces_.size() * floats);
    auto attend = [&](int thread, int team) {
      const Place begin = place_at(units_, work * thread / team);
      const Place end = place_at(units_, work * (thread + 1) / team);
      attend_between(begin, end, thread);
    };
    run_parallel(num_threads, attend);
    pieces_.erase(std::remove_if(pieces_.begin(), pieces_.end(),
                                 [](const Piece& piece) { return !piece.unit; }),
                  pieces_.end());
    if (pieces_.empty()) return;
    auto join = [&](int thread, int team) { join_pieces(thread, team); };
    run_parallel(num_threads, join);
  }

 private:
  struct Piece {
    const Unit* unit = nullptr;
    Partial partial;
  };

  void attend_between(Place begin, Place end, int thread) {
    int num_pieces = 0;
    for (Place place = begin; place.unit < end.unit || place.chunk < end.chunk;) {
      const Unit& unit = units_[place.unit];
      const int64_t last = place.unit < end.unit ? unit.num_chunks : end.chunk;
      const bool whole = place.chunk == 0 && last == unit.num_chunks;
      float* memory = nullptr;
      if (!whole) {
        const int slot = 2 * thread + num_pieces++;
        memory = partials_ + slot * Partial::floats(rows_, arguments_.head_size);
        pieces_[slot] = {&unit, Partial::at(memory, rows_)};
      }
      attend_unit(unit, place.chunk, last, memory);
      if (place.unit == end.unit) break;
      place = {place.unit + 1, 0};
    }
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
    std::fill_n(sums.maximum, rows, kMinusInfinity);
    std::fill_n(sums.total, rows, 0.0f);
    const PagedHead<T> head{
        static_cast<const T*>(arguments_.cache) + unit.kv_head * arguments_.head_stride,
        arguments_.block_stride,
        arguments_.block_table + unit.row->batch_index * arguments_.block_table_stride,
        arguments_.block_size, head_size};
    const int strips = kChunk / kStrip + (head_size + kStrip - 1) / kStrip;
    Chunk<T> chunk(head, first * kChunk, unit.num_slots);
    float positions[kChunk];
    for (int64_t index = first; index < last; ++index) {
      const Chunk<T> next(head, (index + 1) * kChunk, index + 1 < last ? unit.num_slots : 0);
      Prefetcher<T> prefetch(next, count_tiles(rows) * strips);
      multiply_keys(chunk, rows, query_rows, reinterpret_cast<Product*>(strip), scores,
                    prefetch);
      if (arguments_.alibi_slopes) {
        place_slots(unit, index * kChunk, chunk.count, positions);
        for (int row = 0; row < rows; ++row) {
          add_bias(slope(unit, row), position_of_query(unit, row / group_), positions,
                   chunk.count, scores + row * kChunk);
        }
      }
      for (int row = 0; row < rows; ++row) {
        factors[row] = weigh(visibility(unit, row / group_), index * kChunk, chunk.count,
                             scores + row * kChunk, sums.maximum + row, sums.total + row);
      }
      multiply_values(chunk, rows, scores, strip, index == first ? nullptr : factors,
                      sums.weighted, prefetch);
      chunk = next;
    }
    if (!partial) write(unit, 0, rows, sums);
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
    const int64_t node = unit.first_query + query - (row.num_queries - row.num_nodes);
    if (node < 0) return {row.seq_len - row.num_nodes + node + 1, nullptr, 0};
    const int64_t num_words = (row.num_nodes + 63) / 64;
    return {row.seq_len - row.num_nodes, unit.words + node * num_words, num_words};
  }

  // Positions in the text, counted from a tree's first level.
  static int64_t position_of_node(const Unit& unit, int64_t node) {
    const int64_t num_words = (unit.row->num_nodes + 63) / 64;
    int64_t ancestors = -1;  // a node is among its own
    for (int64_t word = 0; word < num_words; ++word) {
      ancestors += __builtin_popcountll(unit.words[node * num_words + word]);
    }
    return ancestors;
  }

  static float position_of_query(const Unit& unit, int64_t query) {
    const int64_t node = unit.first_query + query - (unit.row->num_queries - unit.row->num_nodes);
    return static_cast<float>(node < 0 ? node : position_of_node(unit, node));
  }

  static void place_slots(const Unit& unit, int64_t start, int count, float* positions) {
    const int64_t committed = unit.row->seq_len - unit.row->num_nodes;
    for (int i = 0; i < count; ++i) {
      const int64_t node = start + i - committed;
      positions[i] = static_cast<float>(node < 0 ? node : position_of_node(unit, node));
    }
    std::fill(positions + count, positions + kChunk, 0.0f);
  }

  // In units of scores before scaling.
  float slope(const Unit& unit, int row) const {
    return arguments_.alibi_slopes[unit.kv_head * group_ + row % group_] / arguments_.scale;
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
  // the maximum and the total; returns what earlier sums must be multiplied with.
  float weigh(const Visibility& visible, int64_t start, int count, float* scores, float* maximum,
              float* total) const {
    const int columns = (count + kLanes - 1) / kLanes * kLanes;
    if (start + columns > visible.dense) {
      const int64_t dense = std::max<int64_t>(0, visible.dense - start) / kLanes * kLanes;
      for (int64_t column = dense; column < columns; column += kLanes) {
        const uint32_t bits = visible.bits(start + column, kLanes);
        store(scores + column, keep_visible(load(scores + column), bits));
      }
    }
    Floats largest_scores = load(scores);
    for (int column = kLanes; column < columns; column += kLanes) {
      const Floats some = load(scores + column);
      largest_scores = some > largest_scores ? some : largest_scores;
    }
    const float before = *maximum;
    const float now = std::max(before, largest(largest_scores));
    const float scale = arguments_.scale * 1.44269504f;  // weights are powers of two
    // A row may see nothing of a chunk: its maximum must not be subtracted from itself then.
    const Floats shift = broadcast(now == kMinusInfinity ? 0.0f : now * scale);
    const Floats scales = broadcast(scale);
    Floats sums = {};
    for (int column = 0; column < columns; column += kLanes) {
      const Floats weights = exp2_nonpositive(load(scores + column) * scales - shift);
      store(scores + column, weights);
      sums += weights;
    }
    // exp2(-infinity) is 0: nothing was seen before.
    const float factor = before == now ? 1.0f : std::exp2((before - now) * scale);
    *maximum = now;
    *total = *total * factor + sum(sums);
    return factor;
  }

  // Output of the rows [first, last) of a unit, rounded once.
  void write(const Unit& unit, int first, int last, const Partial& sums) const {
    const int head_size = arguments_.head_size;
    for (int row = first; row < last; ++row) {
      const int64_t token = unit.row->query_start + unit.first_query + row / group_;
      T* to = static_cast<T*>(arguments_.output) + token * arguments_.output_stride +
              (static_cast<int64_t>(unit.kv_head) * group_ + row % group_) * head_size;
      const float factor = 1.0f / sums.total[row];
      const float* from = sums.weighted + static_cast<int64_t>(row) * head_size;
      for (int d = 0; d < head_size; ++d) from_float(from[d] * factor, to + d);
    }
  }

  // Pieces of one unit are neighbours in pieces_. Threads take rows of every unit in turn.
  void join_pieces(int thread, int team) {
    const int head_size = arguments_.head_size;
    const float scale = arguments_.scale * 1.44269504f;
    for (size_t begin = 0, end; begin < pieces_.size(); begin = end) {
      const Unit& unit = *pieces_[begin].unit;
      for (end = begin + 1; end < pieces_.size() && pieces_[end].unit == &unit;) ++end;
      const int rows = static_cast<int>(unit.num_queries) * group_;
      const int first = rows * thread / team, last = rows * (thread + 1) / team;
      const Partial& target = pieces_[begin].partial;
      for (int row = first; row < last; ++row) {
        float maximum = target.maximum[row];
        for (size_t i = begin + 1; i < end; ++i) {
          maximum = std::max(maximum, pieces_[i].partial.maximum[row]);
        }
        float total = 0.0f;
        float* joined = target.weighted + static_cast<int64_t>(row) * head_size;
        for (size_t i = begin; i < end; ++i) {
          const Partial& piece = pieces_[i].partial;
          const float weight = std::exp2((piece.maximum[row] - maximum) * scale);
          const float* from = piece.weighted + static_cast<int64_t>(row) * head_size;
          total += weight * piece.total[row];
          for (int d = 0; d < head_size; ++d) {
            joined[d] = weight * from[d] + (i == begin ? 0.0f : joined[d]);
          }
        }
        target.total[row] = total;
      }
      write(unit, first, last, target);
    }
  }

  const Arguments& arguments_;
  std::vector<Unit> units_;
  int group_;
  int rows_;  // of the largest unit
  std::vector<Piece> pieces_;
  float* partials_ = nullptr;
};

}  // namespace
}  // namespace vllm_trie

extern "C" {

// dtype: 0 float32, 1 bfloat16, 2 float16. Returns 0, or 1 if the shapes are not supported.
int vllm_trie_tree_attention(int dtype, const void* query, int64_t query_stride, const void* cache,
                             int64_t block_stride, int64_t head_stride, const int32_t* block_table,
                             int64_t block_table_stride, const void* rows, const uint64_t* words,
                             int64_t num_rows, void* output, int64_t output_stride, int num_heads,
                             int num_kv_heads, int head_size, int block_size, float scale,
                             const float* alibi_slopes, int num_threads) {
  using namespace vllm_trie;
  if (head_size % kSegment || block_size % kSegment || num_heads % num_kv_heads ||
      num_heads / num_kv_heads > kMaxRows || !(scale > 0.0f)) {
    return 1;
  }
  const Arguments arguments{query,      query_stride, cache,
                            block_stride, head_stride, block_table,
                            block_table_stride, static_cast<const Row*>(rows), words,
                            num_rows,   output,       output_stride,
                            num_heads,  num_kv_heads, head_size,
                            block_size, scale,        alibi_slopes,
                            num_threads};
  switch (dtype) {
    case 0:
      Attention<float>(arguments).run();
      return 0;
    case 1:
      Attention<BFloat16>(arguments).run();
      return 0;
    case 2:
      Attention<Float16>(arguments).run();
      return 0;
  }
  return 1;
}

int vllm_trie_lanes(void) { return vllm_trie::kLanes; }

int vllm_trie_bf16_products(void) {
#if defined(VLLM_TRIE_BF16_PRODUCTS)
  return 1;
#else
  return 0;
#endif
}

int vllm_trie_has_openmp(void) { return vllm_trie::have_openmp(); }
}
