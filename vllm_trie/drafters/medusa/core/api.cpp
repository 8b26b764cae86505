// The C interface that native.py and compiled_heads.py call. Functions return kNone without memory.

#include "../../../ngrams/core/draft.hpp"
#include "../../../ngrams/core/no_throw.hpp"
#include "candidates.hpp"

// Find each head's candidates, [num_rows, num_heads, num_candidates]. Returns 0.
extern "C" int32_t medusa_top_candidates(const medusa::HeadLogits* logits, int32_t* tokens,
                                         float* probabilities) {
    return ngram::without_throwing([&] {
        medusa::top_candidates(*logits, tokens, probabilities);
        return 0;
    });
}

// Find the same from hidden states, given by an array of their addresses.
extern "C" int32_t medusa_head_candidates(const medusa::Heads* heads, const void* states,
                                          int64_t num_rows, int32_t* tokens,
                                          float* probabilities) {
    return ngram::without_throwing([&] {
        medusa::head_candidates(*heads, static_cast<const void* const*>(states), num_rows, tokens,
                                probabilities);
        return 0;
    });
}

// Draft for a batch whose candidates are those of its hidden states; see ngram::draft_batch(), also
// for what it returns.
extern "C" int32_t medusa_draft(const medusa::Heads* heads, const void* states, const char* batch,
                                int32_t* rows) {
    return ngram::without_throwing([&] {
        static thread_local std::vector<int32_t> tokens;
        static thread_local std::vector<float> probabilities;
        const int64_t num_jobs = ngram::read_batch(batch).num_jobs;
        tokens.resize(num_jobs * heads->num_heads * heads->num_candidates);
        probabilities.resize(tokens.size());
        medusa::head_candidates(*heads, static_cast<const void* const*>(states), num_jobs,
                                tokens.data(), probabilities.data());
        const ngram::Candidates candidates = {tokens.data(), probabilities.data(),
                                              heads->num_heads, heads->num_candidates};
        return static_cast<int32_t>(ngram::draft_batch(batch, candidates, rows));
    });
}
