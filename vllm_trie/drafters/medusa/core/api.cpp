// The C interface that native.py calls through ctypes.

#include "../../ngram_trie/core/no_throw.hpp"
#include "candidates.hpp"
#include "select.hpp"

using ngram::Index;

namespace {

// Selects the tree of every job from candidates [num_jobs, num_heads, num_candidates].
void select_all(const char* jobs, int32_t num_jobs, medusa::Candidates candidates,
                const medusa::Scoring& scoring, int32_t stride, int32_t* trees) {
    static thread_local medusa::Selector selector;
    for (int32_t i = 0; i < num_jobs; ++i) {
        medusa::Job job;
        std::memcpy(&job, jobs, sizeof(job));
        const auto* tokens = reinterpret_cast<const int32_t*>(jobs + sizeof(job));
        jobs += sizeof(job) + sizeof(int32_t) * job.num_tokens;
        ngram::BestFirstTree& tree = selector.select(job, tokens, candidates, scoring);
        int32_t* nodes = trees + 1;
        trees[0] = tree.size();
        tree.lay_out(nodes, nodes + stride,
                     reinterpret_cast<float*>(nodes + 2 * static_cast<size_t>(stride)));
        trees += 1 + 3 * static_cast<size_t>(stride);
        candidates.tokens += candidates.num_heads * candidates.num_candidates;
        candidates.probabilities += candidates.num_heads * candidates.num_candidates;
    }
}

}  // namespace

extern "C" {

// Returns null without memory or if no index can have contexts of that length.
Index* medusa_index_new(int32_t max_order) { return ngram::new_index(max_order); }
void medusa_index_free(Index* index) { delete index; }

// Each head's candidates, [num_rows, num_heads, num_candidates]. Returns 0, or kNone without memory.
int32_t medusa_top_candidates(const medusa::HeadLogits* logits, int32_t* tokens,
                              float* probabilities) {
    return ngram::without_throwing([&] {
        medusa::top_candidates(*logits, tokens, probabilities);
        return 0;
    });
}

// Select for a batch from candidates [num_jobs, num_heads, num_candidates]. jobs: for each a
// medusa::Job, then the tokens of its text. trees: for each job the
// number of nodes, and then three times `stride` entries: tokens, parents and probabilities (as
// floats). Returns 0, or kNone without memory.
int32_t medusa_select(const int32_t* tokens, const float* probabilities, int64_t num_heads,
                      int64_t num_candidates, const char* jobs, int32_t num_jobs,
                      const medusa::Scoring* scoring, int32_t stride, int32_t* trees) {
    return ngram::without_throwing([&] {
        select_all(jobs, num_jobs, {tokens, probabilities, num_heads, num_candidates}, *scoring,
                   stride, trees);
        return 0;
    });
}

// Both at once: row i of the logits is job i's.
int32_t medusa_draft(const medusa::HeadLogits* logits, const char* jobs,
                     const medusa::Scoring* scoring, int32_t stride, int32_t* trees) {
    return ngram::without_throwing([&] {
        static thread_local std::vector<int32_t> tokens;
        static thread_local std::vector<float> probabilities;
        const size_t size =
            static_cast<size_t>(logits->num_rows * logits->num_heads * logits->num_candidates);
        tokens.resize(size);
        probabilities.resize(size);
        medusa::top_candidates(*logits, tokens.data(), probabilities.data());
        select_all(jobs, static_cast<int32_t>(logits->num_rows),
                   {tokens.data(), probabilities.data(), logits->num_heads,
                    logits->num_candidates},
                   *scoring, stride, trees);
        return 0;
    });
}

}  // extern "C"
