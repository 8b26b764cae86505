// The work of one call, and its division into tasks that threads take one after another.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "panels.hpp"

namespace vllm_trie {

struct Row {  // as tree_batch.TreeRow
  int64_t batch_index, query_start, num_queries, num_nodes, seq_len, num_shared;
};

// The arguments of tree attention; native.py packs them.
struct Arguments {
  int64_t dtype;  // as for with_dtype()
  const void* query;
  int64_t query_stride;  // between tokens; heads lie side by side
  const void* cache;
  int64_t block_stride, head_stride;
  const int32_t* block_table;
  int64_t block_table_stride;
  const Row* rows;
  const uint64_t* words;   // of all rows, one after another
  const int64_t* offsets;  // of the nodes of all rows; null where positions do not matter
  int64_t num_rows;
  void* output;
  int64_t output_stride;
  int num_heads, num_kv_heads, head_size, block_size;
  int in_pairs;  // the cache; its dtype is bfloat16 then, and its sizes are multiples of 32
  float scale;
  int64_t window, chunk;  // as kind.AttentionKind
  float soft_cap;
  const float* sinks;         // of each head, or null
  const float* alibi_slopes;  // of each head, or null
  int num_threads;
};

// The first slot whose key a query at a position may see, if keys lay at their positions.
inline int64_t first_seen(const Arguments& arguments, int64_t position) {
  int64_t first = 0;
  if (arguments.window) first = std::max<int64_t>(first, position - arguments.window + 1);
  if (arguments.chunk) first = std::max(first, position - position % arguments.chunk);
  return first;
}

struct Unit {
  const Row* row;
  const uint64_t* words;   // of the row's first node
  const int64_t* offsets;  // the same
  int kv_head;
  int64_t first_query, num_queries;
  int64_t first_slot, end_slot;  // that any of the queries sees, of the row's request
  int64_t num_chunks;

  int64_t cost() const { return num_chunks * num_queries; }

  // Position in the text of a query, counted from the unit's first one.
  int64_t position(int64_t query) const {
    const int64_t node = first_query + query - (row->num_queries - row->num_nodes);
    return row->seq_len - row->num_nodes + (node < 0 ? node : offsets[node]);
  }
};

// Chunks of a unit that one thread attends to.
struct Task {
  size_t unit;
  int64_t first_chunk, last_chunk;
  int part, num_parts;  // of the unit
  int first_partial;    // of the unit's partial results, which lie side by side
};

// A part of a unit has at least this many chunks: joining it costs about as much as half of one.
constexpr int64_t kMinChunks = 2;

// Rows of a unit: as many as keep its sums in the second-level cache.
inline int max_rows(int head_size) { return std::clamp(32768 / head_size, 64, kMaxRows); }

inline std::vector<Unit> make_units(const Arguments& arguments, const uint64_t* words) {
  std::vector<Unit> units;
  const int group = arguments.num_heads / arguments.num_kv_heads;
  const int64_t max_queries = std::max(1, max_rows(arguments.head_size) / group);
  const int64_t* offsets = arguments.offsets;
  for (int64_t index = 0; index < arguments.num_rows; ++index) {
    const Row& row = arguments.rows[index];
    const int64_t num_parts = (row.num_queries + max_queries - 1) / max_queries;
    for (int kv_head = 0; kv_head < arguments.num_kv_heads; ++kv_head) {
      for (int64_t part = 0; part < num_parts; ++part) {
        const int64_t first = row.num_queries * part / num_parts;
        const int64_t last = row.num_queries * (part + 1) / num_parts;
        const bool has_nodes = last > row.num_queries - row.num_nodes;
        const int64_t seen = has_nodes ? row.seq_len : row.seq_len - row.num_queries + last;
        const int64_t end = row.num_shared ? row.num_shared : seen;
        Unit unit{&row, words, offsets, kv_head, first, last - first, 0, end, 0};
        if (arguments.window || arguments.chunk) {
          int64_t nearest = unit.position(0);
          for (int64_t query = 1; query < unit.num_queries; ++query) {
            nearest = std::min(nearest, unit.position(query));
          }
          // Blocks before the first slot may be gone; a segment is in one block, and pairs of them
          // are, too, where its size allows.
          const int64_t aligned = arguments.block_size % (2 * kSegment) ? kSegment : 2 * kSegment;
          unit.first_slot = first_seen(arguments, nearest) / aligned * aligned;
        }
        unit.num_chunks = (end - unit.first_slot + kChunk - 1) / kChunk;
        units.push_back(unit);
      }
    }
    words += row.num_nodes * ((row.num_nodes + 63) / 64);
    if (offsets) offsets += row.num_nodes;
  }
  return units;
}

// Guided self-scheduling (Polychronopoulos and Kuck 1987) with units as the largest tasks: a unit
// is divided into parts of about the work that is left over twice the number of threads. The
// division depends on nothing but the arguments, and so do the sums.
inline std::vector<Task> make_tasks(const std::vector<Unit>& units, int num_threads) {
  std::vector<Task> tasks;
  int64_t work_left = 0;
  for (const Unit& unit : units) work_left += unit.cost();
  int num_partials = 0;
  for (size_t index = 0; index < units.size(); ++index) {
    const Unit& unit = units[index];
    const int64_t wanted = 2 * num_threads * unit.cost() / std::max<int64_t>(1, work_left);
    const int64_t most = num_threads > 1 ? unit.num_chunks / kMinChunks : 1;
    const int64_t num_parts = std::max<int64_t>(1, std::min(wanted, most));
    for (int64_t part = 0; part < num_parts; ++part) {
      tasks.push_back({index, unit.num_chunks * part / num_parts,
                       unit.num_chunks * (part + 1) / num_parts, static_cast<int>(part),
                       static_cast<int>(num_parts), num_partials});
    }
    if (num_parts > 1) num_partials += static_cast<int>(num_parts);
    work_left -= unit.cost();
  }
  return tasks;
}

}  // namespace vllm_trie
