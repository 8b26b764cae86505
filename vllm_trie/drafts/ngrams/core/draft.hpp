// Draft trees from n-gram indexes and the candidates of a model's heads: blended back-off, grown
// best-first. The readable twin is tests/oracles/ngrams/mixture.py: the same trees, bit for bit.
#pragma once

#include <array>
#include <vector>

#include "best_first.hpp"
#include "successors.hpp"

namespace ngram {

// Where contexts come from.
enum Kind { kOwn, kStore, kArchive };

// Trust in the counts of a source: the parameters of a Pitman-Yor process.
struct Source {
    double concentration;
    double discount;
};

// Trust in what the model held likely: a token gets this part of its probability.
struct Recycled {
    double triple;   // after the last three tokens, in answers to the prompt; see kAskedBefore
    double pair;     // after the last two tokens
    double single;   // after the last one
    double sibling;  // after rejected siblings of the last token; asked before the empty context
    double guess;    // in place of the last token; asked before the empty context
    double odds;     // of a node, in relation to what the blend makes them
};

// Parameters of a blend: class Blend in blend.py.
struct Blend {
    Source own;
    Source shared;
    Source shared_long;
    Source archive;
    Source archive_long;
    Recycled recycled;
    double path_trust;
    double min_left;
    double cut_left;
    double cut_share;
    double min_left_for_heads;
    int32_t long_order;
    int32_t min_order;
};

inline Source source_of(const Blend& blend, Kind kind, int32_t order, bool is_answer) {
    if (kind == kOwn) return blend.own;
    const bool is_long = order >= blend.long_order;
    if (kind == kStore) return is_long || is_answer ? blend.shared_long : blend.shared;
    if (is_long) return blend.archive_long;
    return {blend.archive.concentration * std::max(order, 1), blend.archive.discount};
}

// A read-only index. The arrays belong to the caller.
struct Archive {
    Text text;
    View view;
};

// The rows of logits of a request's last step: after the token before its tree, and after each node.
struct Rows {
    const int32_t* tokens;  // kRowTokens a row
    const float* probabilities;
    const int32_t* nodes;
    const int32_t* parents;
};

// One request. In a batch, its tokens follow it, and then its rows.
struct DraftJob {
    Index* own;              // brought up to date with the tokens; null: the heads alone draft
    const Index* store;      // may be null
    const Archive* archive;    // may be null
    Limits limits;
    int64_t num_tokens;      // those that follow: the end of the request's text
    int64_t num_indexed;     // the first of them, which belong in `own`
    int64_t first;           // place of the first of them in the request's text
    RecycledTable* recycled;  // may be null
    int64_t num_rows;         // of logits, to take in first; the first has no node
    int64_t num_accepted;     // of their nodes
    int64_t last_accepted;    // a node, kNone for none; the text's last token follows it
    int32_t scope;            // of `recycled`
    int32_t text;                   // of `own`, which holds the request's text
    int32_t answer;        // text of `store` that answered such a prompt, kNone if there is none
    int64_t output_begin;  // where the output begins, negative: before the tokens that follow
    int32_t prompt;        // in `recycled`, 0 without
    int32_t is_sampled;    // at a temperature
    int64_t step_row;      // of the step that goes on with the text, see NewTokens
    const int32_t* row_tokens;       // the rows, which then lie elsewhere; may be null
    const float* row_probabilities;
};

// What a step gives jobs that were packed before it ended: their texts go on with a row of its
// tokens, all but the last of which are the first nodes of the chain that the step verified.
struct NewTokens {
    const int64_t* tokens;  // [requests, width]; null: the jobs have all of their texts
    const int64_t* counts;  // of the tokens of each row
    int64_t width;
};

// Predictions of heads, [num_heads, num_candidates] for each job: head i predicts the token at
// depth i + 1, its tokens distinct. Without transitions the likeliest comes first.
struct Candidates {
    const int32_t* tokens;
    const float* probabilities;
    const float* transitions;  // of head i + 1 after each candidate of head i; may be null
    int64_t num_heads;
    int64_t num_candidates;
};

// The beginning of a batch. Two Blends follow, of greedy and of sampled requests, then the jobs.
struct DraftBatch {
    int64_t num_jobs;
    int64_t stride;  // nodes that a row of the results has room for
    Candidates candidates;
};

// Draft for every job. Row i of `rows` becomes the tree of job i: its number of nodes, the text of
// its store that matched (kNone if none did), then tokens, parents and probabilities (floats),
// `stride` entries each.
void draft_batch(const char* batch, const NewTokens& step, int32_t* rows);

class Drafter {
   public:
    // The tree, which stays valid until the next call. Brings the job's own index up to date.
    BestFirstTree& draft(const DraftJob& job, const int32_t* tokens, const Rows& rows,
                         const Candidates& candidates, const Blend& blend);
    // The text of the job's store in which its last tokens occur, kNone if less than kUseLength
    // of them do.
    int32_t used_text(const DraftJob& job) const;

   private:
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
    void take_in_rows(const DraftJob& job, const int32_t* tokens, const Rows& rows);
    void find_recycled(const DraftJob& job, int32_t parent);
    double ask_contexts(const Blend& blend, const Contexts* contexts, int32_t answer_order,
                        double min_left, double smallest);
    void ask_counted(const Counted& counted, const Source& source, double smallest, double& left);
    template <typename Row>
    void ask_row(const Row& row, double trust, double smallest, double& left);
    const float* probabilities_after(const Candidates& candidates, int64_t head,
                                     int32_t parent) const;
    void ask_head(const Candidates& candidates, int64_t head, int32_t parent, double left,
                  double most);

    BestFirstTree tree_;
    View sources_[kMaxSources];  // in the order in which they are believed
    Kind kinds_[kMaxSources];
    int32_t answer_order_ = kNone;  // length of the context that is the job's answer so far
    int32_t num_sources_ = 0;
    int32_t last_[4] = {};  // the last tokens of the text, kAnyToken before its first
    // Where a node is expanded: contexts of the last one to three tokens; what is likely after the
    // last token's siblings, and in its place.
    const RecycledContext* recycled_[4] = {};  // by their length
    std::vector<Successor> siblings_, guesses_;
    std::vector<std::array<int32_t, 3>> contexts_of_rows_;
    std::vector<Contexts> contexts_;  // root's, then one row a node; num_sources_ a row
    Successors successors_;
};

}  // namespace ngram
