// Draft trees from n-gram indexes: blended back-off and best-first growth.
// The readable twin is blended.py; both make the same trees, bit for bit.
#pragma once

#include <vector>

#include "index.hpp"

namespace ngram {

constexpr int kMaxSources = 3;  // the request's own text, the store, the corpus

// Parameters of the Pitman-Yor blend, as ctypes passes them; the shared sources are all but the
// first.
struct Scoring {
    double own_concentration;
    double own_discount;
    double shared_concentration;
    double shared_discount;
};

struct Limits {
    int32_t max_nodes;
    int32_t max_depth;
    int32_t chain_only;
};

// A context of one length in one source: an n-gram that occurred there.
struct Match {
    int32_t node;  // kNone: it occurred once and is no node, read on in the text
    int32_t doc;   // of its one occurrence
    int32_t pos;   // of that occurrence's last token; kNone if it occurred more often
};

// The contexts that end at one point, by length: 0 is the empty one. If a context occurred, so did
// all shorter ones.
struct Contexts {
    int32_t size;
    Match matches[kMaxOrder + 1];
};

class Drafter {
   public:
    // Draft after `tokens`; results are laid out depth-first, likeliest child first, and stay valid
    // until the next call. Sources are in the order in which they are believed.
    void draft(const View* sources, int32_t num_sources, const Scoring& scoring,
               const int32_t* tokens, int64_t num_tokens, const Limits& limits);

    int32_t num_nodes() const { return static_cast<int32_t>(token_ids.size()); }
    // The longest match of a source, null if it is shorter than `min_length` tokens.
    const Match* longest_match(int32_t source, int32_t min_length) const;

    std::vector<int32_t> token_ids, parents;
    std::vector<float> probabilities;

   private:
    struct Guess {
        double probability;
        int32_t tick;  // order of discovery, breaks ties
        int32_t token, parent, depth;
    };
    struct Successor {
        int32_t token;
        double probability;
    };

    void match_suffix(const View& source, const int32_t* tokens, int64_t num_tokens,
                      Contexts& contexts) const;
    void advance(const View& source, const Contexts& from, int32_t token, Contexts& to) const;
    void predict(const View* sources, int32_t num_sources, const Scoring& scoring,
                 const Contexts* contexts, double cut);
    double blend(const View& source, const Match& match, double concentration, double discount,
                 double left, double cut);
    void add_successor(int32_t token, double probability);
    void push_guesses(double above, int32_t parent, int32_t depth, size_t max_nodes);
    void lay_out();

    std::vector<Contexts> contexts_;  // root's, then one row a node; kMaxSources a row
    std::vector<Successor> successors_;
    std::vector<int32_t> slots_ = std::vector<int32_t>(4096, kNone);  // by token
    std::vector<Guess> heap_;
    std::vector<double> best_;  // the largest probabilities pushed so far, a min-heap
    int32_t ticks_ = 0;
    std::vector<Guess> chosen_;
    std::vector<int32_t> stack_, new_index_, first_child_, next_sibling_;
};

}  // namespace ngram
