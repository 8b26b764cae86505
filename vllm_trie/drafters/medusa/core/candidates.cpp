// The likeliest tokens of each head and their probabilities: a softmax over all outputs of which
// only the largest values are kept. The readable twin is `top_candidates_torch` in candidates.py.
//
// The largest values of groups of outputs give a bound first: the m-th largest of them is not above
// the m-th largest output, so that a second pass looks into few groups. That pass also sums up.

#include <algorithm>
#include <cmath>
#include <functional>
#include <new>
#include <vector>

#include "../../../native/parallel.hpp"
#include "../../../native/vectors.hpp"

using namespace vllm_trie;

namespace {

constexpr int kGroup = 64;
constexpr int kGroupsPerSum = 32;  // short float sums; the sum of these is a double
constexpr double kLog2E = 1.4426950408889634;

struct Candidate {
    float logit;
    int32_t output;
};

bool likelier(const Candidate& a, const Candidate& b) {
    return a.logit > b.logit || (a.logit == b.logit && a.output < b.output);
}

class Softmax {
   public:
    // The `count` likeliest of `size` outputs, likeliest first; of equal ones the first. Returns
    // false, with undefined results, where the logits have no softmax (NaN, infinity).
    template <typename T>
    bool top(const T* logits, int32_t size, int32_t count, float scale, int32_t* outputs,
             float* probabilities) {
        const int32_t groups = (size + kGroup - 1) / kGroup;
        largest_.resize(groups);
        for (int32_t group = 0; group < groups; ++group)
            largest_[group] = largest_of(logits + group * kGroup, size - group * kGroup);
        const float maximum = *std::max_element(largest_.begin(), largest_.end());
        if (!(std::fabs(maximum) < __builtin_inff())) return false;
        float bound = kMinusInfinity;
        if (groups >= count) {
            sorted_ = largest_;
            std::nth_element(sorted_.begin(), sorted_.begin() + (count - 1), sorted_.end(),
                             std::greater<>());
            bound = sorted_[count - 1];
        }
        const float factor = static_cast<float>(scale * kLog2E);
        found_.clear();
        double total = 0.0;
        for (int32_t first = 0; first < groups; first += kGroupsPerSum) {
            const int32_t last = std::min(first + kGroupsPerSum, groups);
            total += sum_of(logits + first * kGroup,
                            std::min((last - first) * kGroup, size - first * kGroup), maximum,
                            factor);
            for (int32_t group = first; group < last; ++group) {
                if (!(largest_[group] >= bound)) continue;
                const int32_t end = std::min((group + 1) * kGroup, size);
                for (int32_t output = group * kGroup; output < end; ++output) {
                    const float logit = to_float(logits[output]);
                    if (logit >= bound) found_.push_back({logit, output});
                }
            }
        }
        if (static_cast<int32_t>(found_.size()) < count || !(total > 0.0)) return false;
        std::partial_sort(found_.begin(), found_.begin() + count, found_.end(), likelier);
        for (int32_t i = 0; i < count; ++i) {
            const double weight = std::exp2((found_[i].logit - maximum) * double{factor});
            outputs[i] = found_[i].output;
            probabilities[i] = static_cast<float>(std::min(weight / total, 1.0));
        }
        return true;
    }

   private:
    template <typename T>
    static float largest_of(const T* logits, int32_t size) {
        if (size >= kGroup) {
            Floats values = load_floats(logits);
            for (int32_t i = kLanes; i < kGroup; i += kLanes) {
                const Floats more = load_floats(logits + i);
                values = more > values ? more : values;
            }
            return largest(values);
        }
        float value = kMinusInfinity;
        for (int32_t i = 0; i < size; ++i) value = std::max(value, to_float(logits[i]));
        return value;
    }

    // 2^x for x <= 0, relative error 3e-6: half the work of exp2_nonpositive, and all that a
    // probability needs that is told with an error of percents.
    static Floats quick_exp2(Floats x) {
        x = x > -126.0f ? x : broadcast(-126.0f);
        const Floats magic = broadcast(12582912.0f);  // rounds to an integer, left in the low bits
        const Floats shifted = x + magic;
        const Floats r = x - (shifted - magic);  // in [-0.5, 0.5]
        Floats p = broadcast(0x1.3a95f4p-7f);  // least squares
        p = p * r + 0x1.ca123ap-5f;
        p = p * r + 0x1.ec017ap-3f;
        p = p * r + 0x1.62e0e2p-1f;
        p = p * r + 1.0f;
        return (Floats)((Ints)p + ((Ints)shifted << 23));
    }

    template <typename T>
    static double sum_of(const T* logits, int32_t size, float maximum, float factor) {
        const Floats shift = broadcast(maximum), factors = broadcast(factor);
        Floats sums = {};
        int32_t i = 0;
        for (; i + kLanes <= size; i += kLanes)
            sums += quick_exp2((load_floats(logits + i) - shift) * factors);
        double total = sum(sums);
        for (; i < size; ++i) total += std::exp2((to_float(logits[i]) - maximum) * double{factor});
        return total;
    }

    std::vector<float> largest_, sorted_;
    std::vector<Candidate> found_;
};

struct Arguments {
    int64_t head_stride, row_stride;
    int32_t num_rows, num_heads, num_outputs, num_candidates;
    const float* temperatures;
    int32_t* outputs;
    float* probabilities;
    int32_t num_threads;
};

template <typename T>
int32_t run(const Arguments& a, const T* logits) {
    bool failed = false;  // only ever set
    const int32_t work = a.num_rows * a.num_heads;
    auto share = [&](int thread, int team) {
        static thread_local Softmax softmax;
        try {
            for (int32_t i = work * thread / team; i < work * (thread + 1) / team; ++i) {
                const int32_t row = i / a.num_heads, head = i % a.num_heads;
                const int64_t to = int64_t{i} * a.num_candidates;
                if (!softmax.top(logits + head * a.head_stride + row * a.row_stride, a.num_outputs,
                                 a.num_candidates, 1.0f / a.temperatures[head], a.outputs + to,
                                 a.probabilities + to))
                    __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
            }
        } catch (const std::bad_alloc&) {
            __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
        }
    };
    // Another thread takes longer to start than one head's outputs take.
    run_parallel(std::min(a.num_threads, (work + 3) / 4), share);
    return failed ? 1 : 0;
}

}  // namespace

extern "C" {

// logits: [num_heads, num_rows, num_outputs] by strides that count elements; dtype: 0 float32,
// 1 bfloat16, 2 float16. temperatures: one per head. The results are
// [num_rows, num_heads, num_candidates]. Returns 0, or 1 if the logits have no softmax, memory is
// short or the dtype is another; the results are undefined then.
int32_t medusa_top_candidates(int32_t dtype, const void* logits, int64_t head_stride,
                              int64_t row_stride, int32_t num_rows, int32_t num_heads,
                              int32_t num_outputs, int32_t num_candidates,
                              const float* temperatures, int32_t* outputs, float* probabilities,
                              int32_t num_threads) {
    const Arguments arguments{head_stride,    row_stride,   num_rows, num_heads,     num_outputs,
                              num_candidates, temperatures, outputs,  probabilities, num_threads};
    switch (dtype) {
        case 0:
            return run(arguments, static_cast<const float*>(logits));
        case 1:
            return run(arguments, static_cast<const BFloat16*>(logits));
        case 2:
            return run(arguments, static_cast<const Float16*>(logits));
    }
    return 1;
}

}  // extern "C"
