// Successors that the model itself named: its argmax after the nodes of earlier trees, rejected ones
// included, by the last two tokens and by the last one. The readable twin is recycled.py.
//
// Source: Luo et al., "Turning Trash into Treasure: Accelerating Inference of Large Language Models
// with Token Recycling" (2024), section 3; there the table is keyed by one token.
#pragma once

#include <algorithm>
#include <vector>

#include "index.hpp"

namespace ngram {

constexpr int kRecycledSuccessors = 4;
constexpr int kRecycledWays = 4;  // contexts that share a bucket; the oldest makes room
constexpr int kMaxRecycledCount = 6;  // then all are halved, so that the latest count more
constexpr int32_t kAnyToken = -1;  // in place of the first token: a context of one

// A context of one scope (a cache salt and adapter), and its successors.
struct RecycledContext {
    int32_t scope, before, last;
    uint8_t counts[kRecycledSuccessors];  // largest first, of equals the latest; 0 from the end on
    int32_t successors[kRecycledSuccessors];

    bool is(int32_t of_scope, int32_t first, int32_t second) const {
        return counts[0] != 0 && last == second && before == first && scope == of_scope;
    }
};
static_assert(sizeof(RecycledContext) == 32, "a bucket is two cache lines");

// A table of fixed size.
class RecycledTable {
   public:
    // Room for 2^size_log2 contexts, at least one bucket.
    explicit RecycledTable(int32_t size_log2)
        : contexts_(size_t{1} << size_log2), bucket_mask_(contexts_.size() / kRecycledWays - 1) {}

    const RecycledContext* find(int32_t scope, int32_t before, int32_t last) const {
        const RecycledContext* bucket = &contexts_[bucket_of(scope, before, last)];
        for (int i = 0; i < kRecycledWays; ++i)
            if (bucket[i].is(scope, before, last)) return &bucket[i];
        return nullptr;
    }

    // `successor` follows `before`, `last`. As in Kneser-Ney smoothing, the shorter context counts
    // the different longer ones.
    void observe(int32_t scope, int32_t before, int32_t last, int32_t successor) {
        if (count(scope, before, last, successor)) count(scope, kAnyToken, last, successor);
    }

   private:
    size_t bucket_of(int32_t scope, int32_t before, int32_t last) const {
        const uint32_t pair = hash_edge(before, last);
        return (hash_edge(static_cast<int32_t>(pair), scope) & bucket_mask_) * kRecycledWays;
    }

    // Returns whether the successor is new there.
    bool count(int32_t scope, int32_t before, int32_t last, int32_t successor) {
        RecycledContext* bucket = &contexts_[bucket_of(scope, before, last)];
        int way = 0;
        while (way < kRecycledWays - 1 && !bucket[way].is(scope, before, last)) ++way;
        if (!bucket[way].is(scope, before, last))
            bucket[way] = {scope, before, last, {}, {}};
        std::rotate(bucket, bucket + way, bucket + way + 1);  // the latest first
        return add(bucket[0], successor);
    }

    static bool add(RecycledContext& context, int32_t successor) {
        int place = 0;
        while (place < kRecycledSuccessors - 1 && context.counts[place] != 0 &&
               context.successors[place] != successor)
            ++place;
        const bool is_new = context.counts[place] == 0 || context.successors[place] != successor;
        int count = is_new ? 1 : context.counts[place] + 1;
        if (count > kMaxRecycledCount) {
            for (uint8_t& each : context.counts) each /= 2;
            count /= 2;
        }
        for (; place > 0 && context.counts[place - 1] <= count; --place) {
            context.counts[place] = context.counts[place - 1];
            context.successors[place] = context.successors[place - 1];
        }
        context.counts[place] = static_cast<uint8_t>(count);
        context.successors[place] = successor;
        return is_new;
    }

    std::vector<RecycledContext> contexts_;
    size_t bucket_mask_;
};

}  // namespace ngram
