#include "draft.hpp"

#include <algorithm>
#include <functional>

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

void Drafter::draft(const View* sources, int32_t num_sources, const Scoring& scoring,
                    const int32_t* tokens, int64_t num_tokens, const Limits& limits) {
    const size_t max_nodes = static_cast<size_t>(limits.max_nodes);
    heap_.clear();
    best_.clear();
    chosen_.clear();
    ticks_ = 0;
    contexts_.resize((max_nodes + 1) * kMaxSources);
    for (int32_t s = 0; s < num_sources; ++s)
        match_suffix(sources[s], tokens, num_tokens, contexts_[s]);

    const auto less_likely = [](const Guess& a, const Guess& b) {
        return a.probability < b.probability ||
               (a.probability == b.probability && a.tick > b.tick);
    };
    predict(sources, num_sources, scoring, contexts_.data(), 0.0);
    push_guesses(1.0, kNone, 1, max_nodes);
    while (!heap_.empty() && chosen_.size() < max_nodes) {
        std::pop_heap(heap_.begin(), heap_.end(), less_likely);
        const Guess guess = heap_.back();
        heap_.pop_back();
        chosen_.push_back(guess);
        if (limits.chain_only) {
            heap_.clear();
            best_.clear();
        }
        if (guess.depth >= limits.max_depth || chosen_.size() == max_nodes) continue;
        const Contexts* from = &contexts_[(guess.parent + 1) * kMaxSources];
        Contexts* to = &contexts_[chosen_.size() * kMaxSources];
        for (int32_t s = 0; s < num_sources; ++s)
            advance(sources[s], from[s], guess.token, to[s]);
        const double cut = best_.size() == max_nodes ? best_.front() / guess.probability : 0.0;
        predict(sources, num_sources, scoring, to, cut);
        push_guesses(guess.probability, static_cast<int32_t>(chosen_.size()) - 1, guess.depth + 1,
                     max_nodes);
    }
    lay_out();
}

const Match* Drafter::longest_match(int32_t source, int32_t min_length) const {
    const Contexts& contexts = contexts_[source];
    return contexts.size > min_length ? &contexts.matches[contexts.size - 1] : nullptr;
}

void Drafter::match_suffix(const View& source, const int32_t* tokens, int64_t num_tokens,
                           Contexts& contexts) const {
    contexts.size = 1;
    contexts.matches[0] = {kRoot, kNone, kNone};
    const int64_t longest = std::min<int64_t>(source.max_order, num_tokens);
    for (int64_t length = 1; length <= longest; ++length) {
        Match match = {kRoot, kNone, kNone};
        for (int64_t i = num_tokens - length; i < num_tokens; ++i) {
            Contexts one, next;
            one.size = 1;
            one.matches[0] = match;
            advance(source, one, tokens[i], next);
            if (next.size < 2) return;
            match = next.matches[1];
        }
        contexts.matches[contexts.size++] = match;
    }
}

// The contexts that end one token later.
void Drafter::advance(const View& source, const Contexts& from, int32_t token,
                      Contexts& to) const {
    to.matches[0] = {kRoot, kNone, kNone};
    to.size = 1;
    const int32_t count = std::min(from.size, source.max_order);
    for (int32_t order = 0; order < count; ++order)
        if (from.matches[order].pos == kNone) source.prefetch(from.matches[order].node, token);
    for (int32_t order = 0; order < count; ++order) {
        const Match& match = from.matches[order];
        if (match.pos != kNone) {
            // It occurred once: read on in its text.
            if (source.token_after(match.doc, match.pos) != token) return;
            to.matches[to.size++] = {kNone, match.doc, match.pos + 1};
        } else {
            const int32_t child = source.find(match.node, token);
            if (child == kNone) return;
            to.matches[to.size++] = {child, source.nodes[child].doc, source.nodes[child].pos};
        }
    }
}

// Fills successors_ with the likeliest next tokens: every context length of every source has its
// say, the longest first, and passes on what it is not sure of.
void Drafter::predict(const View* sources, int32_t num_sources, const Scoring& scoring,
                      const Contexts* contexts, double cut) {
    successors_.clear();
    int32_t longest = 0;
    for (int32_t s = 0; s < num_sources; ++s) longest = std::max(longest, contexts[s].size - 1);
    double left = 1.0;
    const double min_left = std::max(kMinLeft, kCutLeft * cut);
    for (int32_t order = longest; order >= 0 && left >= min_left; --order) {
        for (int32_t s = 0; s < num_sources; ++s) {
            if (order >= contexts[s].size) continue;
            left = blend(sources[s], contexts[s].matches[order],
                         s == 0 ? scoring.own_concentration : scoring.shared_concentration,
                         s == 0 ? scoring.own_discount : scoring.shared_discount, left, cut);
        }
    }
    for (const Successor& successor : successors_) slots_[successor.token & 4095] = kNone;
}

// One context's share of the probability mass `left`; returns what remains for the others.
double Drafter::blend(const View& source, const Match& match, double concentration,
                      double discount, double left, double cut) {
    if (match.pos != kNone) {
        const int32_t token = source.token_after(match.doc, match.pos);
        if (token < 0) return left;
        const double total = 1.0 + concentration;
        const double share = left * (1.0 - discount) / total;
        if (share >= kCutShare * cut) add_successor(token, share);
        return left * (concentration + discount) / total;
    }
    const Node& node = source.nodes[match.node];
    if (node.num_children == 0) return left;
    const double total = node.child_types + concentration;
    int32_t child = node.first_child;
    for (int32_t i = 0; i < kMaxHot && child != kNone; ++i) {
        const Node& successor = source.nodes[child];
        const double share = left * (successor.types - discount) / total;
        if (share < kCutShare * cut) break;
        add_successor(successor.token, share);
        child = successor.next;
    }
    return left * (concentration + discount * node.num_children) / total;
}

void Drafter::add_successor(int32_t token, double probability) {
    // A slot names the first successor of its class; the few others are found one by one.
    int32_t& slot = slots_[token & 4095];
    if (slot != kNone) {
        for (size_t i = slot; i < successors_.size(); ++i) {
            if (successors_[i].token == token) {
                successors_[i].probability += probability;
                return;
            }
        }
    } else {
        slot = static_cast<int32_t>(successors_.size());
    }
    successors_.push_back({token, probability});
}

void Drafter::push_guesses(double above, int32_t parent, int32_t depth, size_t max_nodes) {
    const auto less_likely = [](const Guess& a, const Guess& b) {
        return a.probability < b.probability ||
               (a.probability == b.probability && a.tick > b.tick);
    };
    for (const Successor& successor : successors_) {
        double probability = successor.probability;
        if (depth > 1) probability *= (1.0 + kPathTrust) / (1.0 + kPathTrust * probability);
        probability *= above;
        const int32_t tick = ticks_++;
        // What is behind max_nodes others can never be chosen.
        if (best_.size() == max_nodes) {
            if (probability <= best_.front()) continue;
            std::pop_heap(best_.begin(), best_.end(), std::greater<>());
            best_.back() = probability;
        } else {
            best_.push_back(probability);
        }
        std::push_heap(best_.begin(), best_.end(), std::greater<>());
        heap_.push_back({probability, tick, successor.token, parent, depth});
        std::push_heap(heap_.begin(), heap_.end(), less_likely);
    }
}

// Nodes were chosen in order of probability, so siblings are in order already.
void Drafter::lay_out() {
    const int32_t count = static_cast<int32_t>(chosen_.size());
    first_child_.assign(count + 1, kNone);
    next_sibling_.assign(count, kNone);
    new_index_.resize(count);
    for (int32_t node = count - 1; node >= 0; --node) {
        int32_t& first = first_child_[chosen_[node].parent + 1];
        next_sibling_[node] = first;
        first = node;
    }
    token_ids.clear();
    parents.clear();
    probabilities.clear();
    stack_.clear();
    if (first_child_[0] != kNone) stack_.push_back(first_child_[0]);
    while (!stack_.empty()) {
        const int32_t node = stack_.back();
        stack_.pop_back();
        const Guess& guess = chosen_[node];
        new_index_[node] = num_nodes();
        token_ids.push_back(guess.token);
        parents.push_back(guess.parent == kNone ? kNone : new_index_[guess.parent]);
        probabilities.push_back(static_cast<float>(std::min(guess.probability, 1.0)));
        if (next_sibling_[node] != kNone) stack_.push_back(next_sibling_[node]);
        if (first_child_[node + 1] != kNone) stack_.push_back(first_child_[node + 1]);
    }
}

}  // namespace ngram
