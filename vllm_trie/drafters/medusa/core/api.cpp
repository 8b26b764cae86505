// The C interface that native.py calls through ctypes.

#include "../../ngram_trie/core/no_throw.hpp"
#include "candidates.hpp"
#include "heads.hpp"
#include "select.hpp"

using ngram::Index;

namespace {

// Where trees are written: [num_jobs] sizes, then for each job its tokens, its parents and its
// probabilities (as floats), `stride` entries each.
struct Room {
    int32_t* numbers;
    int64_t num_jobs, stride;

    int32_t* trees() const { return numbers + num_jobs; }
};

// Selects the tree of every job from candidates [num_jobs, num_heads, num_candidates]. Returns
// whether any has less than `stride` nodes.
bool select_all(const char* jobs, medusa::Candidates candidates, const medusa::Scoring& scoring,
                const Room& room) {
    static thread_local medusa::Selector selector;
    int32_t* nodes = room.trees();
    bool any_smaller = false;
    for (int64_t i = 0; i < room.num_jobs; ++i) {
        medusa::Job job;
        std::memcpy(&job, jobs, sizeof(job));
        const auto* tokens = reinterpret_cast<const int32_t*>(jobs + sizeof(job));
        jobs += sizeof(job) + sizeof(int32_t) * job.num_tokens;
        ngram::BestFirstTree& tree = selector.select(job, tokens, candidates, scoring);
        room.numbers[i] = tree.size();
        any_smaller |= tree.size() < room.stride;
        tree.lay_out(nodes, nodes + room.stride,
                     reinterpret_cast<float*>(nodes + 2 * room.stride));
        nodes += 3 * room.stride;
        candidates.tokens += candidates.num_heads * candidates.num_candidates;
        candidates.probabilities += candidates.num_heads * candidates.num_candidates;
    }
    return any_smaller;
}

// A batch of requests, as compiled_heads.py packs it.
struct Batch {
    int64_t num_rows, num_threads, stride;
    const medusa::Scoring* scoring;
    int64_t* product_nanoseconds;  // or null
};

// Finds candidates with find(tokens, probabilities), then selects from them.
template <typename Find>
int32_t draft(const Find& find, int64_t num_heads, int64_t num_candidates, const char* jobs,
              const medusa::Scoring& scoring, const Room& room) {
    return ngram::without_throwing([&] {
        static thread_local std::vector<int32_t> tokens;
        static thread_local std::vector<float> probabilities;
        const size_t size = static_cast<size_t>(room.num_jobs * num_heads * num_candidates);
        tokens.resize(size);
        probabilities.resize(size);
        find(tokens.data(), probabilities.data());
        return select_all(jobs, {tokens.data(), probabilities.data(), num_heads, num_candidates},
                          scoring, room);
    });
}

}  // namespace

// Returns null without memory or if no index can have contexts of that length.
extern "C" Index* medusa_index_new(int32_t max_order) { return ngram::new_index(max_order); }
extern "C" void medusa_index_free(Index* index) { delete index; }

// Each head's candidates, [num_rows, num_heads, num_candidates]. Returns 0, or kNone without memory.
extern "C" int32_t medusa_top_candidates(const medusa::HeadLogits* logits, int32_t* tokens,
                                         float* probabilities) {
    return ngram::without_throwing([&] {
        medusa::top_candidates(*logits, tokens, probabilities);
        return 0;
    });
}

// The same from hidden states, given by their addresses.
extern "C" int32_t medusa_head_candidates(const medusa::Heads* heads, const void* const* rows,
                                          int64_t num_rows, int64_t num_threads, int32_t* tokens,
                                          float* probabilities, int64_t* product_nanoseconds) {
    return ngram::without_throwing([&] {
        medusa::head_candidates(*heads, rows, num_rows, num_threads, tokens, probabilities,
                                product_nanoseconds);
        return 0;
    });
}

// Select for a batch from candidates [num_jobs, num_heads, num_candidates]. jobs: for each a
// medusa::Job, then the tokens of its text. trees: room for them, see Room. Returns 0, 1 if any tree
// has less than `stride` nodes, or kNone without memory.
extern "C" int32_t medusa_select(const int32_t* tokens, const float* probabilities,
                                 int64_t num_heads, int64_t num_candidates, const char* jobs,
                                 int64_t num_jobs, const medusa::Scoring* scoring, int64_t stride,
                                 int32_t* trees) {
    return ngram::without_throwing([&] {
        return select_all(jobs, {tokens, probabilities, num_heads, num_candidates}, *scoring,
                          {trees, num_jobs, stride});
    });
}

// From logits to trees: row i of the logits is job i's. Returns what medusa_select does.
extern "C" int32_t medusa_draft(const medusa::HeadLogits* logits, const char* jobs,
                                const medusa::Scoring* scoring, int64_t stride, int32_t* trees) {
    const auto find = [&](int32_t* tokens, float* probabilities) {
        medusa::top_candidates(*logits, tokens, probabilities);
    };
    return draft(find, logits->num_heads, logits->num_candidates, jobs, *scoring,
                 {trees, logits->num_rows, stride});
}

// From hidden states to trees. batch: a Batch, then the addresses of its rows, then the jobs, of
// which job i is row i's. Few arguments, because each costs its conversion. Returns what medusa_select
// does.
extern "C" int32_t medusa_draft_with_heads(const medusa::Heads* heads, const char* batch,
                                           int32_t* trees) {
    Batch it;
    std::memcpy(&it, batch, sizeof(it));
    const auto* rows = reinterpret_cast<const void* const*>(batch + sizeof(it));
    const auto find = [&](int32_t* tokens, float* probabilities) {
        medusa::head_candidates(*heads, rows, it.num_rows, it.num_threads, tokens, probabilities,
                                it.product_nanoseconds);
    };
    return draft(find, heads->num_heads, heads->num_candidates,
                 reinterpret_cast<const char*>(rows + it.num_rows), *it.scoring,
                 {trees, it.num_rows, it.stride});
}
