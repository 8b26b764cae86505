// The C interface that native.py calls through ctypes.

#include <exception>

#include "draft.hpp"

using ngram::Archive;
using ngram::Index;
using ngram::kNone;
using ngram::Node;
using ngram::RecycledTable;
using ngram::View;

namespace {

// Returns the result of `work`, or kNone if it throws (out of memory, or a size that cannot be):
// nothing may throw across a C interface.
template <typename Work>
int32_t without_throwing(const Work& work) noexcept {
    try {
        return work();
    } catch (const std::exception&) {
        return kNone;
    }
}

// Returns an object made of these arguments, null without memory.
template <typename T, typename... Arguments>
T* make(Arguments... arguments) noexcept {
    try {
        return new T(arguments...);
    } catch (const std::exception&) {
        return nullptr;
    }
}

bool in_range(int64_t value, int64_t low, int64_t high) { return low <= value && value < high; }

// Whether reads stay within the arrays: every index is in its range, and every search ends.
bool is_sound(const View& view, int64_t num_nodes, int64_t table_size, int64_t num_tokens,
              int32_t vocab_size) {
    // The root is no child.
    const auto is_node_or_none = [num_nodes](int64_t id) {
        return id == kNone || in_range(id, ngram::kRoot + 1, num_nodes);
    };
    bool has_free_slot = false;
    for (int64_t slot = 0; slot < table_size; ++slot) {
        if (!is_node_or_none(view.table[slot])) return false;
        has_free_slot |= view.table[slot] == kNone;
    }
    if (!has_free_slot) return false;
    for (int64_t id = 0; id < num_nodes; ++id) {
        const Node& node = view.nodes[id];
        const bool is_root = id == ngram::kRoot;
        if (!is_root && !in_range(node.token, 0, vocab_size)) return false;
        if (!is_root && !in_range(node.parent, 0, num_nodes)) return false;
        if (!is_node_or_none(node.first_child) || !is_node_or_none(node.next)) return false;
        if (!in_range(node.pos, kNone, num_tokens)) return false;
        // In an archive the one text is number 0, so this holds for both meanings of the union.
        if (node.child_types < 0 || (node.pos != kNone && node.doc != 0)) return false;
        if (node.types < 1 || node.num_children < 0) return false;
    }
    for (int64_t i = 0; i < num_tokens; ++i)
        if (!in_range(view.texts[0].tokens[i], kNone, vocab_size)) return false;
    return true;
}

}  // namespace

// Returns null without memory or if no index can have contexts of that length.
extern "C" Index* ngram_index_new(int32_t max_order) {
    return max_order < 1 || max_order > ngram::kMaxOrder ? nullptr : make<Index>(max_order);
}

extern "C" void ngram_index_free(Index* index) { delete index; }
extern "C" int64_t ngram_index_num_tokens(const Index* index) { return index->num_tokens(); }
extern "C" int64_t ngram_index_num_nodes(const Index* index) { return index->num_nodes(); }

// Append to a text, or to a new one if it is kNone; negative tokens separate. Returns its number, or
// kNone without memory.
extern "C" int32_t ngram_index_add(Index* index, int32_t doc, const int32_t* tokens,
                                   int64_t num_tokens) {
    return without_throwing([&] {
        if (doc == kNone) doc = index->begin_text();
        index->reserve(doc, num_tokens);
        for (int64_t i = 0; i < num_tokens; ++i) index->append(doc, tokens[i]);
        return doc;
    });
}

// Begin a text after text 0, which ends with these tokens. Returns its number, or kNone without
// memory.
extern "C" int32_t ngram_index_branch(Index* index, const int32_t* context, int32_t size) {
    return without_throwing([&] { return index->begin_branch(context, size); });
}

// Take out the last tokens of a text; its number is free where none is left. Returns 0, or kNone if
// there is no such text.
extern "C" int32_t ngram_index_remove(Index* index, int32_t doc, int64_t num_tokens) {
    if (!index->has_text(doc)) return kNone;
    return without_throwing([&] {
        const int64_t size = index->size(doc) - num_tokens;
        if (size > 0) {
            index->shorten(doc, static_cast<int32_t>(size));
        } else {
            index->remove_text(doc);
        }
        return 0;
    });
}

// The arrays of an index, for writing them to a file: address and size of the nodes, then of the
// table.
extern "C" void ngram_index_arrays(const Index* index, int64_t* found) {
    found[0] = reinterpret_cast<int64_t>(index->nodes().data());
    found[1] = static_cast<int64_t>(index->nodes().size());
    found[2] = reinterpret_cast<int64_t>(index->table().data());
    found[3] = static_cast<int64_t>(index->table().size());
}

// Room for `max_contexts`, at least `max_scopes`; the key has 16 bytes. Returns null without memory.
extern "C" RecycledTable* recycled_new(int32_t max_contexts, int32_t max_scopes, const char* key) {
    uint64_t words[2];
    std::memcpy(words, key, sizeof(words));
    return make<RecycledTable>(max_contexts, max_scopes, words);
}

extern "C" void recycled_free(RecycledTable* table) { delete table; }

extern "C" void recycled_forget(RecycledTable* table, int32_t scope) { table->forget(scope); }

// An index over arrays that the caller keeps alive; null if they are not sound.
extern "C" Archive* ngram_archive_open(const void* nodes, int64_t num_nodes, const int32_t* table,
                                     int64_t table_size, const int32_t* tokens, int64_t num_tokens,
                                     int32_t max_order, int32_t vocab_size) {
    const bool is_power_of_two = table_size > 0 && (table_size & (table_size - 1)) == 0;
    if (!is_power_of_two || num_nodes < 1 || num_nodes > INT32_MAX || num_tokens > INT32_MAX ||
        max_order < 1 || max_order > ngram::kMaxOrder)
        return nullptr;
    Archive* archive = make<Archive>();
    if (archive == nullptr) return nullptr;
    archive->text = {tokens, static_cast<int32_t>(num_tokens)};
    archive->view = {static_cast<const Node*>(nodes), table, static_cast<uint32_t>(table_size - 1),
                    &archive->text, max_order};
    if (!is_sound(archive->view, num_nodes, table_size, num_tokens, vocab_size)) {
        delete archive;
        return nullptr;
    }
    return archive;
}

extern "C" void ngram_archive_close(Archive* archive) { delete archive; }

// Runs draft_batch(). Returns 0, or kNone without memory.
extern "C" int32_t ngram_draft(const char* batch, const char* step, int32_t* rows) {
    return without_throwing([&] {
        ngram::NewTokens new_tokens;
        std::memcpy(&new_tokens, step, sizeof(new_tokens));
        ngram::draft_batch(batch, new_tokens, rows);
        return 0;
    });
}
