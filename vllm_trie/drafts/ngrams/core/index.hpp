// The n-gram index: a trie of all n-grams of some texts, with the counts that a blend needs. The
// readable twin is tests/oracles/ngrams/index.py; both make the same trees, bit for bit.
//
// Two things keep it small and fast:
//  - An n-gram that occurred once has no children. Its successors are read from the text at
//    (doc, pos) instead, and are entered when it occurs for the second time. Text that never
//    repeats costs one node a token.
//  - Children are a linked list whose first kMaxHot entries are the likeliest, in order. Reading
//    the best successors of a context never walks further.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

namespace ngram {

constexpr int kMaxHot = 32;    // successors that are kept in order, and read by a draft
constexpr int kMaxOrder = 15;  // longest context
constexpr int32_t kNone = -1;
constexpr int32_t kRoot = 0;
constexpr int64_t kReservedTokens = 64;  // more new tokens of a text get their room at once

// The n-gram that begins with the path of `parent` and ends with `token`: the part drafts read.
struct alignas(32) Node {
    int32_t token;
    int32_t parent;
    int32_t first_child;
    int32_t next;          // sibling
    int32_t types;         // distinct tokens before it (Kneser-Ney); occurrences at the top order
    int32_t num_children;
    int32_t pos;           // position of its last token in `doc` while it occurred once, else kNone
    union {
        int32_t child_types;  // sum of `types` over the children, once it has children
        int32_t doc;          // the text of its one occurrence, before
    };
};
static_assert(sizeof(Node) == 32, "two to a cache line; files of archives hold them like this");

// Members that only changes to the index need.
struct Upkeep {
    int32_t prev;      // sibling
    int32_t hot_tail;  // last child that is kept in order
    int32_t count;     // occurrences
    int32_t last_doc;  // text of its last occurrence
    bool is_hot;       // whether its parent keeps it in order
};

struct Text {
    const int32_t* tokens;
    int32_t size;
};

inline uint32_t hash_edge(int32_t parent, int32_t token) {
    uint64_t key = (static_cast<uint64_t>(static_cast<uint32_t>(parent)) << 32) |
                   static_cast<uint32_t>(token);
    key *= 0x9E3779B97F4A7C15ull;
    key ^= key >> 29;
    key *= 0xBF58476D1CE4E5B9ull;
    return static_cast<uint32_t>(key >> 32);
}

// An index as a draft reads it, in memory or in a mapped file.
struct View {
    const Node* nodes;
    const int32_t* table;  // open addressing, linear probing; kNone is free
    uint32_t table_mask;
    const Text* texts;
    int32_t max_order;

    int32_t find(int32_t parent, int32_t token) const {
        for (uint32_t slot = hash_edge(parent, token) & table_mask;;
             slot = (slot + 1) & table_mask) {
            int32_t id = table[slot];
            if (id == kNone) return kNone;
            if (nodes[id].parent == parent && nodes[id].token == token) return id;
        }
    }

    // Fetches what find() will read.
    void prefetch(int32_t parent, int32_t token) const {
        __builtin_prefetch(&table[hash_edge(parent, token) & table_mask]);
    }

    // The token after position `pos`, kNone at the end of a text.
    int32_t token_after(int32_t doc, int32_t pos) const {
        const Text& text = texts[doc];
        return pos + 1 < text.size ? text.tokens[pos + 1] : kNone;
    }
};

class Index {
   public:
    explicit Index(int32_t max_order) : max_order_(max_order) { clear(); }

    void clear() {
        nodes_.clear();
        upkeep_.clear();
        free_nodes_.clear();
        owned_.clear();
        texts_.clear();
        states_.clear();
        free_docs_.clear();
        table_.assign(256, kNone);
        num_entries_ = 0;
        num_tokens_ = 0;
        new_node(kNone, kNone, kNone, kNone);
        nodes_[kRoot].child_types = 0;
    }

    View view() const {
        return {nodes_.data(), table_.data(), static_cast<uint32_t>(table_.size() - 1),
                texts_.data(), max_order_};
    }

    int64_t num_tokens() const { return num_tokens_; }
    int32_t num_nodes() const { return static_cast<int32_t>(nodes_.size() - free_nodes_.size()); }

    // Give `doc` the tokens [first, first + size): append what is new. Where they do not continue
    // it, begin it anew with them.
    void synchronize(int32_t doc, int64_t first, const int32_t* tokens, int64_t size);
    // A new, empty text. Returns its number.
    int32_t begin_text();
    // A new text that continues text 0, which ends with `context`: its n-grams may begin there, and
    // count from the next token on. Returns its number. `size` is at most the longest context.
    int32_t begin_branch(const int32_t* context, int32_t size);
    // Append a token to a text; a negative one separates: no n-gram spans it.
    void append(int32_t doc, int32_t token);
    void reserve(int32_t doc, int64_t num_tokens);
    // Take a text out again, as if it had never been added. No branch may continue it.
    void remove_text(int32_t doc);
    // Take out what is behind the first `size` tokens of a text, which takes none any more.
    void shorten(int32_t doc, int32_t size);
    bool has_text(int32_t doc) const {
        return doc >= 0 && doc < static_cast<int32_t>(owned_.size()) && texts_[doc].size > 0;
    }
    int32_t size(int32_t doc) const { return texts_[doc].size; }
    int32_t last_text(int32_t node) const { return upkeep_[node].last_doc; }
    const std::vector<Node>& nodes() const { return nodes_; }
    const std::vector<int32_t>& table() const { return table_; }

   private:
    // What the next token of a text needs.
    struct State {
        std::vector<int32_t> open;  // known contexts that end at the text's end, longest first
        int64_t first = 0;          // place in the request's text of the first token kept
        int32_t context_size = 0;   // leading tokens that belong to the text it continues
    };

    int32_t new_node(int32_t parent, int32_t token, int32_t doc, int32_t pos);
    int32_t add_child(int32_t parent, int32_t token, int32_t doc, int32_t pos);
    void remove_node(int32_t id);
    void insert_entry(int32_t id);
    void place_entry(int32_t id);
    void erase_entry(int32_t id);
    void grow_table();
    void join(int32_t parent, int32_t prev, int32_t next);
    void unlink(int32_t id);
    void link_between(int32_t prev, int32_t id, int32_t next);
    void move_up(int32_t id);
    void move_down(int32_t id);
    void one_more_type(int32_t id);
    void one_type_less(int32_t id);
    void enter_successor(int32_t id);
    int32_t length(int32_t id) const;

    int32_t max_order_;
    std::vector<Node> nodes_;
    std::vector<Upkeep> upkeep_;
    std::vector<int32_t> free_nodes_;
    std::vector<int32_t> table_;
    int64_t num_entries_ = 0;
    int64_t num_tokens_ = 0;
    std::vector<std::vector<int32_t>> owned_;
    std::vector<Text> texts_;
    std::vector<State> states_;  // of each text
    std::vector<int32_t> free_docs_;
    std::vector<int32_t> next_open_;
};

}  // namespace ngram
