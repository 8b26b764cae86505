#include "draft.hpp"

#include <algorithm>

namespace ngram {
namespace {

// A blend ends when no more probability than this is left to give.
constexpr double kMinLeft = 1e-4;

// `cut` is the probability below which a successor cannot be chosen any more. A blend also ends
// when less than this part of it is left, and leaves out shares smaller than that part.
constexpr double kCutLeft = 0.5;
constexpr double kCutShare = 0.25;

// See PATH_TRUST in constants.py.
constexpr double kPathTrust = 0.4;

}  // namespace

void Drafter::draft(const View* sources, int32_t num_sources, const Blend& scoring,
                    const int32_t* tokens, int64_t num_tokens, const Limits& limits) {
    tree_.begin(limits);
    contexts_.resize(kMaxSources);
    for (int32_t s = 0; s < num_sources; ++s)
        match_suffix(sources[s], tokens, num_tokens, contexts_[s]);
    predict(sources, num_sources, scoring, contexts_.data(), tree_.bound());
    discover(1.0, kNone, 1);
    while (tree_.choose()) {
        if (!tree_.may_grow()) continue;
        const Guess& guess = tree_.newest();
        const size_t row = static_cast<size_t>(tree_.size()) * kMaxSources;
        if (contexts_.size() < row + kMaxSources) contexts_.resize(row + kMaxSources);
        const Contexts* from = &contexts_[static_cast<size_t>(guess.parent + 1) * kMaxSources];
        Contexts* to = &contexts_[row];
        for (int32_t s = 0; s < num_sources; ++s)
            advance(sources[s], from[s], guess.token, to[s]);
        predict(sources, num_sources, scoring, to, tree_.bound() / guess.probability);
        discover(guess.probability, tree_.size() - 1, guess.depth + 1);
    }
}

const Match* Drafter::longest_match(int32_t source, int32_t min_length) const {
    const Contexts& contexts = contexts_[source];
    return contexts.size > min_length ? &contexts.matches[contexts.size - 1] : nullptr;
}

// Fills successors_ with the likeliest next tokens: every context length of every source has its
// say, the longest first, and passes on what it is not sure of.
void Drafter::predict(const View* sources, int32_t num_sources, const Blend& scoring,
                      const Contexts* contexts, double cut) {
    successors_.clear();
    int32_t longest = 0;
    for (int32_t s = 0; s < num_sources; ++s) longest = std::max(longest, contexts[s].size - 1);
    double left = 1.0;
    const double min_left = std::max(kMinLeft, kCutLeft * cut);
    for (int32_t order = longest; order >= 0 && left >= min_left; --order) {
        for (int32_t s = 0; s < num_sources; ++s) {
            if (order >= contexts[s].size) continue;
            left = successors_.blend(sources[s], contexts[s].matches[order],
                                     s == 0 ? scoring.own_concentration
                                            : scoring.shared_concentration,
                                     s == 0 ? scoring.own_discount : scoring.shared_discount, left,
                                     kCutShare * cut);
        }
    }
}

// The successors become known as children of a node.
void Drafter::discover(double above, int32_t parent, int32_t depth) {
    for (const Successor& successor : successors_) {
        double probability = successor.probability;
        if (depth > 1) probability *= (1.0 + kPathTrust) / (1.0 + kPathTrust * probability);
        tree_.discover(probability * above, successor.token, parent, depth);
    }
}

}  // namespace ngram
