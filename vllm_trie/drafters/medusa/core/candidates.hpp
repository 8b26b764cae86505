// The likeliest tokens of each head and their probabilities: a softmax over all outputs of which
// only the largest values are kept. The readable twin is `top_candidates_torch` in candidates.py.
#pragma once

#include <cstdint>

#include "../../../native/vectors.hpp"

namespace medusa {

// What the heads said, as native.py packs it: [num_heads, num_rows, num_outputs] by strides that
// count elements.
struct HeadLogits {
    const void* data;
    int64_t dtype;  // 0 float32, 1 bfloat16, 2 float16
    int64_t head_stride, row_stride;
    int64_t num_heads, num_rows, num_outputs;
    const float* temperatures;  // [num_heads], positive
    const int64_t* token_map;   // [num_outputs], the token of each output; null: they are the same
    int64_t num_candidates;     // 1 ... num_outputs
    int64_t num_threads;
};
static_assert(sizeof(HeadLogits) == 11 * sizeof(int64_t), "native.py packs them as integers");

// Calls work with a value of the type that the number stands for.
template <typename Work>
void with_dtype(int64_t dtype, const Work& work) {
    switch (dtype) {
        case 0:
            return work(float{});
        case 1:
            return work(vllm_trie::BFloat16{});
        case 2:
            return work(vllm_trie::Float16{});
    }
}

// The num_candidates likeliest tokens, likeliest first and of equal ones the first output's, into
// [num_rows, num_heads, num_candidates]. Where logits have no softmax (NaN or infinity among them,
// or all excluded) probabilities are 0. Throws std::bad_alloc; the dtype must be a known one.
void top_candidates(const HeadLogits& logits, int32_t* tokens, float* probabilities);

}  // namespace medusa
