#include "index.hpp"

#include <algorithm>
#include <cstdint>
#include <stdexcept>

namespace ngram {

void Index::reserve(int32_t doc, int64_t num_tokens) {
    owned_[doc].reserve(owned_[doc].size() + num_tokens);
    const size_t wanted = nodes_.size() - free_nodes_.size() + num_tokens + num_tokens / 2;
    if (wanted <= nodes_.capacity()) return;
    // Growing by a little each time would copy all nodes each time.
    nodes_.reserve(std::max(wanted, nodes_.capacity() + nodes_.capacity() / 2));
    upkeep_.reserve(nodes_.capacity());
}

void Index::synchronize(int32_t doc, int64_t first, const int32_t* tokens, int64_t size) {
    if (owned_.empty()) states_[begin_text()].first = first;
    const std::vector<int32_t>& text = owned_[doc];
    const int64_t begin = states_[doc].first, end = begin + static_cast<int64_t>(text.size());
    if (first < begin || first > end || end > first + size ||
        !std::equal(text.begin() + (first - begin), text.end(), tokens)) {
        if (doc == 0) {
            clear();
        } else {
            remove_text(doc);
        }
        begin_text();  // the same number
        states_[doc].first = first;
    }
    const int64_t known = states_[doc].first + static_cast<int64_t>(owned_[doc].size()) - first;
    if (size - known > kReservedTokens) reserve(doc, size - known);
    for (int64_t i = known; i < size; ++i) append(doc, tokens[i]);
}

int32_t Index::begin_text() {
    int32_t doc = static_cast<int32_t>(owned_.size());
    if (free_docs_.empty()) {
        owned_.emplace_back();
        texts_.push_back({nullptr, 0});
        states_.emplace_back();
    } else {
        doc = free_docs_.back();
        free_docs_.pop_back();
        states_[doc] = {};
    }
    states_[doc].open.assign(1, kRoot);
    return doc;
}

int32_t Index::begin_branch(const int32_t* context, int32_t size) {
    const int32_t doc = begin_text();
    owned_[doc].assign(context, context + size);
    texts_[doc] = {owned_[doc].data(), size};
    states_[doc].first = static_cast<int64_t>(owned_[0].size()) - size;
    states_[doc].context_size = size;
    std::vector<int32_t> open;
    for (int32_t start = 0; start < size; ++start) {
        int32_t node = kRoot;
        for (int32_t i = start; i < size && node != kNone; ++i) {
            node = context[i] < 0 ? kNone : view().find(node, context[i]);
            // What is read on in text 0 becomes nodes: successors come from several texts.
            if (node != kNone && nodes_[node].pos != kNone) enter_successor(node);
        }
        if (node != kNone) open.push_back(node);
    }
    open.push_back(kRoot);
    states_[doc].open.swap(open);
    return doc;
}

void Index::append(int32_t doc, int32_t token) {
    std::vector<int32_t>& text = owned_[doc];
    std::vector<int32_t>& open = states_[doc].open;
    const int32_t pos = static_cast<int32_t>(text.size());
    text.push_back(token);
    texts_[doc] = {text.data(), pos + 1};
    if (token < 0) {
        open.assign(1, kRoot);
        return;
    }
    ++num_tokens_;
    next_open_.clear();
    // From the longest context down. The n-gram one token longer is new unless it was found.
    bool longer_is_new = true;
    int32_t order = static_cast<int32_t>(open.size()) - 1;
    for (int32_t context : open) {
        const int32_t child = view().find(context, token);
        if (child == kNone) {
            add_child(context, token, doc, pos);
        } else {
            ++upkeep_[child].count;
            if (longer_is_new || order == max_order_) one_more_type(child);
            longer_is_new = false;
            if (order < max_order_) {
                if (nodes_[child].pos != kNone) enter_successor(child);
                next_open_.push_back(child);
            }
            upkeep_[child].last_doc = doc;
        }
        --order;
    }
    next_open_.push_back(kRoot);
    open.swap(next_open_);
}

// The n-gram `id` is about to occur again: from now on its successors are nodes. Where its text ends
// with it, another text has met it first: the next token of the text will be its successor.
void Index::enter_successor(int32_t id) {
    const int32_t doc = nodes_[id].doc, pos = nodes_[id].pos;
    nodes_[id].pos = kNone;
    nodes_[id].child_types = 0;
    const int32_t token = view().token_after(doc, pos);
    if (token >= 0) {
        add_child(id, token, doc, pos + 1);
    } else if (pos + 1 == texts_[doc].size) {
        std::vector<int32_t>& open = states_[doc].open;
        const int32_t size = length(id);
        open.insert(std::find_if(open.begin(), open.end(),
                                 [&](int32_t context) { return length(context) <= size; }),
                    id);
    }
}

// Tokens of the n-gram `id`.
int32_t Index::length(int32_t id) const {
    int32_t size = 0;
    for (; id != kRoot; id = nodes_[id].parent) ++size;
    return size;
}

void Index::remove_text(int32_t doc) {
    shorten(doc, 0);
    std::vector<int32_t>().swap(owned_[doc]);
    texts_[doc] = {nullptr, 0};
    states_[doc] = {};
    free_docs_.push_back(doc);
}

void Index::shorten(int32_t doc, int32_t size) {
    std::vector<int32_t>& text = owned_[doc];
    const int32_t old_size = static_cast<int32_t>(text.size());
    const int32_t width = max_order_ + 1;
    const int32_t first = std::max(size - max_order_, 0);  // where n-grams begin that go
    // found[(start - first) * width + length - 1]: node of the n-gram, kNone where it is not a node.
    std::vector<int32_t> found(static_cast<size_t>(old_size - first) * width, kNone);
    for (int32_t start = first; start < old_size; ++start) {
        int32_t node = kRoot;
        for (int32_t length = 1; length <= width && start + length <= old_size; ++length) {
            const int32_t token = text[start + length - 1];
            if (token < 0) break;
            node = view().find(node, token);
            if (node == kNone) break;
            found[static_cast<size_t>(start - first) * width + length - 1] = node;
        }
    }
    // From the end of the text: an n-gram goes after all those that begin with it.
    for (int32_t end = old_size - 1; end >= std::max(size, states_[doc].context_size); --end) {
        if (text[end] < 0) continue;
        int32_t longest = 1;
        while (longest < width && end - longest >= 0 && text[end - longest] >= 0) ++longest;
        bool longer_vanished = true;
        for (int32_t length = longest; length >= 1; --length) {
            const int32_t start = end - length + 1;
            const int32_t id = found[static_cast<size_t>(start - first) * width + length - 1];
            if (id == kNone) continue;  // it occurred here alone, and vanishes with the text
            const bool is_top = length == width;
            --upkeep_[id].count;
            if (longer_vanished || is_top) one_type_less(id);
            longer_vanished = upkeep_[id].count == 0;
            if (longer_vanished) remove_node(id);
        }
        --num_tokens_;
    }
    text.resize(size);
    states_[doc].open.clear();
    texts_[doc] = {text.data(), size};
}

int32_t Index::new_node(int32_t parent, int32_t token, int32_t doc, int32_t pos) {
    const Node node = {token, parent, kNone, kNone, 1, 0, pos, {doc}};
    const Upkeep upkeep = {kNone, kNone, 1, doc, false};
    if (free_nodes_.empty()) {
        if (nodes_.size() > INT32_MAX) throw std::length_error("an index has 2^31 nodes at most");
        nodes_.push_back(node);
        upkeep_.push_back(upkeep);
        return static_cast<int32_t>(nodes_.size()) - 1;
    }
    const int32_t id = free_nodes_.back();
    free_nodes_.pop_back();
    nodes_[id] = node;
    upkeep_[id] = upkeep;
    return id;
}

int32_t Index::add_child(int32_t parent, int32_t token, int32_t doc, int32_t pos) {
    const int32_t id = new_node(parent, token, doc, pos);
    insert_entry(id);
    Node& above = nodes_[parent];
    ++above.num_children;
    ++above.child_types;
    int32_t& tail = upkeep_[parent].hot_tail;
    if (tail == kNone) {
        above.first_child = tail = id;
        upkeep_[id].is_hot = true;
    } else {
        link_between(tail, id, nodes_[tail].next);
        if (above.num_children <= kMaxHot) {
            tail = id;
            upkeep_[id].is_hot = true;
        }
        move_up(id);
    }
    return id;
}

void Index::remove_node(int32_t id) {
    const Node& node = nodes_[id];
    Node& above = nodes_[node.parent];
    above.child_types -= node.types;
    --above.num_children;
    if (upkeep_[id].is_hot) {
        // The first child that is not kept in order takes its place.
        int32_t& tail = upkeep_[node.parent].hot_tail;
        const int32_t next_hot = nodes_[tail].next;
        if (tail == id) tail = upkeep_[id].prev;
        unlink(id);
        if (next_hot != kNone) {
            tail = next_hot;
            upkeep_[next_hot].is_hot = true;
            move_up(next_hot);
        }
    } else {
        unlink(id);
    }
    erase_entry(id);
    free_nodes_.push_back(id);
}

// Make siblings follow one another; kNone before the first child of `parent`, and after the last.
void Index::join(int32_t parent, int32_t prev, int32_t next) {
    (prev == kNone ? nodes_[parent].first_child : nodes_[prev].next) = next;
    if (next != kNone) upkeep_[next].prev = prev;
}

void Index::unlink(int32_t id) { join(nodes_[id].parent, upkeep_[id].prev, nodes_[id].next); }

void Index::link_between(int32_t prev, int32_t id, int32_t next) {
    join(nodes_[id].parent, prev, id);
    join(nodes_[id].parent, id, next);
}

// Put a child whose `types` grew where it belongs; of equals the one that grew last is first.
void Index::move_up(int32_t id) {
    const int32_t types = nodes_[id].types;
    int32_t& tail = upkeep_[nodes_[id].parent].hot_tail;
    if (!upkeep_[id].is_hot) {
        if (nodes_[tail].types > types) return;
        unlink(id);
        link_between(upkeep_[tail].prev, id, tail);
        upkeep_[id].is_hot = true;
        upkeep_[tail].is_hot = false;
        tail = id;
    }
    int32_t place = upkeep_[id].prev;
    if (place == kNone || nodes_[place].types > types) return;
    while (upkeep_[place].prev != kNone && nodes_[upkeep_[place].prev].types <= types)
        place = upkeep_[place].prev;
    if (tail == id) tail = upkeep_[id].prev;
    unlink(id);
    link_between(upkeep_[place].prev, id, place);
}

// Put a child whose `types` shrank where it belongs among those that are kept in order.
void Index::move_down(int32_t id) {
    const int32_t types = nodes_[id].types;
    int32_t& tail = upkeep_[nodes_[id].parent].hot_tail;
    if (!upkeep_[id].is_hot || tail == id) return;
    int32_t place = id;
    while (place != tail && nodes_[nodes_[place].next].types > types) place = nodes_[place].next;
    if (place == id) return;
    if (tail == place) tail = id;
    unlink(id);
    link_between(place, id, nodes_[place].next);
}

void Index::one_more_type(int32_t id) {
    ++nodes_[id].types;
    ++nodes_[nodes_[id].parent].child_types;
    move_up(id);
}

void Index::one_type_less(int32_t id) {
    --nodes_[id].types;
    --nodes_[nodes_[id].parent].child_types;
    move_down(id);
}

void Index::insert_entry(int32_t id) {
    if (++num_entries_ * 2 > static_cast<int64_t>(table_.size())) grow_table();
    place_entry(id);
}

void Index::place_entry(int32_t id) {
    const uint32_t mask = static_cast<uint32_t>(table_.size() - 1);
    uint32_t slot = hash_edge(nodes_[id].parent, nodes_[id].token) & mask;
    while (table_[slot] != kNone) slot = (slot + 1) & mask;
    table_[slot] = id;
}

void Index::grow_table() {
    std::vector<int32_t> old(table_.size() * 2, kNone);
    old.swap(table_);
    for (int32_t id : old)
        if (id != kNone) place_entry(id);
}

// Linear probing without tombstones: entries behind the hole move into it.
void Index::erase_entry(int32_t id) {
    --num_entries_;
    const uint32_t mask = static_cast<uint32_t>(table_.size() - 1);
    uint32_t hole = hash_edge(nodes_[id].parent, nodes_[id].token) & mask;
    while (table_[hole] != id) hole = (hole + 1) & mask;
    for (uint32_t slot = (hole + 1) & mask; table_[slot] != kNone; slot = (slot + 1) & mask) {
        const Node& node = nodes_[table_[slot]];
        const uint32_t home = hash_edge(node.parent, node.token) & mask;
        if (((slot - home) & mask) >= ((slot - hole) & mask)) {
            table_[hole] = table_[slot];
            hole = slot;
        }
    }
    table_[hole] = kNone;
}

}  // namespace ngram
