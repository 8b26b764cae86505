// Each head's likeliest tokens and their probabilities: a softmax over all outputs of which only the
// largest values are kept. The readable twins are `top_candidates_torch` in candidates.py and
// `MedusaHeads` in heads.py.
#pragma once

#include <algorithm>
#include <cstdint>
#include <new>

#include "../../../native/parallel.hpp"
#include "../../../native/vectors.hpp"

namespace medusa {

using namespace vllm_trie;

// Logits of the heads, [num_heads, num_rows, num_outputs] by strides that count elements.
struct HeadLogits {
    const void* data;
    int64_t dtype;  // as for with_dtype()
    int64_t head_stride, row_stride;
    int64_t num_heads, num_rows, num_outputs;
    const float* temperatures;  // [num_heads], positive
    const int64_t* token_map;   // [num_outputs], the token of each output; null: they are the same
    int64_t num_candidates;     // 1 ... num_outputs
    int64_t num_threads;
};

// The heads themselves. All arrays are contiguous, and of the dtype where no type is named.
struct Heads {
    int64_t dtype;  // as in HeadLogits
    int64_t num_heads, num_layers, hidden_size, num_outputs;
    int64_t shares_output;       // whether there is one output layer for all heads
    const void* block_weights;   // [num_heads, num_layers, hidden_size, hidden_size]
    const void* block_biases;    // [num_heads, num_layers, hidden_size] or null
    const void* output_weights;  // [num_heads or 1, num_outputs, hidden_size]
    const float* temperatures;   // as in HeadLogits
    const int64_t* token_map;
    int64_t num_candidates;
    int64_t num_threads;
    // Written by each call: the time of gathering hidden states and multiplying them with weights,
    // which is everything but looking at logits.
    int64_t* product_nanoseconds;
};

// Write the num_candidates likeliest tokens, likeliest first and of equal ones the first output's,
// into [num_rows, num_heads, num_candidates]. Where logits have no softmax (NaN or infinity among
// them, or all excluded) probabilities are 0. Throws std::bad_alloc; the dtype must be a known one.
void top_candidates(const HeadLogits& logits, int32_t* tokens, float* probabilities);

// Write the same from num_rows hidden states [hidden_size] of the heads' dtype, given by their
// addresses. Weights are read once, and the logits of a block of outputs are looked at as soon as
// they are there, so they are never written to memory.
void head_candidates(const Heads& heads, const void* const* rows, int64_t num_rows,
                     int32_t* tokens, float* probabilities);

// Share out the numbers from 0 to `total`: call work(thread, begin, end) on at most `num_threads`
// threads. Throws std::bad_alloc if any of the calls does.
template <typename Work>
void share_out(int64_t num_threads, int64_t total, const Work& work) {
    bool failed = false;  // only ever set
    auto part = [&](int thread, int team) {
        try {
            work(thread, total * thread / team, total * (thread + 1) / team);
        } catch (const std::bad_alloc&) {
            __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
        }
    };
    run_parallel(static_cast<int>(std::min(num_threads, total)), part);
    if (failed) throw std::bad_alloc();
}

}  // namespace medusa
