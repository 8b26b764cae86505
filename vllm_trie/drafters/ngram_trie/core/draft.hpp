// Draft trees from n-gram indexes: blended back-off and best-first growth.
// The readable twin is blended.py; both make the same trees, bit for bit.
#pragma once

#include <vector>

#include "best_first.hpp"
#include "successors.hpp"

namespace ngram {

// Parameters of the Pitman-Yor blend, as ctypes passes them; the shared sources are all but the
// first.
struct Blend {
    double own_concentration;
    double own_discount;
    double shared_concentration;
    double shared_discount;
};

class Drafter {
   public:
    // Draft after `tokens`. Sources are in the order in which they are believed.
    void draft(const View* sources, int32_t num_sources, const Blend& scoring,
               const int32_t* tokens, int64_t num_tokens, const Limits& limits);

    // The tree, which stays valid until the next call.
    BestFirstTree& tree() { return tree_; }
    // The longest match of a source, null if it is shorter than `min_length` tokens.
    const Match* longest_match(int32_t source, int32_t min_length) const;

   private:
    void predict(const View* sources, int32_t num_sources, const Blend& scoring,
                 const Contexts* contexts, double cut);
    void discover(double above, int32_t parent, int32_t depth);

    BestFirstTree tree_;
    std::vector<Contexts> contexts_;  // root's, then one row a node; kMaxSources a row
    Successors successors_;
};

}  // namespace ngram
