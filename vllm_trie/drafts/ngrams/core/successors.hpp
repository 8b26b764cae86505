// The tokens that may come next, and the shares of probability that contexts give them.
#pragma once

#include <vector>

#include "contexts.hpp"
#include "recycled.hpp"

namespace ngram {

constexpr int kMaxSources = 3;  // the request's own text, the store, the archive

// The counted successors of a context.
class Counted {
   public:
    // Of no context.
    Counted() = default;
    Counted(const View& source, const Match& match) : source_(&source) {
        if (match.pos != kNone) {
            only_ = source.token_after(match.doc, match.pos);
            total_ = num_successors_ = only_ >= 0 ? 1 : 0;
        } else {
            node_ = match.node;
            total_ = source.nodes[node_].num_children == 0 ? 0 : source.nodes[node_].child_types;
            num_successors_ = source.nodes[node_].num_children;
        }
    }
    // Sum of the counts.
    int32_t total() const { return total_; }
    int32_t size() const { return num_successors_; }

    // Calls visit(token, count) for the likeliest, in order, until it returns false.
    template <typename Visit>
    void likeliest(Visit visit) const {
        if (node_ == kNone) {
            if (num_successors_ > 0) visit(only_, 1);
        } else {
            int32_t child = source_->nodes[node_].first_child;
            for (int i = 0; i < kMaxHot && child != kNone; ++i) {
                const Node& successor = source_->nodes[child];
                if (!visit(successor.token, successor.types)) return;
                child = successor.next;
            }
        }
    }

   private:
    const View* source_ = nullptr;
    int32_t node_ = kNone;  // kNone: it occurred once
    int32_t only_ = kNone;
    int32_t total_ = 0, num_successors_ = 0;
};

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

   private:
    // At most those of all contexts of all sources; anything else is found only behind these.
    static constexpr size_t kMaxFound =
        kMaxSources * (kMaxOrder + 1) * kMaxHot + 4 * kRowTokens;
    static constexpr size_t kSlots = 1024;
    static_assert(kMaxFound < INT16_MAX, "slots are narrow, so that few cache lines hold them");

    // The first successor of a class of tokens; the few others are found one by one.
    int16_t& slot(int32_t token) { return slots_[static_cast<uint32_t>(token) % kSlots]; }

    std::vector<Successor> items_;
    std::vector<int16_t> slots_ = std::vector<int16_t>(kSlots, kNone);
};

}  // namespace ngram
