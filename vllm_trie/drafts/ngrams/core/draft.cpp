#include "draft.hpp"

#include <algorithm>

namespace ngram {
namespace {

template <typename T>
T take(const char*& bytes) {
    T value;
    std::memcpy(&value, bytes, sizeof(value));
    bytes += sizeof(value);
    return value;
}

template <typename T>
const T* take_array(const char*& bytes, int64_t count) {
    const auto* values = reinterpret_cast<const T*>(bytes);
    bytes += sizeof(T) * count;
    return values;
}

constexpr double kMostClaimed = 0.98;
// Lengths of the text's contexts before which the row of a context of 1, 2 or 3 tokens is asked.
constexpr int32_t kAskedBefore[4] = {0, 1, 4, 4};
// Tokens of a match that counts as a use of the stored text in which it was found.
constexpr int32_t kUseLength = 3;
constexpr double kLeastWeight = 0.001;  // of a sibling that is not among the likeliest

// The tokens of a context with their probabilities.
struct ContextRow {
    Successor successors[kRowTokens];
    explicit ContextRow(const RecycledContext& context) {
        for (int i = 0; i < kRowTokens; ++i)
            successors[i] = {context.tokens[i], context.probability(i)};
    }
    const Successor* begin() const { return successors; }
    const Successor* end() const { return successors + kRowTokens; }
};

// Let the text of a job go on with its row of a step's tokens; return its end. No draft follows where
// there are none.
const int32_t* go_on(DraftJob& job, const int32_t* tokens, const NewTokens& step,
                     std::vector<int32_t>& text) {
    const int64_t count = step.counts[job.step_row];
    const int64_t* row = step.tokens + job.step_row * step.width;
    text.assign(tokens, tokens + job.num_tokens);
    for (int64_t i = 0; i < count; ++i) text.push_back(static_cast<int32_t>(row[i]));
    job.num_tokens += count;
    if (job.num_indexed > 0) job.num_indexed = job.num_tokens;
    job.limits.max_depth = count > 0 ? job.limits.max_depth - static_cast<int32_t>(count) : 0;
    if (count == 0) job.num_rows = 0;
    job.num_accepted = std::min(count, job.num_rows) - 1;
    job.last_accepted = job.num_accepted - 1;
    return text.data();
}

}  // namespace

void draft_batch(const char* batch, const NewTokens& step, int32_t* rows) {
    static thread_local Drafter drafter;
    static thread_local std::vector<int32_t> text;
    const DraftBatch head = take<DraftBatch>(batch);
    const Blend blend = take<Blend>(batch), sampled = take<Blend>(batch);
    Candidates predicted = head.candidates;
    for (int64_t i = 0; i < head.num_jobs; ++i) {
        DraftJob job = take<DraftJob>(batch);
        const int64_t num_nodes = std::max<int64_t>(job.num_rows - 1, 0);
        const auto* tokens = take_array<int32_t>(batch, job.num_tokens);
        Rows of_logits = {job.row_tokens, job.row_probabilities, nullptr, nullptr};
        if (of_logits.tokens == nullptr) {
            of_logits.tokens = take_array<int32_t>(batch, job.num_rows * kRowTokens);
            of_logits.probabilities = take_array<float>(batch, job.num_rows * kRowTokens);
        }
        of_logits.nodes = take_array<int32_t>(batch, num_nodes);
        of_logits.parents = take_array<int32_t>(batch, num_nodes);
        if (step.tokens != nullptr) tokens = go_on(job, tokens, step, text);
        BestFirstTree& tree =
            drafter.draft(job, tokens, of_logits, predicted, job.is_sampled ? sampled : blend);
        rows[0] = tree.size();
        rows[1] = drafter.used_text(job);
        int32_t* nodes = rows + 2;
        tree.lay_out(nodes, nodes + head.stride,
                     reinterpret_cast<float*>(nodes + 2 * head.stride));
        rows = nodes + 3 * head.stride;
        const int64_t count = predicted.num_candidates;
        predicted.tokens += predicted.num_heads * count;
        predicted.probabilities += predicted.num_heads * count;
        if (predicted.transitions != nullptr)
            predicted.transitions += (predicted.num_heads - 1) * count * count;
    }
}

BestFirstTree& Drafter::draft(const DraftJob& job, const int32_t* tokens, const Rows& rows,
                              const Candidates& candidates, const Blend& blend) {
    tree_.begin(job.limits, job.recycled == nullptr ? 1.0 : blend.recycled.odds);
    num_sources_ = 0;
    if (job.own != nullptr) {
        if (job.num_indexed > 0)
            job.own->synchronize(job.text, job.first, tokens, job.num_indexed);
        add_source(kOwn, job.own->view());
    }
    if (job.store != nullptr) add_source(kStore, job.store->view());
    if (job.archive != nullptr) add_source(kArchive, job.archive->view);
    if (contexts_.size() < kMaxSources) contexts_.resize(kMaxSources);
    for (int32_t s = 0; s < num_sources_; ++s)
        match_suffix(sources_[s], tokens, job.num_tokens, contexts_[s]);
    match_answer(job, tokens);
    for (int i = 0; i < 4; ++i)
        last_[i] = job.num_tokens > 3 - i ? tokens[job.num_tokens - 4 + i] : kAnyToken;
    std::fill(recycled_, recycled_ + 4, nullptr);
    take_in_rows(job, tokens, rows);
    expand(job, candidates, blend, 1.0, kNone, 1);
    while (tree_.choose()) {
        if (!tree_.may_grow()) continue;
        const Guess& guess = tree_.newest();
        const size_t row = static_cast<size_t>(tree_.size()) * num_sources_;
        if (contexts_.size() < row + num_sources_) contexts_.resize(row + num_sources_);
        const Contexts* from = contexts_after(guess.parent);
        for (int32_t s = 0; s < num_sources_; ++s)
            advance(sources_[s], from[s], guess.token, contexts_[row + s]);
        expand(job, candidates, blend, guess.probability, tree_.size() - 1, guess.depth + 1);
    }
    return tree_;
}

int32_t Drafter::used_text(const DraftJob& job) const {
    // The store is the second source: only a job with a text of its own has one.
    if (job.store == nullptr || contexts_[1].size <= kUseLength) return kNone;
    const Match& match = contexts_[1].matches[contexts_[1].size - 1];
    return match.pos != kNone ? match.doc : job.store->last_text(match.node);
}

// The stored answer to such a prompt is a context while the output repeats it from its beginning: the
// longest one, as if it began in the prompt. Behind `max_order` tokens the others are as good.
void Drafter::match_answer(const DraftJob& job, const int32_t* tokens) {
    answer_order_ = kNone;
    if (job.store == nullptr || job.output_begin < 0 || !job.store->has_text(job.answer)) return;
    const int64_t length = job.num_tokens - job.output_begin;
    const Text& text = sources_[1].texts[job.answer];
    if (length < 1 || length >= sources_[1].max_order || length >= text.size) return;
    if (!std::equal(text.tokens, text.tokens + length, tokens + job.output_begin)) return;
    answer_order_ = static_cast<int32_t>(length) + 1;
    contexts_[1].matches[answer_order_] = {kNone, job.answer, static_cast<int32_t>(length) - 1};
    contexts_[1].size = answer_order_ + 1;
}

// The children of a node become known: the contexts' successors, then the head's candidates.
void Drafter::expand(const DraftJob& job, const Candidates& candidates, const Blend& blend,
                     double above, int32_t parent, int32_t depth) {
    successors_.clear();
    find_recycled(job, parent);
    // A successor that is less likely cannot be chosen any more.
    const double cut = tree_.bound() / above, smallest = blend.cut_share * cut;
    const int32_t answer_order = answer_order_ == kNone ? kNone : answer_order_ + depth - 1;
    const double left = ask_contexts(blend, contexts_after(parent), answer_order,
                                     std::max(blend.min_left, blend.cut_left * cut), smallest);
    if (depth <= candidates.num_heads && left >= blend.min_left_for_heads)
        ask_head(candidates, depth - 1, parent, left, above * (1.0 + blend.path_trust));
    for (const Successor& successor : successors_) {
        double probability = successor.probability;
        if (depth > 1 && blend.path_trust > 0.0)
            probability *= (1.0 + blend.path_trust) / (1.0 + blend.path_trust * probability);
        // Where the text is asked if it is chosen.
        if (num_sources_ > 0) sources_[0].prefetch(kRoot, successor.token);
        tree_.discover(above * probability, successor.token, parent, depth);
    }
}

// Blends the contexts of all lengths and sources, the longest first: each passes on what it is not
// sure of. Returns what is left in the end.
double Drafter::ask_contexts(const Blend& blend, const Contexts* contexts, int32_t answer_order,
                             double min_left, double smallest) {
    const Recycled& trusted = blend.recycled;
    const double trust[4] = {0.0, trusted.single, trusted.pair, trusted.triple};
    int32_t longest = siblings_.empty() && guesses_.empty() ? -1 : 0;
    if (recycled_[1] != nullptr) longest = kAskedBefore[3];
    for (int32_t s = 0; s < num_sources_; ++s) longest = std::max(longest, contexts[s].size - 1);
    double left = 1.0;
    for (int32_t order = longest; order >= blend.min_order && left >= min_left; --order) {
        for (int length = 3; length > 0; --length)
            if (order == kAskedBefore[length] && recycled_[length] != nullptr)
                ask_row(ContextRow{*recycled_[length]}, trust[length], smallest, left);
        if (order == 0) {
            ask_row(siblings_, trusted.sibling, smallest, left);
            ask_row(guesses_, trusted.guess, smallest, left);
        }
        for (int32_t s = 0; s < num_sources_; ++s)
            if (order < contexts[s].size)
                ask_counted(Counted(sources_[s], contexts[s].matches[order]),
                            source_of(blend, kinds_[s], order, order == answer_order), smallest,
                            left);
    }
    return left;
}

// Successors get their parts of what is left, without those below `smallest`.
void Drafter::ask_counted(const Counted& counted, const Source& source, double smallest,
                          double& left) {
    if (counted.size() == 0) return;
    const double claimed = counted.total() - source.discount * counted.size();
    const double unit = left / (counted.total() + source.concentration);
    counted.likeliest([&](int32_t token, int32_t count) {
        const double part = unit * (count - source.discount);
        if (part < smallest) return false;
        successors_.add(token, part);
        return true;
    });
    left *= 1.0 - claimed / (counted.total() + source.concentration);
}

template <typename Row>
void Drafter::ask_row(const Row& row, double trust, double smallest, double& left) {
    double total = 0.0;
    for (const Successor& successor : row) total += successor.probability;
    if (total * trust > kMostClaimed) trust = kMostClaimed / total;
    for (const Successor& successor : row) {
        const double part = left * trust * successor.probability;
        if (part > 0.0 && part >= smallest) successors_.add(successor.token, part);
    }
    left *= 1.0 - trust * total;
}

// The last step's rows enter the table. At the root, those of the last token's siblings are asked,
// too, and the tokens that were likely in its place.
void Drafter::take_in_rows(const DraftJob& job, const int32_t* tokens, const Rows& rows) {
    siblings_.clear();
    guesses_.clear();
    const int64_t base = job.num_tokens - 1 - job.num_accepted;
    if (job.recycled == nullptr || job.num_rows == 0 || base < 1) return;
    contexts_of_rows_.resize(job.num_rows);
    for (int64_t row = 0; row < job.num_rows; ++row) {
        auto& last = contexts_of_rows_[row];
        if (row == 0) {
            for (int i = 0; i < 3; ++i) last[i] = base > 2 - i ? tokens[base - 3 + i] : kAnyToken;
        } else {
            const auto& parent = contexts_of_rows_[rows.parents[row - 1] + 1];
            last = {parent[1], parent[2], rows.nodes[row - 1]};
        }
        const float* probabilities = rows.probabilities + row * kRowTokens;
        if (last[2] >= 0 && probabilities[0] > 0.0f)
            job.recycled->add_row(job.scope, job.prompt, last.data(),
                                  rows.tokens + row * kRowTokens, probabilities);
    }
    const int32_t* likely = rows.tokens + (job.last_accepted + 1) * kRowTokens;
    const float* rates = rows.probabilities + (job.last_accepted + 1) * kRowTokens;
    for (int i = 0; i < kRowTokens; ++i)
        if (likely[i] != last_[3]) guesses_.push_back({likely[i], rates[i]});
    double total = 0.0;
    for (int64_t node = 0; node + 1 < job.num_rows; ++node) {
        if (rows.parents[node] != job.last_accepted || rows.nodes[node] == last_[3]) continue;
        const auto* at = std::find(likely, likely + kRowTokens, rows.nodes[node]);
        const double weight = kLeastWeight + (at == likely + kRowTokens ? 0.0 : rates[at - likely]);
        total += weight;
        const int64_t first = (node + 1) * kRowTokens;
        for (int64_t i = first; i < first + kRowTokens; ++i)
            siblings_.push_back({rows.tokens[i], weight * rows.probabilities[i]});
    }
    for (Successor& successor : siblings_) successor.probability /= total;
}

// Find the contexts at the end of a node's path.
void Drafter::find_recycled(const DraftJob& job, int32_t parent) {
    if (job.recycled == nullptr) return;
    int32_t path[4];  // the last tokens
    int32_t place = 3;
    for (int32_t node = parent; node != kNone && place >= 0; node = tree_.chosen(node).parent)
        path[place--] = tree_.chosen(node).token;
    for (int32_t from = 3; place >= 0; --place, --from) path[place] = last_[from];
    for (int length = 1; length <= 3; ++length)
        recycled_[length] = job.recycled->find(job.scope, job.prompt, path + 1, length);
    if (parent == kNone) return;
    siblings_.clear();
    guesses_.clear();
    const RecycledContext* previous = job.recycled->find(job.scope, job.prompt, path, 2);
    for (int i = 0; previous != nullptr && i < kRowTokens; ++i)
        if (previous->tokens[i] != path[3])
            guesses_.push_back({previous->tokens[i], previous->probability(i)});
}

// The probabilities of a head's candidates below a node: its token's transitions, if it is a candidate
// of the head before.
const float* Drafter::probabilities_after(const Candidates& candidates, int64_t head,
                                          int32_t parent) const {
    const int64_t count = candidates.num_candidates;
    if (candidates.transitions != nullptr && head > 0) {
        const int32_t* before = candidates.tokens + (head - 1) * count;
        const int32_t* at = std::find(before, before + count, tree_.chosen(parent).token);
        if (at != before + count)
            return candidates.transitions + ((head - 1) * count + (at - before)) * count;
    }
    return candidates.probabilities + head * count;
}

// A head gets the probability that the contexts have left. The path of a child of probability p has
// at most p * most.
void Drafter::ask_head(const Candidates& candidates, int64_t head, int32_t parent, double left,
                       double most) {
    const bool knows_none = successors_.size() == 0;
    const bool is_in_order = candidates.transitions == nullptr;
    const int32_t* tokens = candidates.tokens + head * candidates.num_candidates;
    const float* probabilities = probabilities_after(candidates, head, parent);
    for (int64_t i = 0; i < candidates.num_candidates; ++i) {
        const int32_t token = tokens[i];
        const double share = left * static_cast<double>(probabilities[i]);
        // The rest is no likelier; but the text's own successors get their part of it.
        const bool is_hopeless = tree_.is_hopeless(most * share);
        if (is_hopeless && knows_none && is_in_order) break;
        Successor* known = knows_none ? nullptr : successors_.find(token);
        if (known != nullptr)
            known->probability += share;
        else if (!is_hopeless)
            successors_.append(token, share);
    }
}

}  // namespace ngram
