// Chooses the nodes of a dynamic tree from the heads' candidates, best first; with a text, the
// heads' probabilities are blended into what the text says. The readable twin is selection.py; both
// make the same trees, bit for bit.
#pragma once

#include <vector>

#include "../../ngram_trie/core/best_first.hpp"
#include "../../ngram_trie/core/successors.hpp"

namespace medusa {

// One request of a batch; `num_tokens` tokens of its text follow.
struct Job {
    ngram::Index* own;  // null: the product of the heads alone
    ngram::Limits limits;
    int32_t num_tokens;
};

// What the heads say for one request, [num_heads, num_candidates]; each row likeliest first, its
// tokens distinct.
struct Candidates {
    const int32_t* tokens;
    const float* probabilities;
    int64_t num_heads, num_candidates;
};

class Selector {
   public:
    // The tree, which stays valid until the next call. Brings the job's index up to date with the
    // tokens of its text.
    ngram::BestFirstTree& select(const Job& job, const int32_t* tokens,
                                 const Candidates& candidates);

   private:
    void expand(const ngram::Index* text, const Candidates& candidates, double above,
                int32_t parent, int32_t depth);

    ngram::BestFirstTree tree_;
    std::vector<ngram::Contexts> contexts_;  // of the last committed token, then one a chosen node
    ngram::Successors successors_;
};

}  // namespace medusa
