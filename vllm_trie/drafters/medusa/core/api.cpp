// The C interface that native.py and compiled_heads.py call. Functions that return int32_t return
// kNone without memory.

#include "../../ngram_trie/core/no_throw.hpp"
#include "candidates.hpp"
#include "select.hpp"

using ngram::Index;

// A batch of requests. The addresses of their hidden states follow, where they are asked for, then
// for each request a medusa::Job and the tokens of its text.
struct Batch {
    int64_t num_jobs;
    int64_t stride;  // nodes that there is room for in a tree
};

namespace {

// Select the tree of every job from candidates [num_jobs, num_heads, num_candidates]. `trees` is
// room for num_jobs sizes, then for each job its tokens, its parents and its probabilities (as
// floats), `stride` entries each. Returns whether any tree has less than `stride` nodes.
bool select_all(const Batch& batch, const char* jobs, medusa::Candidates candidates,
                int32_t* trees) {
    static thread_local medusa::Selector selector;
    int32_t* nodes = trees + batch.num_jobs;
    bool any_smaller = false;
    for (int64_t i = 0; i < batch.num_jobs; ++i) {
        medusa::Job job;
        std::memcpy(&job, jobs, sizeof(job));
        const auto* tokens = reinterpret_cast<const int32_t*>(jobs + sizeof(job));
        jobs += sizeof(job) + sizeof(int32_t) * job.num_tokens;
        ngram::BestFirstTree& tree = selector.select(job, tokens, candidates);
        trees[i] = tree.size();
        any_smaller |= tree.size() < batch.stride;
        tree.lay_out(nodes, nodes + batch.stride,
                     reinterpret_cast<float*>(nodes + 2 * batch.stride));
        nodes += 3 * batch.stride;
        candidates.tokens += candidates.num_heads * candidates.num_candidates;
        candidates.probabilities += candidates.num_heads * candidates.num_candidates;
    }
    return any_smaller;
}

}  // namespace

// Returns null without memory or if no index can have contexts of that length.
extern "C" Index* medusa_index_new(int32_t max_order) { return ngram::new_index(max_order); }
extern "C" void medusa_index_free(Index* index) { delete index; }

// Find each head's candidates, [num_rows, num_heads, num_candidates]. Returns 0.
extern "C" int32_t medusa_top_candidates(const medusa::HeadLogits* logits, int32_t* tokens,
                                         float* probabilities) {
    return ngram::without_throwing([&] {
        medusa::top_candidates(*logits, tokens, probabilities);
        return 0;
    });
}

// Find the same from hidden states, given by their addresses.
extern "C" int32_t medusa_head_candidates(const medusa::Heads* heads, const void* rows,
                                          int64_t num_rows, int32_t* tokens,
                                          float* probabilities) {
    return ngram::without_throwing([&] {
        medusa::head_candidates(*heads, static_cast<const void* const*>(rows), num_rows, tokens,
                                probabilities);
        return 0;
    });
}

// Select from candidates [num_jobs, num_heads, num_candidates]; for `trees` see select_all. The
// batch has no addresses of hidden states. Returns 0, or 1 if any tree has less than `stride` nodes.
extern "C" int32_t medusa_select(const int32_t* tokens, const float* probabilities,
                                 int64_t num_heads, int64_t num_candidates, const Batch* batch,
                                 int32_t* trees) {
    return ngram::without_throwing([&] {
        return select_all(*batch, reinterpret_cast<const char*>(batch + 1),
                          {tokens, probabilities, num_heads, num_candidates}, trees);
    });
}

// Find candidates from the batch's hidden states and select from them. Returns what medusa_select
// does. Few arguments, because each costs its conversion.
extern "C" int32_t medusa_draft(const medusa::Heads* heads, const Batch* batch, int32_t* trees) {
    return ngram::without_throwing([&] {
        static thread_local std::vector<int32_t> tokens;
        static thread_local std::vector<float> probabilities;
        const auto* rows = reinterpret_cast<const void* const*>(batch + 1);
        const int64_t size = batch->num_jobs * heads->num_heads * heads->num_candidates;
        tokens.resize(size);
        probabilities.resize(size);
        medusa::head_candidates(*heads, rows, batch->num_jobs, tokens.data(),
                                probabilities.data());
        return select_all(
            *batch, reinterpret_cast<const char*>(rows + batch->num_jobs),
            {tokens.data(), probabilities.data(), heads->num_heads, heads->num_candidates}, trees);
    });
}
