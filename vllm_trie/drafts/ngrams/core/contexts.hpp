// The contexts of every length that end at one point of a text, and how they grow by a token.
#pragma once

#include <algorithm>

#include "index.hpp"

namespace ngram {

// A context of one length in one source: an n-gram that occurred there.
struct Match {
    int32_t node;  // kNone: it occurred once and is no node, read on in the text
    int32_t doc;   // of its one occurrence
    int32_t pos;   // of that occurrence's last token; kNone if it occurred more often
};

// By length: 0 is the empty context. If a context occurred, so did all shorter ones.
struct Contexts {
    int32_t size;
    Match matches[kMaxOrder + 1];

    void begin() {
        matches[0] = {kRoot, kNone, kNone};
        size = 1;
    }
};

// Follow a match by one token; false if that never occurred.
inline bool follow(const View& source, const Match& from, int32_t token, Match& to) {
    if (from.pos != kNone) {
        // It occurred once: read on in its text.
        if (source.token_after(from.doc, from.pos) != token) return false;
        to = {kNone, from.doc, from.pos + 1};
        return true;
    }
    const int32_t child = source.find(from.node, token);
    if (child == kNone) return false;
    to = {child, source.nodes[child].doc, source.nodes[child].pos};
    return true;
}

// The contexts that end one token later.
inline void advance(const View& source, const Contexts& from, int32_t token, Contexts& to) {
    to.begin();
    const int32_t count = std::min(from.size, source.max_order);
    for (int32_t order = 0; order < count; ++order)
        if (from.matches[order].pos == kNone) source.prefetch(from.matches[order].node, token);
    for (int32_t order = 0; order < count; ++order) {
        if (!follow(source, from.matches[order], token, to.matches[to.size])) return;
        ++to.size;
    }
}

// The contexts at the end of `tokens`.
inline void match_suffix(const View& source, const int32_t* tokens, int64_t num_tokens,
                         Contexts& contexts) {
    contexts.begin();
    const int64_t longest = std::min<int64_t>(source.max_order, num_tokens);
    for (int64_t length = 1; length <= longest; ++length) {
        Match match = contexts.matches[0];
        for (int64_t i = num_tokens - length; i < num_tokens; ++i)
            if (!follow(source, match, tokens[i], match)) return;
        contexts.matches[contexts.size++] = match;
    }
}

}  // namespace ngram
