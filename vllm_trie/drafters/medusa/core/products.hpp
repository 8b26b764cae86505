// Products of a few rows with a weight matrix that is read from memory once, in the order in which
// it lies there: with few rows, reading is all that a product costs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "../../../native/multiplier.hpp"

namespace medusa {

using namespace vllm_trie;

// Rows that share one reading of the weights' registers.
constexpr int kTileRows = 8;

// Outputs that share one reading of the rows: as many as registers hold the sums of.
constexpr int outputs_at_once(int num_rows) {
    constexpr int kRegisters = kLanes == 16 ? 32 : 16;
    for (const int outputs : {4, 2})
        if (num_rows * outputs + outputs + 1 <= kRegisters) return outputs;
    return 1;
}

constexpr int kLineBytes = 64;
constexpr int64_t kBytesAhead = 8192;

// Elements of a row with the zeros that fill its last cache line's worth of weights.
template <typename Weight>
inline int64_t padded_size(int64_t size) {
    constexpr int64_t kLine = kLineBytes / sizeof(Weight);
    return (size + kLine - 1) / kLine * kLine;
}

// The sums of kLanes vectors, one in each lane. `vectors` is used up.
template <int kBit, int... kLane>
inline Floats add_pairs(Floats a, Floats b, std::integer_sequence<int, kLane...>) {
    const Ints own = {((kLane & kBit) ? kLanes + kLane : kLane)...};
    const Ints other = {((kLane & kBit) ? kLanes + (kLane ^ kBit) : (kLane ^ kBit))...};
#if defined(__clang__)
    (void)own, (void)other;
    return __builtin_shufflevector(a, b, ((kLane & kBit) ? kLanes + kLane : kLane)...) +
           __builtin_shufflevector(
               a, b, ((kLane & kBit) ? kLanes + (kLane ^ kBit) : (kLane ^ kBit))...);
#else
    return __builtin_shuffle(a, b, own) + __builtin_shuffle(a, b, other);
#endif
}
template <int kBit = 1>
inline Floats sum_each(Floats* vectors) {
    if constexpr (kBit == kLanes) {
        return vectors[0];
    } else {
#pragma GCC unroll 8
        for (int i = 0; i < kLanes / (2 * kBit); ++i)
            vectors[i] = add_pairs<kBit>(vectors[2 * i], vectors[2 * i + 1],
                                         std::make_integer_sequence<int, kLanes>());
        return sum_each<2 * kBit>(vectors);
    }
}

// Products of kRows rows with kOutputs rows of weights that follow one another, not summed up yet:
// that of row r and output o into sums[r * kLanes + o].
//
// kOutputs rows of weights at once are as many streams, which memory delivers at half the speed of
// one. So weights are fetched ahead, line by line in the order of addresses: with up to two rows
// just before they are used. More rows leave no time for that and little room in the nearest cache,
// so that the next one gets them, earlier.
template <int kRows, int kOutputs, typename Weight>
inline void multiply(const Weight* __restrict weights, int64_t size,
                     const RowOf<Weight>* __restrict rows, int64_t row_stride,
                     Floats* __restrict sums) {
    using M = Multiplier<Weight>;
    constexpr int kLine = kLineBytes / sizeof(Weight);
    constexpr bool kFew = kRows <= 2;
    const char* ahead = reinterpret_cast<const char*>(weights);
    ahead += kFew ? static_cast<int64_t>(sizeof(Weight)) * kOutputs * size : kBytesAhead;
    Floats partial[kRows][kOutputs];
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 16
        for (int output = 0; output < kOutputs; ++output) partial[row][output] = Floats{};
    int64_t i = 0;
    const auto step = [&](const Weight* const* from, int64_t at, int64_t from_at) {
        typename M::Vector loaded[kOutputs];
#pragma GCC unroll 16
        for (int output = 0; output < kOutputs; ++output)
            loaded[output] = M::load_weights(from[output] + from_at);
#pragma GCC unroll 16
        for (int row = 0; row < kRows; ++row) {
            const typename M::Vector values = M::load_row(rows + row * row_stride + at);
#pragma GCC unroll 16
            for (int output = 0; output < kOutputs; ++output)
                partial[row][output] = M::add(partial[row][output], values, loaded[output]);
        }
    };
    const Weight* from[kOutputs];
#pragma GCC unroll 16
    for (int output = 0; output < kOutputs; ++output) from[output] = weights + output * size;
    for (; i + kLine <= size; i += kLine) {
#pragma GCC unroll 16
        for (int output = 0; output < kOutputs; ++output)
            __builtin_prefetch(ahead + output * kLineBytes, 0, kFew ? 3 : 2);
        ahead += kOutputs * kLineBytes;
#pragma GCC unroll 16
        for (int part = 0; part < kLine; part += M::kSize) step(from, i + part, i + part);
    }
    if (i < size) {  // the rest of each row of weights, filled up with zeros as the rows are
        Weight rest[kOutputs][kLine];
        std::memset(rest, 0, sizeof(rest));
        for (int output = 0; output < kOutputs; ++output) {
            std::memcpy(rest[output], from[output] + i, sizeof(Weight) * (size - i));
            from[output] = rest[output];
        }
        for (int part = 0; part < kLine; part += M::kSize) step(from, i + part, part);
    }
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 16
        for (int output = 0; output < kOutputs; ++output)
            sums[row * kLanes + output] = partial[row][output];
}

// kRows rows times up to kLanes outputs' weights: one vector of results for each row, at
// results + row * result_stride. What is beyond `num_outputs` is minus infinity.
template <int kRows, typename Weight>
void multiply_group(const Weight* weights, int64_t size, int num_outputs,
                    const RowOf<Weight>* rows, int64_t row_stride, float* results,
                    int64_t result_stride) {
    constexpr int kOutputs = outputs_at_once(kRows);
    Floats sums[kRows * kLanes];
    if (num_outputs == kLanes) {
        for (int output = 0; output < kLanes; output += kOutputs)
            multiply<kRows, kOutputs>(weights + output * size, size, rows, row_stride,
                                      sums + output);
    } else {
        for (int i = 0; i < kRows * kLanes; ++i) sums[i] = Floats{};
        for (int output = 0; output < num_outputs; ++output)
            multiply<kRows, 1>(weights + output * size, size, rows, row_stride, sums + output);
    }
    for (int row = 0; row < kRows; ++row) {
        float* result = results + row * result_stride;
        store(result, sum_each(sums + row * kLanes));
        for (int output = num_outputs; output < kLanes; ++output) result[output] = kMinusInfinity;
    }
}

// multiply_group for a number of rows that the compiler does not know.
template <int kRows = kTileRows, typename... Arguments>
void multiply_tile(int64_t num_rows, Arguments... arguments) {
    if (num_rows == kRows)
        multiply_group<kRows>(arguments...);
    else if constexpr (kRows > 1)
        multiply_tile<kRows - 1>(num_rows, arguments...);
}

// results[num_rows, result_stride] = rows[num_rows, row_stride] times the weights
// [num_outputs, size] of successive outputs; the results up to the next multiple of kLanes are
// minus infinity. Rows have zeros up to padded_size(size). The weights come from memory once for
// all rows.
template <typename Weight>
void multiply_rows(const Weight* weights, int64_t size, int64_t num_outputs,
                   const RowOf<Weight>* rows, int64_t num_rows, int64_t row_stride, float* results,
                   int64_t result_stride) {
    const int64_t num_tiles = (num_rows + kTileRows - 1) / kTileRows;
    for (int64_t output = 0; output < num_outputs; output += kLanes) {
        const int group = static_cast<int>(std::min<int64_t>(kLanes, num_outputs - output));
        for (int64_t tile = 0; tile < num_tiles; ++tile) {
            const int64_t row = num_rows * tile / num_tiles;  // tiles of nearly equal height
            multiply_tile(num_rows * (tile + 1) / num_tiles - row, weights + output * size, size,
                          group, rows + row * row_stride, row_stride,
                          results + row * result_stride + output, result_stride);
        }
    }
}

}  // namespace medusa
