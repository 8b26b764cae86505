#include "candidates.hpp"

#include <algorithm>
#include <cmath>
#include <new>
#include <vector>

#include "../../../native/parallel.hpp"
#include "../../../native/vectors.hpp"

namespace medusa {
namespace {

using namespace vllm_trie;

constexpr int32_t kGroup = 64;
constexpr int32_t kBlock = 32 * kGroup;  // stays in the nearest cache for a second look
constexpr double kLog2E = 1.4426950408889634;

struct Candidate {
    float logit;
    int32_t output;
};

bool likelier(const Candidate& a, const Candidate& b) {
    return a.logit > b.logit || (a.logit == b.logit && a.output < b.output);
}

inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX__) && defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// The larger one; b if either is NaN.
inline Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
    return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

// 2^x for x <= 0, relative error 3e-6: half the work of exp2_nonpositive, and all that a
// probability needs that is told with an error of percents. 2^-126 for less than that; NaN for NaN.
inline Floats quick_exp2(Floats x) {
    x = larger(broadcast(-126.0f), x);
    // Adding it rounds to an integer, left in the low bits, with the bias of an exponent on top.
    const Floats magic = broadcast(12582912.0f + 127.0f);
    const Floats shifted = x + magic;
    const Floats r = x - (shifted - magic);  // in [-0.5, 0.5]
    Floats p = broadcast(0x1.3a95f4p-7f);    // least squares
    p = multiply_add(p, r, broadcast(0x1.ca123ap-5f));
    p = multiply_add(p, r, broadcast(0x1.ec017ap-3f));
    p = multiply_add(p, r, broadcast(0x1.62e0e2p-1f));
    p = multiply_add(p, r, broadcast(1.0f));
    return p * (Floats)((Ints)shifted << 23);
}

// One head's outputs at one row.
class Softmax {
   public:
    // One pass over the logits sums up and notes the largest of each group of outputs. If `count`
    // groups reach a bound, so do `count` outputs: few groups need another look for these.
    template <typename T>
    void top(const T* logits, int32_t size, int32_t count, float temperature, int32_t* outputs,
             float* probabilities) {
        const float factor = static_cast<float>(kLog2E / temperature);
        largest_.clear();
        float maximum = kMinusInfinity;
        double total = 0.0;  // of 2^((logit - maximum) * factor)
        for (int32_t first = 0; first < size; first += kBlock) {
            const int32_t end = std::min(first + kBlock, size);
            const float before = maximum;
            for (int32_t group = first; group < end; group += kGroup) {
                largest_.push_back(largest_of(logits + group, std::min(kGroup, end - group)));
                maximum = std::max(maximum, largest_.back());
            }
            if (maximum > before) total *= std::exp2((before - maximum) * factor);
            total += sum_of(logits + first, end - first, maximum, factor);
        }
        if (!std::isfinite(maximum) || !(total > 0.0)) {  // infinity or NaN among them, or nothing
            for (int32_t i = 0; i < count; ++i) {
                outputs[i] = i;
                probabilities[i] = 0.0f;
            }
            return;
        }
        find_largest(logits, size, count, find_bound(maximum, kRange / factor, count));
        for (int32_t i = 0; i < count; ++i) {
            const float weight = std::exp2((found_[i].logit - maximum) * factor);
            outputs[i] = found_[i].output;
            probabilities[i] = static_cast<float>(std::min(weight / total, 1.0));
        }
    }

   private:
    static constexpr float kRange = 126.0f;  // powers of two that a float has below 1

    // A value that at least `count` groups reach, and hardly more; minus infinity if there are not
    // as many within `range` below the maximum. Bisection, unlike selection, has hardly a branch
    // that depends on the logits.
    float find_bound(float maximum, float range, int32_t count) const {
        const auto reaching = [&](float bound) {
            int32_t groups = 0;
            for (const float value : largest_) groups += value >= bound;
            return groups;
        };
        float smallest = maximum;
        for (const float value : largest_) smallest = std::min(smallest, value);
        float low = std::max(smallest, maximum - range), high = maximum;
        if (reaching(low) < count) return kMinusInfinity;
        for (int step = 0; step < 24; ++step) {
            const float middle = 0.5f * (low + high);
            const int32_t groups = reaching(middle);
            (groups >= count ? low : high) = middle;
            if (groups >= count && groups <= count + count / 8) break;
        }
        return low;
    }

    template <typename T>
    void find_largest(const T* logits, int32_t size, int32_t count, float bound) {
        size_t num_found = 0;
        const auto look_at = [&](int32_t first, int32_t end) {
            if (found_.size() < num_found + (end - first))
                found_.resize(2 * (num_found + (end - first)));
            for (int32_t output = first; output < end; ++output) {
                const float logit = to_float(logits[output]);
                found_[num_found] = {logit, output};
                num_found += logit >= bound;
            }
        };
        for (size_t group = 0; group < largest_.size(); ++group) {
            if (largest_[group] < bound) continue;
            const int32_t end = std::min(static_cast<int32_t>(group + 1) * kGroup, size);
            int32_t output = static_cast<int32_t>(group) * kGroup;
            for (; output + kLanes <= end; output += kLanes)
                if (largest(load_floats(logits + output)) >= bound)
                    look_at(output, output + kLanes);
            look_at(output, end);
        }
        std::partial_sort(found_.begin(), found_.begin() + count, found_.begin() + num_found,
                          likelier);
    }

    template <typename T>
    static float largest_of(const T* logits, int32_t size) {
        float value = kMinusInfinity;
        if (size == kGroup) {
            Floats values = load_floats(logits);
            for (int32_t i = kLanes; i < kGroup; i += kLanes)
                values = larger(load_floats(logits + i), values);
            return largest(values);
        }
        for (int32_t i = 0; i < size; ++i) value = std::max(value, to_float(logits[i]));
        return value;
    }

    // NaN if any logit is.
    template <typename T>
    static double sum_of(const T* logits, int32_t size, float maximum, float factor) {
        if (maximum == kMinusInfinity) maximum = 0.0f;
        const Floats factors = broadcast(factor), shift = broadcast(maximum);
        Floats sums = {};
        int32_t i = 0;
        for (; i + kLanes <= size; i += kLanes)
            sums += quick_exp2((load_floats(logits + i) - shift) * factors);
        double total = sum(sums);
        for (; i < size; ++i) total += std::exp2((to_float(logits[i]) - maximum) * factor);
        return total;
    }

    std::vector<float> largest_;  // of each group
    std::vector<Candidate> found_;
};

template <typename T>
void run(const HeadLogits& logits, int32_t* tokens, float* probabilities) {
    const T* data = static_cast<const T*>(logits.data);
    const int64_t work = logits.num_rows * logits.num_heads;
    bool failed = false;  // only ever set
    auto share = [&](int thread, int team) {
        static thread_local Softmax softmax;
        try {
            for (int64_t i = work * thread / team; i < work * (thread + 1) / team; ++i) {
                const int64_t row = i / logits.num_heads, head = i % logits.num_heads;
                int32_t* found = tokens + i * logits.num_candidates;
                softmax.top(data + head * logits.head_stride + row * logits.row_stride,
                            static_cast<int32_t>(logits.num_outputs),
                            static_cast<int32_t>(logits.num_candidates),
                            logits.temperatures[head], found,
                            probabilities + i * logits.num_candidates);
                if (logits.token_map == nullptr) continue;
                for (int64_t j = 0; j < logits.num_candidates; ++j)
                    found[j] = static_cast<int32_t>(logits.token_map[found[j]]);
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
    switch (logits.dtype) {
        case 0:
            return run<float>(logits, tokens, probabilities);
        case 1:
            return run<BFloat16>(logits, tokens, probabilities);
        case 2:
            return run<Float16>(logits, tokens, probabilities);
    }
}

}  // namespace medusa
