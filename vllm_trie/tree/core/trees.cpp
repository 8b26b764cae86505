// Work on all trees of a batch in one call. Node arrays hold one tree after another, parents are
// indices within their tree. The readable twins are methods of TokenTree, and accept_greedy().

#include <algorithm>
#include <cstdint>
#include <exception>
#include <utility>
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

// Linear interpolation in increasing points, as numpy.interp rounds it.
double interpolate(double x, const double* grid, const double* curve, int64_t num_points) {
    const int64_t left = std::upper_bound(grid, grid + num_points, x) - grid - 1;
    if (left < 0) return curve[0];
    if (left >= num_points - 1) return curve[num_points - 1];
    if (grid[left] == x) return curve[left];
    const double slope = (curve[left + 1] - curve[left]) / (grid[left + 1] - grid[left]);
    return slope * (x - grid[left]) + curve[left];
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
// token, number of query tokens, number of nodes, KV slots in use, and one more. Writes the query
// token of each node, its position, and its ancestor words, ceil(N / 64) for each node of a tree.
extern "C" void trees_place(const int32_t* parents, const int64_t* rows, int64_t num_trees,
                            int64_t* tokens, int64_t* positions, uint64_t* words) {
    for (int64_t tree = 0; tree < num_trees; ++tree, rows += kRowFields) {
        const int64_t size = rows[3], num_words = (size + kWordBits - 1) / kWordBits;
        const int64_t first_token = rows[1] + rows[2] - size, num_committed = rows[4] - size;
        for (int64_t node = 0; node < size; ++node) {
            const int32_t parent = parents[node];
            uint64_t* row = words + node * num_words;
            tokens[node] = first_token + node;
            if (parent == kRoot) {
                positions[node] = num_committed;
                std::fill_n(row, num_words, 0);
            } else {
                positions[node] = positions[parent] + 1;
                std::copy_n(words + parent * num_words, num_words, row);
            }
            row[node / kWordBits] |= uint64_t{1} << (node % kWordBits);
        }
        parents += size;
        tokens += size;
        positions += size;
        words += size * num_words;
    }
}

// Walk down each tree by the target's tokens, N + 1 for a tree of N nodes; nodes with the flag
// `never_accept` (which may be null) are left out. Writes the number of accepted nodes of each
// tree; the indices of the accepted nodes, one tree after another; and the output tokens likewise,
// each tree's bonus token last. Returns the number of accepted nodes.
extern "C" int64_t trees_accept(const int32_t* tokens, const int32_t* parents,
                                const void* never_accept, const int32_t* sizes, int64_t num_trees,
                                const int64_t* target, int32_t* counts, int32_t* accepted,
                                int32_t* output) {
    const uint8_t* never = static_cast<const uint8_t*>(never_accept);
    int64_t num_accepted = 0;
    for (int64_t tree = 0; tree < num_trees; ++tree) {
        const int32_t size = sizes[tree];
        int32_t node = kRoot, count = 0;
        int64_t wanted = target[0];
        // Children follow their parents, so one pass in index order visits every path.
        for (int32_t child = 0; child < size; ++child) {
            if (parents[child] != node || tokens[child] != wanted) continue;
            if (never != nullptr && never[child]) continue;
            accepted[num_accepted + count++] = node = child;
            *output++ = tokens[child];
            wanted = target[child + 1];
        }
        *output++ = static_cast<int32_t>(wanted);
        num_accepted += counts[tree] = count;
        tokens += size;
        parents += size;
        if (never != nullptr) never += size;
        target += size + 1;
    }
    return num_accepted;
}

// Choose nodes as choose_nodes() in budget/allocation.py does. Writes a flag for each node and the
// expected tokens of each tree's chosen ones; returns the expected tokens per second, or a negative
// number without memory. `factors` has an entry for each tree.
extern "C" double trees_choose(const float* predicted, const int32_t* sizes, int64_t num_trees,
                               const double* factors, const double* grid, const double* curve,
                               int64_t num_points, const double* seconds, int64_t num_rows,
                               double tie, void* keep_flags, double* expected) {
    try {
        uint8_t* keep = static_cast<uint8_t*>(keep_flags);
        std::vector<double> rates, probabilities;
        std::vector<std::pair<double, int64_t>> order;
        for (int64_t tree = 0; tree < num_trees; ++tree) {
            for (int32_t node = 0; node < sizes[tree]; ++node, ++predicted) {
                const double rate = interpolate(*predicted, grid, curve, num_points);
                const int64_t index = static_cast<int64_t>(rates.size());
                rates.push_back(rate);
                probabilities.push_back(std::min(rate * factors[tree], 1.0));
                order.emplace_back(static_cast<double>(index) * tie - probabilities.back(), index);
            }
        }
        std::sort(order.begin(), order.end());
        double tokens = static_cast<double>(num_rows), best = tokens / seconds[num_rows];
        size_t num_kept = 0;
        for (size_t i = 0; i < order.size(); ++i) {
            tokens += probabilities[order[i].second];
            const double rate = tokens / seconds[num_rows + static_cast<int64_t>(i) + 1];
            if (rate > best) {
                best = rate;
                num_kept = i + 1;
            }
        }
        std::fill_n(keep, order.size(), 0);
        for (size_t i = 0; i < num_kept; ++i) keep[order[i].second] = 1;
        const double* rate = rates.data();
        for (int64_t tree = 0; tree < num_trees; ++tree) {
            expected[tree] = 0.0;
            for (int32_t node = 0; node < sizes[tree]; ++node, ++rate, ++keep)
                if (*keep) expected[tree] += *rate;
        }
        return best;
    } catch (const std::exception&) {
        return -1.0;
    }
}
