// Growing a tree best-first: the likeliest node that is known is chosen, then its children become
// known. A node is at most as likely as its parent, so the chosen ones are the likeliest of all.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "index.hpp"

namespace ngram {

struct Limits {
    double min_probability;  // of a guess's path: what is less likely is left out
    int32_t max_nodes;
    int32_t max_depth;
    int32_t chain_only;
};

struct Guess {
    double probability;  // of the whole path
    int32_t tick;        // order of discovery, breaks ties
    int32_t token;
    int32_t parent;      // a chosen guess, kNone for the last committed token
    int32_t depth;
};

inline double scale_odds(double probability, double factor) {
    return factor * probability / (1.0 - probability + factor * probability);
}

class BestFirstTree {
   public:
    // The odds of each node are `odds` times what its guess had: the likeliest of many guesses are
    // overestimated.
    void begin(const Limits& limits, double odds) {
        limits_ = limits;
        limits_.min_probability = scale_odds(limits.min_probability, 1.0 / odds);
        odds_ = odds;
        max_nodes_ = limits.max_depth > 0 && limits.max_nodes > 0 ? limits.max_nodes : 0;
        ticks_ = 0;
        heap_.clear();
        best_.clear();
        chosen_.clear();
    }

    int32_t size() const { return static_cast<int32_t>(chosen_.size()); }
    // A probability below which nothing can be chosen any more; 0 while everything can.
    double bound() const {
        return is_full() ? std::max(best_.front(), limits_.min_probability)
                         : limits_.min_probability;
    }
    bool is_hopeless(double probability) const {
        return probability < limits_.min_probability ||
               (is_full() && probability <= best_.front());
    }

    // Makes a child of guess number `parent` known, unless it has no probability (or NaN).
    void discover(double probability, int32_t token, int32_t parent, int32_t depth) {
        const int32_t tick = ticks_++;
        if (!(probability > 0.0) || is_hopeless(probability)) return;
        if (is_full()) {
            std::pop_heap(best_.begin(), best_.end(), std::greater<>());
            best_.back() = probability;
        } else {
            best_.push_back(probability);
        }
        std::push_heap(best_.begin(), best_.end(), std::greater<>());
        heap_.push_back({probability, tick, token, parent, depth});
        std::push_heap(heap_.begin(), heap_.end(), less_likely);
    }

    // Chooses the likeliest known guess, which becomes number size() - 1; false if there is none.
    bool choose() {
        if (heap_.empty() || chosen_.size() >= max_nodes_) return false;
        std::pop_heap(heap_.begin(), heap_.end(), less_likely);
        chosen_.push_back(heap_.back());
        heap_.pop_back();
        if (limits_.chain_only) {
            heap_.clear();
            best_.clear();
        }
        return true;
    }
    const Guess& newest() const { return chosen_.back(); }
    const Guess& chosen(int32_t number) const { return chosen_[number]; }
    // Whether the newest guess may have children in the tree.
    bool may_grow() const {
        return chosen_.back().depth < limits_.max_depth && chosen_.size() < max_nodes_;
    }

    // Write size() nodes, depth-first with the likeliest child first. Guesses were chosen in order
    // of probability, so siblings are in order already.
    void lay_out(int32_t* token_ids, int32_t* parents, float* probabilities) {
        const int32_t count = size();
        first_child_.assign(count + 1, kNone);
        next_sibling_.resize(count);
        index_.resize(count);
        for (int32_t node = count - 1; node >= 0; --node) {
            int32_t& first = first_child_[chosen_[node].parent + 1];
            next_sibling_[node] = first;
            first = node;
        }
        int32_t written = 0;
        for (int32_t node = first_child_[0]; node != kNone;) {
            const Guess& guess = chosen_[node];
            index_[node] = written;
            token_ids[written] = guess.token;
            parents[written] = guess.parent == kNone ? kNone : index_[guess.parent];
            probabilities[written] =
                static_cast<float>(scale_odds(std::min(guess.probability, 1.0), odds_));
            ++written;
            if (first_child_[node + 1] != kNone) {
                node = first_child_[node + 1];
                continue;
            }
            // Back up to the next branch.
            while (node != kNone && next_sibling_[node] == kNone) node = chosen_[node].parent;
            if (node != kNone) node = next_sibling_[node];
        }
    }

   private:
    static bool less_likely(const Guess& a, const Guess& b) {
        return a.probability < b.probability ||
               (a.probability == b.probability && a.tick > b.tick);
    }
    bool is_full() const { return max_nodes_ > 0 && best_.size() == max_nodes_; }

    Limits limits_ = {};
    double odds_ = 1.0;
    size_t max_nodes_ = 0;
    int32_t ticks_ = 0;
    std::vector<Guess> heap_, chosen_;
    std::vector<double> best_;  // the max_nodes largest probabilities so far, a min-heap
    std::vector<int32_t> first_child_, next_sibling_, index_;
};

}  // namespace ngram
