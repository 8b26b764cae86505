#include "select.hpp"

namespace medusa {
namespace {

// Constants of the blend: constants.py, which native.py defines for the compiler.
constexpr double kConcentration = MEDUSA_CONCENTRATION, kDiscount = MEDUSA_DISCOUNT;
constexpr double kMinLeft = MEDUSA_MIN_LEFT;
constexpr int32_t kMinOrder = MEDUSA_MIN_ORDER;

}  // namespace

ngram::BestFirstTree& Selector::select(const Job& job, const int32_t* tokens,
                                       const Candidates& candidates) {
    tree_.begin(job.limits);
    if (contexts_.empty()) contexts_.resize(1);
    if (job.own != nullptr) {
        job.own->synchronize(tokens, job.num_tokens);
        ngram::match_suffix(job.own->view(), tokens, job.num_tokens, contexts_[0]);
    }
    expand(job.own, candidates, 1.0, ngram::kNone, 1);
    while (tree_.choose()) {
        if (!tree_.may_grow()) continue;
        const ngram::Guess& guess = tree_.newest();
        const int32_t count = tree_.size();
        if (job.own != nullptr) {
            if (contexts_.size() <= static_cast<size_t>(count)) contexts_.resize(count + 1);
            ngram::advance(job.own->view(), contexts_[guess.parent + 1], guess.token,
                           contexts_[count]);
        }
        expand(job.own, candidates, guess.probability, count - 1, guess.depth + 1);
    }
    return tree_;
}

// The children of a node become known: what the text says, then the heads.
void Selector::expand(const ngram::Index* text, const Candidates& candidates, double above,
                      int32_t parent, int32_t depth) {
    successors_.clear();
    double left = 1.0;
    if (text != nullptr) {
        const ngram::Contexts& contexts = contexts_[parent + 1];
        for (int32_t order = contexts.size - 1; order >= kMinOrder; --order)
            left = successors_.blend(text->view(), contexts.matches[order], kConcentration,
                                     kDiscount, left, 0.0);
    }
    const bool knows_none = successors_.size() == 0;
    if (depth <= candidates.num_heads && left >= kMinLeft) {
        const int64_t row = (depth - 1) * candidates.num_candidates;
        for (int64_t i = row; i < row + candidates.num_candidates; ++i) {
            const int32_t token = candidates.tokens[i];
            const double share = left * static_cast<double>(candidates.probabilities[i]);
            // The rest is no likelier; but the text's own successors get their part of it.
            const bool is_hopeless = tree_.is_hopeless(above * share);
            if (is_hopeless && knows_none) break;
            ngram::Successor* known = knows_none ? nullptr : successors_.find(token);
            if (known != nullptr)
                known->probability += share;
            else if (!is_hopeless)
                successors_.append(token, share);
        }
    }
    for (const ngram::Successor& successor : successors_) {
        // Where the text is asked if it is chosen.
        if (text != nullptr) text->view().prefetch(ngram::kRoot, successor.token);
        tree_.discover(above * successor.probability, successor.token, parent, depth);
    }
}

}  // namespace medusa
