// The tokens that may come next, and the shares of probability that contexts give them.
#pragma once

#include <vector>

#include "contexts.hpp"
#include "recycled.hpp"

namespace ngram {

constexpr int kMaxSources = 3;  // the request's own text, the store, the corpus

struct Successor {
    int32_t token;
    double probability;
};

// In the order in which they became known.
class Successors {
   public:
    void clear() {
        for (const Successor& successor : items_) slot(successor.token) = kNone;
        items_.clear();
    }
    size_t size() const { return items_.size(); }
    const Successor* begin() const { return items_.data(); }
    const Successor* end() const { return items_.data() + items_.size(); }

    // Null if the token is not among them.
    Successor* find(int32_t token) {
        const int16_t first = slot(token);
        if (first == kNone) return nullptr;
        for (size_t i = static_cast<size_t>(first); i < items_.size(); ++i)
            if (items_[i].token == token) return &items_[i];
        return nullptr;
    }

    // A token that is not among them.
    void append(int32_t token, double probability) {
        int16_t& first = slot(token);
        if (first == kNone && items_.size() < kMaxFound)
            first = static_cast<int16_t>(items_.size());
        items_.push_back({token, probability});
    }

    void add(int32_t token, double probability) {
        if (Successor* known = find(token))
            known->probability += probability;
        else
            append(token, probability);
    }

    // One context's share of the probability mass `left`, by the predictive rule of a Pitman-Yor
    // process; returns what remains for the others. A share that is smaller than `smallest` is left
    // out.
    double blend(const View& source, const Match& match, double concentration, double discount,
                 double left, double smallest) {
        if (match.pos != kNone) {
            const int32_t token = source.token_after(match.doc, match.pos);
            if (token < 0) return left;
            const double total = 1.0 + concentration;
            const double share = left * (1.0 - discount) / total;
            if (share >= smallest) add(token, share);
            return left * (concentration + discount) / total;
        }
        const Node& node = source.nodes[match.node];
        if (node.num_children == 0) return left;
        const double total = node.child_types + concentration;
        int32_t child = node.first_child;
        for (int32_t i = 0; i < kMaxHot && child != kNone; ++i) {
            const Node& successor = source.nodes[child];
            const double share = left * (successor.types - discount) / total;
            if (share < smallest) break;
            add(successor.token, share);
            child = successor.next;
        }
        return left * (concentration + discount * node.num_children) / total;
    }

    // The same for what the model named after a context; null if it never was asked there.
    double blend(const RecycledContext* context, double concentration, double discount,
                 double left, double smallest) {
        if (context == nullptr) return left;
        int num_counted = 0, num_successors = 0;
        for (; num_successors < kRecycledSuccessors; ++num_successors) {
            if (context->counts[num_successors] == 0) break;
            num_counted += context->counts[num_successors];
        }
        const double total = num_counted + concentration;
        for (int i = 0; i < num_successors; ++i) {
            const double share = left * (context->counts[i] - discount) / total;
            if (share < smallest) break;
            add(context->successors[i], share);
        }
        return left * (concentration + discount * num_successors) / total;
    }

   private:
    // At most those of all contexts of all sources; anything else is found only behind these.
    static constexpr size_t kMaxFound = kMaxSources * (kMaxOrder + 1) * kMaxHot;
    static constexpr size_t kSlots = 1024;
    static_assert(kMaxFound < INT16_MAX, "slots are narrow, so that few cache lines hold them");

    // The first successor of a class of tokens; the few others are found one by one.
    int16_t& slot(int32_t token) { return slots_[static_cast<uint32_t>(token) % kSlots]; }

    std::vector<Successor> items_;
    std::vector<int16_t> slots_ = std::vector<int16_t>(kSlots, kNone);
};

}  // namespace ngram
