// What the model itself held likely: the likeliest tokens of each row of logits that it computed,
// after rejected nodes too, by the last three, two and one tokens before the row. The readable twin
// is tests/oracles/ngrams/recycled.py.
//
// Source: Luo et al., "Turning Trash into Treasure: Accelerating Inference of Large Language Models
// with Token Recycling" (2024), section 3; there the table is keyed by one token, and its newest row
// counts.
#pragma once

#include <algorithm>
#include <vector>

#include "index.hpp"

namespace ngram {

constexpr int kRowTokens = 8;       // of a row of logits, and of a context
constexpr int32_t kAnyToken = -1;   // before a context of one token
constexpr double kLeastNews = 0.2;  // part of a row in its context's average; more in the first ones
constexpr double kUnit = 1.0 / 65535;

// A context: the last token, the one before it or kAnyToken, and where they stand.
struct ContextKey {
    int32_t within;  // 0: anywhere; a prompt: in answers to it; of three tokens, a hash of prompt and first
    int32_t before, last;
};

// A context of one scope (a cache salt and adapter): the average of its rows.
struct RecycledContext {
    ContextKey key;
    uint16_t scope;
    uint16_t num_rows;     // up to the number from which each counts kLeastNews
    int32_t next;          // with the same hash
    int32_t older, newer;  // of the scope, by their last row
    int32_t tokens[kRowTokens];  // likeliest first
    uint16_t units[kRowTokens];  // their probabilities

    bool is(int32_t of_scope, const ContextKey& sought) const {
        return key.last == sought.last && key.before == sought.before &&
               key.within == sought.within && scope == of_scope;
    }
    double probability(int i) const { return units[i] * kUnit; }
};
static_assert(sizeof(RecycledContext) == 76, "the documentation has the table's size");

// A table of bounded size. Where it is full, the context goes whose last row is the oldest of its
// scope: the writing scope, unless that has less than an equal share of the table. So nobody takes a
// context from a scope within its share. The hash has a secret key.
class RecycledTable {
   public:
    RecycledTable(int32_t max_contexts, int32_t max_scopes, const uint64_t* key)
        : key_{key[0] | 1, key[1]}, max_contexts_(max_contexts), scopes_(max_scopes) {
        size_t num_chains = 2;
        while (num_chains < static_cast<size_t>(max_contexts)) num_chains *= 2;
        chains_.assign(num_chains, kNone);
        contexts_.reserve(max_contexts);  // memory that is not touched costs nothing
    }

    // The context of the last `length` of three tokens: that of the prompt, or else, of less than
    // three, that of all prompts. Null if it has had no row.
    const RecycledContext* find(int32_t scope, int32_t prompt, const int32_t* last_three,
                                int length) const {
        if (last_three[3 - length] == kAnyToken) return nullptr;
        if (prompt != 0)
            if (const auto* context = find(scope, key_of(prompt, last_three, length)))
                return context;
        return length == 3 ? nullptr : find(scope, key_of(0, last_three, length));
    }

    // Take in a row of logits, kRowTokens each, which follows three tokens in an answer to a prompt.
    void add_row(int32_t scope, int32_t prompt, const int32_t* last_three, const int32_t* tokens,
                 const float* probabilities) {
        for (int length = prompt == 0 ? 2 : 3; length > 0; --length) {
            if (last_three[3 - length] == kAnyToken) continue;
            if (length < 3)
                add(scope, key_of(0, last_three, length), tokens, probabilities);
            if (prompt != 0)
                add(scope, key_of(prompt, last_three, length), tokens, probabilities);
        }
    }

    // Remove the contexts of a scope.
    void forget(int32_t scope) {
        while (scopes_[scope].size > 0) {
            const int32_t at = scopes_[scope].oldest;
            remove(at);
            free_.push_back(at);
        }
        num_scopes_ -= scopes_[scope].is_used;
        scopes_[scope].is_used = false;
    }

   private:
    struct Scope {
        int32_t newest = kNone, oldest = kNone, size = 0;
        bool is_used = false;
    };

    uint64_t mix(uint64_t hash, int32_t number) const {
        hash *= key_[0];
        return hash ^ (hash >> 32) ^ static_cast<uint32_t>(number);
    }

    ContextKey key_of(int32_t prompt, const int32_t* last_three, int length) const {
        if (length == 3) prompt = static_cast<int32_t>(mix(mix(key_[1], prompt), last_three[0]));
        return {prompt, length == 1 ? kAnyToken : last_three[1], last_three[2]};
    }

    size_t chain_of(int32_t scope, const ContextKey& key) const {
        const uint64_t hash =
            mix(mix(mix(key_[1] ^ static_cast<uint32_t>(scope), key.within), key.before), key.last);
        return ((hash * key_[0]) >> 32) & (chains_.size() - 1);
    }

    int32_t find_in_chain(size_t chain, int32_t scope, const ContextKey& key) const {
        int32_t at = chains_[chain];
        while (at != kNone && !contexts_[at].is(scope, key)) at = contexts_[at].next;
        return at;
    }

    const RecycledContext* find(int32_t scope, const ContextKey& key) const {
        const int32_t at = find_in_chain(chain_of(scope, key), scope, key);
        return at == kNone ? nullptr : &contexts_[at];
    }

    void add(int32_t scope, const ContextKey& key, const int32_t* tokens,
             const float* probabilities) {
        const size_t chain = chain_of(scope, key);
        int32_t at = find_in_chain(chain, scope, key);
        if (at != kNone) {
            unlink(at);
        } else {
            at = take_room(scope);
            RecycledContext& context = contexts_[at];
            context = {};
            context.key = key;
            context.scope = static_cast<uint16_t>(scope);
            context.next = chains_[chain];
            chains_[chain] = at;
        }
        link(at);
        average(contexts_[at], tokens, probabilities);
    }

    static void average(RecycledContext& context, const int32_t* tokens,
                        const float* probabilities) {
        if (context.num_rows < 1.0 / kLeastNews) ++context.num_rows;
        const double news = 1.0 / context.num_rows, rest = 1.0 - news;
        struct {
            int32_t token;
            double probability;
        } merged[2 * kRowTokens];
        int count = 0;
        if (context.num_rows > 1)
            for (; count < kRowTokens; ++count)
                merged[count] = {context.tokens[count], rest * context.probability(count)};
        const int num_known = count;
        for (int i = 0; i < kRowTokens; ++i) {
            int known = 0;
            while (known < num_known && merged[known].token != tokens[i]) ++known;
            if (known == num_known) merged[known = count++] = {tokens[i], 0.0};
            merged[known].probability += news * std::min(std::max(probabilities[i], 0.0f), 1.0f);
        }
        std::stable_sort(merged, merged + count, [](const auto& a, const auto& b) {
            return a.probability > b.probability;
        });
        for (int i = 0; i < kRowTokens; ++i) {
            context.tokens[i] = merged[i].token;
            context.units[i] = static_cast<uint16_t>(merged[i].probability / kUnit + 0.5);
        }
    }

    // An unused context. Where there is none, one is removed.
    int32_t take_room(int32_t scope) {
        if (!scopes_[scope].is_used) {
            scopes_[scope].is_used = true;
            ++num_scopes_;
        }
        if (!free_.empty()) {
            const int32_t at = free_.back();
            free_.pop_back();
            return at;
        }
        if (contexts_.size() < static_cast<size_t>(max_contexts_)) {
            contexts_.emplace_back();
            return static_cast<int32_t>(contexts_.size()) - 1;
        }
        const int32_t share = max_contexts_ / num_scopes_;
        if (scopes_[scope].size < share) {
            // There is one: if not, all would have less than their shares, and the table room.
            while (scopes_[hand_].size <= share) hand_ = (hand_ + 1) % scopes_.size();
            scope = static_cast<int32_t>(hand_);
        }
        const int32_t at = scopes_[scope].oldest;
        remove(at);
        return at;
    }

    void remove(int32_t at) {
        unlink(at);
        const RecycledContext& gone = contexts_[at];
        int32_t* link = &chains_[chain_of(gone.scope, gone.key)];
        while (*link != at) link = &contexts_[*link].next;
        *link = gone.next;
    }

    // Make a context the newest of its scope.
    void link(int32_t at) {
        RecycledContext& context = contexts_[at];
        Scope& scope = scopes_[context.scope];
        context.older = scope.newest;
        context.newer = kNone;
        (scope.newest == kNone ? scope.oldest : contexts_[scope.newest].newer) = at;
        scope.newest = at;
        ++scope.size;
    }

    void unlink(int32_t at) {
        const RecycledContext& context = contexts_[at];
        Scope& scope = scopes_[context.scope];
        (context.newer == kNone ? scope.newest : contexts_[context.newer].older) = context.older;
        (context.older == kNone ? scope.oldest : contexts_[context.older].newer) = context.newer;
        --scope.size;
    }

    uint64_t key_[2];
    int32_t max_contexts_, num_scopes_ = 0;
    size_t hand_ = 0;  // a scope that had more than its share
    std::vector<int32_t> chains_, free_;
    std::vector<RecycledContext> contexts_;
    std::vector<Scope> scopes_;
};

}  // namespace ngram
