// The heads themselves: hidden states in, each head's candidates out. Weights are read once, and the
// logits of a block of outputs are looked at as soon as they are there, so that they are never
// written to memory. The readable twins are `MedusaHeads` in heads.py and `top_candidates_torch`.
#pragma once

#include <cstdint>

namespace medusa {

// As compiled_heads.py packs them. All arrays are contiguous, and of one type where none is named.
struct Heads {
    int64_t dtype;  // 0 float32, 1 bfloat16, 2 float16
    int64_t num_heads, num_layers, hidden_size, num_outputs;
    int64_t shares_output;      // whether there is one output layer for all heads
    const void* block_weights;  // [num_heads, num_layers, hidden_size, hidden_size]
    const void* block_biases;   // [num_heads, num_layers, hidden_size] or null
    const void* output_weights;  // [num_heads or 1, num_outputs, hidden_size]
    const float* temperatures;   // [num_heads], positive
    const int64_t* token_map;    // [num_outputs] or null, as in HeadLogits
    int64_t num_candidates;      // 1 ... num_outputs
};
static_assert(sizeof(Heads) == 12 * sizeof(int64_t), "compiled_heads.py packs them as integers");

// Each head's candidates, as top_candidates() leaves them.
//
// rows: addresses of num_rows hidden states [hidden_size] of the heads' dtype. product_nanoseconds:
// null, or where to write how long it took to gather them and to multiply with all weights, which
// is everything but looking at the logits. Throws std::bad_alloc.
void head_candidates(const Heads& heads, const void* const* rows, int64_t num_rows,
                     int64_t num_threads, int32_t* tokens, float* probabilities,
                     int64_t* product_nanoseconds);

}  // namespace medusa
