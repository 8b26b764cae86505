#include "candidates.hpp"

#include <algorithm>
#include <new>

#include "../../../native/parallel.hpp"
#include "running_top.hpp"

namespace medusa {
namespace {

template <typename T>
void look_at(const T* logits, int32_t size, RunningTop& top) {
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
void run(const HeadLogits& logits, int32_t* tokens, float* probabilities) {
    const T* data = static_cast<const T*>(logits.data);
    const int64_t work = logits.num_rows * logits.num_heads;
    bool failed = false;  // only ever set
    auto share = [&](int thread, int team) {
        static thread_local RunningTop top;
        try {
            for (int64_t i = work * thread / team; i < work * (thread + 1) / team; ++i) {
                const int64_t row = i / logits.num_heads, head = i % logits.num_heads;
                top.begin(static_cast<int32_t>(logits.num_candidates), logits.temperatures[head]);
                look_at(data + head * logits.head_stride + row * logits.row_stride,
                        static_cast<int32_t>(logits.num_outputs), top);
                top.finish(logits.token_map, tokens + i * logits.num_candidates,
                           probabilities + i * logits.num_candidates);
            }
        } catch (const std::bad_alloc&) {
            __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
        }
    };
    // Another thread takes longer to start than one head's outputs take.
    run_parallel(static_cast<int>(std::min(logits.num_threads, (work + 3) / 4)), share);
    if (failed) throw std::bad_alloc();
}

}  // namespace

void top_candidates(const HeadLogits& logits, int32_t* tokens, float* probabilities) {
    with_dtype(logits.dtype, [&](auto type) {
        run<decltype(type)>(logits, tokens, probabilities);
    });
}

}  // namespace medusa
