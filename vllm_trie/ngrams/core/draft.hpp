// Draft trees from n-gram indexes and the candidates of a model's heads: blended back-off, grown
// best-first. The readable twin is blend.py; both make the same trees, bit for bit.
#pragma once

#include <vector>

#include "best_first.hpp"
#include "successors.hpp"

namespace ngram {

// Where contexts come from.
enum Kind { kOwn, kStore, kCorpus };

// Trust in the counts of a source: the parameters of a Pitman-Yor process.
struct Source {
    double concentration;
    double discount;
};

// Parameters of a blend: class Blend in blend.py.
struct Blend {
    Source own;
    Source shared;
    Source shared_long;
    Source corpus;
    Source corpus_long;
    Source recycled;
    double path_trust;
    double min_left;
    double cut_left;
    double cut_share;
    double min_left_for_heads;
    int32_t long_order;
    int32_t min_order;
    int32_t use_length;
};

inline Source source_of(const Blend& blend, Kind kind, int32_t order, bool is_answer) {
    if (kind == kOwn) return blend.own;
    const bool is_long = order >= blend.long_order;
    if (kind == kStore) return is_long || is_answer ? blend.shared_long : blend.shared;
    if (is_long) return blend.corpus_long;
    return {blend.corpus.concentration * std::max(order, 1), blend.corpus.discount};
}

// An index in a mapped file. The arrays belong to the caller.
struct Corpus {
    Text text;
    View view;
};

// One request. In a batch, its tokens follow it.
struct DraftJob {
    Index* own;              // brought up to date with the tokens; null: the heads alone draft
    const Index* store;      // may be null
    const Corpus* corpus;    // may be null
    Limits limits;
    int64_t num_tokens;      // those that follow: the end of the request's text
    int64_t num_indexed;     // the first of them, which belong in `own`
    int64_t first;           // place of the first of them in the request's text
    const RecycledTable* recycled;  // may be null
    int32_t scope;                  // of `recycled`
    int32_t text;                   // of `own`, which holds the request's text
    int32_t answer;        // text of `store` that answered such a prompt, kNone if there is none
    int64_t output_begin;  // where the output begins, negative: before the tokens that follow
};

// Predictions of heads, [num_heads, num_candidates] for each job: head i predicts the token at
// depth i + 1, the likeliest first, its tokens distinct.
struct Candidates {
    const int32_t* tokens;
    const float* probabilities;
    int64_t num_heads;
    int64_t num_candidates;
};

// The beginning of a batch. A Blend and the jobs follow.
struct DraftBatch {
    int64_t num_jobs;
    int64_t stride;  // nodes that a row of the results has room for
    Candidates candidates;
};

// Draft for every job. Row i of `rows` becomes the tree of job i: its number of nodes, the text of
// its store that matched (kNone if none did), then tokens, parents and probabilities (floats),
// `stride` entries each.
void draft_batch(const char* batch, int32_t* rows);

class Drafter {
   public:
    // The tree, which stays valid until the next call. Brings the job's own index up to date.
    BestFirstTree& draft(const DraftJob& job, const int32_t* tokens, const Candidates& candidates,
                         const Blend& blend);
    // The text of the job's store in which its last tokens occur, kNone if less than `min_length`
    // of them do.
    int32_t used_text(const DraftJob& job, int32_t min_length) const;

   private:
    // A context that is asked, and the part of the probability that its successors get.
    struct Asked {
        Counted counted;
        double discount;
        double left;   // the probability that longer contexts left
        double share;  // the part of it that the successors get

        // Of a successor's count, in the probability.
        double unit() const {
            return left * share / (counted.total() - discount * counted.size());
        }
    };

    // One for each source.
    const Contexts* contexts_after(int32_t guess) const {
        return contexts_.data() + static_cast<size_t>(guess + 1) * num_sources_;
    }
    void add_source(Kind kind, const View& view) {
        kinds_[num_sources_] = kind;
        sources_[num_sources_++] = view;
    }
    void match_answer(const DraftJob& job, const int32_t* tokens);
    void expand(const DraftJob& job, const Candidates& candidates, const Blend& blend,
                double above, int32_t parent, int32_t depth);
    template <typename Take>
    double ask_contexts(const Blend& blend, const Contexts* contexts,
                        const RecycledContext* const (&recycled)[2], int32_t answer_order,
                        double min_left, Take take);
    void ask_head(const Candidates& candidates, int64_t head, double left, double most);

    BestFirstTree tree_;
    View sources_[kMaxSources];  // in the order in which they are believed
    Kind kinds_[kMaxSources];
    int32_t answer_order_ = kNone;  // length of the context that is the job's answer so far
    int32_t num_sources_ = 0;
    int32_t last_[2] = {};  // the last tokens of the text, kAnyToken before its first
    std::vector<Contexts> contexts_;  // root's, then one row a node; num_sources_ a row
    Successors successors_;
};

}  // namespace ngram
