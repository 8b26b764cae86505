// Chooses the nodes of a dynamic tree from the heads' candidates, best first; with a text, the
// heads' probabilities are blended into what the text says. The readable twin is selection.py; both
// make the same trees, bit for bit.
#pragma once

#include <vector>

#include "../../../ngrams/core/best_first.hpp"
#include "../../../ngrams/core/successors.hpp"

namespace medusa {

// Constants of the blend, see constants.py.
struct Scoring {
    double concentration;
    double discount;
    int32_t min_order;  // shorter contexts have no say
};

// One request of a batch, as native.py packs it: `num_tokens` tokens of its text follow.
struct Job {
    ngram::Index* own;  // null: the product of the heads alone
    ngram::Limits limits;
    int32_t num_tokens;
};
static_assert(sizeof(Job) == 40, "native.py packs it");

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
                                 const Candidates& candidates, const Scoring& scoring);

   private:
    void expand(const ngram::Index* text, const Candidates& candidates, const Scoring& scoring,
                double above, int32_t parent, int32_t depth);

    ngram::BestFirstTree tree_;
    std::vector<ngram::Contexts> contexts_;  // of the last committed token, then one a chosen node
    ngram::Successors successors_;
};

}  // namespace medusa
