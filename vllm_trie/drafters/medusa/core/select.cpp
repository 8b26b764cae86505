// Chooses the nodes of a dynamic tree from the heads' candidates, best first; with a text, the
// heads' probabilities are blended into what the text says. The readable twin is selection.py; both
// make the same trees, bit for bit.
//
// Nothing throws across the C interface: what runs out of memory returns an error instead.

#include <algorithm>
#include <functional>
#include <new>
#include <vector>

#include "../../ngram_trie/core/index.hpp"

using ngram::Index;
using ngram::kNone;
using ngram::kRoot;
using ngram::Node;
using ngram::View;

namespace {

// What is left for the heads below this is not worth a look.
constexpr double kMinLeft = 1e-6;

}  // namespace

extern "C" {

// Constants of the blend, see constants.py.
struct MedusaScoring {
    double concentration;
    double discount;
    int32_t min_order;  // shorter contexts have no say
};

// One request of a batch.
struct MedusaJob {
    Index* own;               // null: the product of the heads alone
    const int32_t* tokens;
    int64_t num_tokens;
    const int32_t* head_tokens;  // [num_heads, num_candidates], each row likeliest first
    const float* head_probabilities;
    int64_t num_heads;
    int64_t num_candidates;
    int64_t max_nodes;
    int64_t max_depth;
    int64_t chain_only;
};
static_assert(sizeof(MedusaJob) == 10 * sizeof(int64_t), "native.py packs them as integers");

}  // extern "C"

namespace {

// The n-gram that ends at one point, as a node or, past the end of the nodes, as a place.
struct Match {
    int32_t node, doc, pos;
};

struct Contexts {
    int32_t size;  // contexts of 0 ... size - 1 tokens
    Match matches[ngram::kMaxOrder + 1];
};

struct Guess {
    double probability;
    int32_t tick;  // order of discovery, breaks ties
    int32_t token, parent, depth;
};

struct Successor {
    int32_t token;
    double probability;
};

bool less_likely(const Guess& a, const Guess& b) {
    return a.probability < b.probability || (a.probability == b.probability && a.tick > b.tick);
}

// Bring a request's index up to date: it may know a beginning of the tokens, or other ones.
void synchronize(Index& index, const int32_t* tokens, int64_t size) {
    if (index.is_empty()) index.begin_text();
    const std::vector<int32_t>* text = &index.text(0);
    const int64_t known = static_cast<int64_t>(text->size());
    if (known > size || std::memcmp(text->data(), tokens, known * sizeof(int32_t)) != 0) {
        index.clear();
        index.begin_text();
        text = &index.text(0);
    }
    const int64_t first = static_cast<int64_t>(text->size());
    if (first == 0) index.reserve(static_cast<int32_t>(size));
    for (int64_t i = first; i < size; ++i) index.append(tokens[i]);
}

bool step(const View& view, const Match& from, int32_t token, Match& to) {
    if (from.node == kNone || view.nodes[from.node].pos != kNone) {
        // It occurred once: read on in the text.
        const int32_t doc = from.node == kNone ? from.doc : view.nodes[from.node].doc;
        const int32_t pos = from.node == kNone ? from.pos : view.nodes[from.node].pos;
        if (view.token_after(doc, pos) != token) return false;
        to = {kNone, doc, pos + 1};
        return true;
    }
    const int32_t child = view.find(from.node, token);
    if (child == kNone) return false;
    to = {child, view.nodes[child].doc, view.nodes[child].pos};
    return true;
}

void match_suffix(const View& view, const int32_t* tokens, int64_t num_tokens,
                  Contexts& contexts) {
    contexts.size = 1;
    contexts.matches[0] = {kRoot, kNone, kNone};
    const int64_t longest = std::min<int64_t>(view.max_order, num_tokens);
    for (int64_t length = 1; length <= longest; ++length) {
        Match match = {kRoot, kNone, kNone};
        for (int64_t i = num_tokens - length; i < num_tokens; ++i)
            if (!step(view, match, tokens[i], match)) return;
        contexts.matches[contexts.size++] = match;
    }
}

void advance(const View& view, const Contexts& from, int32_t token, Contexts& to) {
    to.size = 1;
    to.matches[0] = {kRoot, kNone, kNone};
    const int32_t count = std::min(from.size, view.max_order);
    for (int32_t order = 0; order < count; ++order) {
        if (!step(view, from.matches[order], token, to.matches[to.size])) return;
        ++to.size;
    }
}

class Selector {
   public:
    void select(const MedusaJob& job, const MedusaScoring& scoring) {
        heap_.clear();
        best_.clear();
        chosen_.clear();
        ticks_ = 0;
        if (job.own != nullptr) {
            synchronize(*job.own, job.tokens, job.num_tokens);
            contexts_.resize(static_cast<size_t>(job.max_nodes) + 1);
            match_suffix(job.own->view(), job.tokens, job.num_tokens, contexts_[0]);
        }
        expand(job, scoring, 0, 1.0, kNone, 1);
        while (!heap_.empty() && static_cast<int32_t>(chosen_.size()) < job.max_nodes) {
            std::pop_heap(heap_.begin(), heap_.end(), less_likely);
            const Guess guess = heap_.back();
            heap_.pop_back();
            chosen_.push_back(guess);
            if (job.chain_only) {
                heap_.clear();
                best_.clear();
            }
            const auto count = static_cast<int32_t>(chosen_.size());
            if (guess.depth >= job.max_depth || count == job.max_nodes) continue;
            if (job.own != nullptr)
                advance(job.own->view(), contexts_[guess.parent + 1], guess.token,
                        contexts_[count]);
            expand(job, scoring, count, guess.probability, count - 1, guess.depth + 1);
        }
        lay_out();
    }

    std::vector<int32_t> token_ids, parents;
    std::vector<float> probabilities;

   private:
    // Discover the children of a node: what the text says, then the heads.
    void expand(const MedusaJob& job, const MedusaScoring& scoring, int32_t context, double above,
                int32_t parent, int32_t depth) {
        const size_t limit = static_cast<size_t>(job.max_nodes);
        successors_.clear();
        double left = 1.0;
        if (job.own != nullptr) left = blend(job.own->view(), contexts_[context], scoring);
        const int32_t known = static_cast<int32_t>(successors_.size());
        if (depth <= job.num_heads && left >= kMinLeft) {
            const size_t row = static_cast<size_t>(depth - 1) * job.num_candidates;
            const int32_t* tokens = job.head_tokens + row;
            const float* shares = job.head_probabilities + row;
            for (int32_t i = 0; i < job.num_candidates; ++i) {
                const double share = left * static_cast<double>(shares[i]);
                // The rest is no likelier; but the text's own successors get their part of it.
                const bool hopeless = best_.size() == limit && above * share <= best_.front();
                if (hopeless && known == 0) break;
                bool is_known = hopeless;
                for (int32_t j = 0; j < known; ++j) {
                    if (successors_[j].token == tokens[i]) {
                        successors_[j].probability += share;
                        is_known = true;
                        break;
                    }
                }
                if (!is_known) successors_.push_back({tokens[i], share});
            }
        }
        for (const Successor& successor : successors_)
            push({above * successor.probability, ticks_++, successor.token, parent, depth}, limit);
    }

    // The text's share of the probability of each successor; returns what it leaves to the heads.
    double blend(const View& view, const Contexts& contexts, const MedusaScoring& scoring) {
        const double concentration = scoring.concentration, discount = scoring.discount;
        double left = 1.0;
        for (int32_t order = contexts.size - 1; order >= scoring.min_order; --order) {
            const Match& match = contexts.matches[order];
            if (match.node == kNone || view.nodes[match.node].pos != kNone) {
                const int32_t doc = match.node == kNone ? match.doc : view.nodes[match.node].doc;
                const int32_t pos = match.node == kNone ? match.pos : view.nodes[match.node].pos;
                const int32_t token = view.token_after(doc, pos);
                if (token < 0) continue;
                const double total = 1.0 + concentration;
                add(token, left * (1.0 - discount) / total);
                left = left * (concentration + discount) / total;
                continue;
            }
            const Node& node = view.nodes[match.node];
            if (node.num_children == 0) continue;
            const double total = node.child_types + concentration;
            int32_t child = node.first_child;
            for (int32_t i = 0; i < ngram::kMaxHot && child != kNone; ++i) {
                const Node& successor = view.nodes[child];
                add(successor.token, left * (successor.types - discount) / total);
                child = successor.next;
            }
            left = left * (concentration + discount * node.num_children) / total;
        }
        return left;
    }

    void add(int32_t token, double probability) {
        for (Successor& successor : successors_) {
            if (successor.token == token) {
                successor.probability += probability;
                return;
            }
        }
        successors_.push_back({token, probability});
    }

    // A guess that is behind `limit` others can never be chosen: the queue is bounded.
    void push(const Guess& guess, size_t limit) {
        if (best_.size() == limit) {
            if (guess.probability <= best_.front()) return;
            std::pop_heap(best_.begin(), best_.end(), std::greater<>());
            best_.back() = guess.probability;
        } else {
            best_.push_back(guess.probability);
        }
        std::push_heap(best_.begin(), best_.end(), std::greater<>());
        heap_.push_back(guess);
        std::push_heap(heap_.begin(), heap_.end(), less_likely);
    }

    // Depth-first. Nodes were chosen in order of probability, so siblings are in order already.
    void lay_out() {
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
            new_index_[node] = static_cast<int32_t>(token_ids.size());
            token_ids.push_back(guess.token);
            parents.push_back(guess.parent == kNone ? kNone : new_index_[guess.parent]);
            probabilities.push_back(static_cast<float>(std::min(guess.probability, 1.0)));
            if (next_sibling_[node] != kNone) stack_.push_back(next_sibling_[node]);
            if (first_child_[node + 1] != kNone) stack_.push_back(first_child_[node + 1]);
        }
    }

    std::vector<Contexts> contexts_;  // of the last committed token, then one a chosen node
    std::vector<Successor> successors_;
    std::vector<Guess> heap_, chosen_;
    std::vector<double> best_;  // the largest probabilities pushed so far, a min-heap
    int32_t ticks_ = 0;
    std::vector<int32_t> stack_, new_index_, first_child_, next_sibling_;
};

}  // namespace

extern "C" {

Index* medusa_index_new(int32_t max_order) {
    if (max_order < 1 || max_order > ngram::kMaxOrder) return nullptr;
    try {
        return new Index(max_order);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

void medusa_index_free(Index* index) { delete index; }

// Select for a batch. trees: for each job the number of nodes, and then three times `stride`
// entries: tokens, parents and probabilities (as floats). Returns 0, or kNone without memory.
int32_t medusa_select(const MedusaJob* jobs, int32_t num_jobs, const MedusaScoring* scoring,
                      int32_t stride, int32_t* trees) {
    static thread_local Selector selector;
    try {
        for (int32_t i = 0; i < num_jobs; ++i) {
            selector.select(jobs[i], *scoring);
            const size_t count = selector.token_ids.size();
            *trees++ = static_cast<int32_t>(count);
            if (count) {
                std::memcpy(trees, selector.token_ids.data(), count * sizeof(int32_t));
                std::memcpy(trees + stride, selector.parents.data(), count * sizeof(int32_t));
                std::memcpy(trees + 2 * static_cast<size_t>(stride),
                            selector.probabilities.data(), count * sizeof(float));
            }
            trees += 3 * static_cast<size_t>(stride);
        }
        return 0;
    } catch (const std::bad_alloc&) {
        return kNone;
    }
}

}  // extern "C"
