// Work on all trees of a batch in one call. Node arrays hold one tree after another, parents are
// indices within their tree. The readable twins are methods of TokenTree.

#include <algorithm>
#include <cstdint>
#include <exception>
#include <vector>

namespace {

constexpr int32_t kRoot = -1;
constexpr int32_t kWordBits = 64;
constexpr int64_t kRowFields = 6;  // of TreeRow

// Whether a tree obeys the rules of TokenTree.validate(); `edges` is scratch space.
bool is_valid(const int32_t* tokens, const int32_t* parents, const float* probabilities,
              int32_t num_nodes, int32_t vocab_size, std::vector<uint64_t>& edges) {
    edges.clear();
    for (int32_t node = 0; node < num_nodes; ++node) {
        const int32_t parent = parents[node], token = tokens[node];
        if (parent < kRoot || parent >= node || token < 0 || token >= vocab_size) return false;
        edges.push_back(static_cast<uint64_t>(parent + 1) << 32 | static_cast<uint32_t>(token));
        if (probabilities == nullptr) continue;
        const float above = parent == kRoot ? 1.0f : probabilities[parent];
        if (!(probabilities[node] >= 0.0f && probabilities[node] <= above)) return false;
    }
    std::sort(edges.begin(), edges.end());
    return std::adjacent_find(edges.begin(), edges.end()) == edges.end();
}

}  // namespace

// Returns whether all trees obey the rules; a lack of memory is a no. `probabilities` may be null.
extern "C" int32_t trees_are_valid(const int32_t* tokens, const int32_t* parents,
                                   const float* probabilities, const int32_t* sizes,
                                   int64_t num_trees, int32_t vocab_size) {
    try {
        std::vector<uint64_t> edges;
        for (int64_t tree = 0; tree < num_trees; ++tree) {
            const int32_t size = sizes[tree];
            if (!is_valid(tokens, parents, probabilities, size, vocab_size, edges)) return 0;
            tokens += size;
            parents += size;
            if (probabilities != nullptr) probabilities += size;
        }
        return 1;
    } catch (const std::exception&) {
        return 0;
    }
}

// Place the trees in a step. A row of `rows` has the fields of TreeRow: batch index, first query
// token, number of query tokens, number of nodes, and two more. Writes the query token of each node,
// its position less its slot's, and its ancestor words, ceil(N / 64) for each node of a tree.
extern "C" void trees_place(const int32_t* parents, const int64_t* rows, int64_t num_trees,
                            int64_t* tokens, int64_t* shifts, uint64_t* words) {
    for (int64_t tree = 0; tree < num_trees; ++tree, rows += kRowFields) {
        const int64_t size = rows[3], num_words = (size + kWordBits - 1) / kWordBits;
        const int64_t first_token = rows[1] + rows[2] - size;
        for (int64_t node = 0; node < size; ++node) {
            const int32_t parent = parents[node];
            uint64_t* row = words + node * num_words;
            tokens[node] = first_token + node;
            if (parent == kRoot) {
                shifts[node] = -node;
                std::fill_n(row, num_words, 0);
            } else {
                shifts[node] = shifts[parent] + parent + 1 - node;
                std::copy_n(words + parent * num_words, num_words, row);
            }
            row[node / kWordBits] |= uint64_t{1} << (node % kWordBits);
        }
        parents += size;
        tokens += size;
        shifts += size;
        words += size * num_words;
    }
}
