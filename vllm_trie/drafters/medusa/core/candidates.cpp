#include "candidates.hpp"

#include "running_top.hpp"

namespace medusa {
namespace {

template <typename T>
void scan_row(const T* logits, int32_t size, RunningTop& top) {
    alignas(64) float block[kBlock];
    for (int32_t first = 0; first < size; first += kBlock) {
        const int32_t count = std::min(kBlock, size - first);
        int32_t i = 0;
        for (; i + kLanes <= count; i += kLanes) store(block + i, load_floats(logits + first + i));
        for (; i < count; ++i) block[i] = to_float(logits[first + i]);
        for (; i % kLanes != 0; ++i) block[i] = kMinusInfinity;
        top.scan(block, first, count);
    }
}

template <typename T>
void scan_all(const HeadLogits& logits, int32_t* tokens, float* probabilities) {
    const int64_t count = logits.num_candidates, work = logits.num_rows * logits.num_heads;
    // Another thread takes longer to start than one head's outputs take.
    const int64_t num_threads = std::min(logits.num_threads, (work + 3) / 4);
    share_out(num_threads, work, [&](int, int64_t begin, int64_t end) {
        static thread_local RunningTop top;
        for (int64_t i = begin; i < end; ++i) {
            const int64_t row = i / logits.num_heads, head = i % logits.num_heads;
            top.begin(static_cast<int32_t>(count), logits.temperatures[head]);
            scan_row(static_cast<const T*>(logits.data) + head * logits.head_stride +
                         row * logits.row_stride,
                     static_cast<int32_t>(logits.num_outputs), top);
            top.finish(logits.token_map, tokens + i * count, probabilities + i * count);
        }
    });
}

}  // namespace

void top_candidates(const HeadLogits& logits, int32_t* tokens, float* probabilities) {
    with_dtype(logits.dtype, [&](auto type) {
        scan_all<decltype(type)>(logits, tokens, probabilities);
    });
}

}  // namespace medusa
