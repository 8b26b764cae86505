// The largest of a head's logits and the sum of its softmax, taken block by block. No logit is
// needed again, so a block need not leave the nearest cache.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "../../../native/vectors.hpp"

namespace medusa {

using namespace vllm_trie;

// Logits of a block, a multiple of every vector's lanes.
constexpr int32_t kBlock = 2048;

// The larger one; b if either is NaN.
inline Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
    return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

// 2^x for x <= 0 with a relative error of 3e-6, which a head's probabilities do not notice, and half
// the work of exp2_nonpositive. At most 2^-126 below that; NaN for NaN.
inline Floats quick_exp2(Floats x) {
#if defined(__AVX512F__) && defined(__AVX512DQ__)
    const Floats r = (Floats)_mm512_reduce_ps((__m512)x, 9);  // x - floor(x)
    Floats p = broadcast(0x1.b7f73p-7f);                     // equal ripples on [0, 1]
    p = multiply_add(p, r, broadcast(0x1.abf868p-5f));
    p = multiply_add(p, r, broadcast(0x1.ee245p-3f));
    p = multiply_add(p, r, broadcast(0x1.62d6c6p-1f));
    p = multiply_add(p, r, broadcast(1.0f));
    return (Floats)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
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
#endif
}

class RunningTop {
   public:
    // Start anew: find `count` outputs of a softmax at `temperature`.
    void begin(int32_t count, float temperature) {
        count_ = count;
        factor_ = static_cast<float>(kLog2E / temperature);
        maximum_ = bound_ = kMinusInfinity;
        total_ = 0.0;
        num_found_ = 0;
        most_ = count + std::max(count, 64);
        const size_t room = 2 * static_cast<size_t>(most_) + kAtOnce + kLanes;
        if (logits_.size() < room) {
            logits_.resize(room);
            outputs_.resize(room);
        }
    }

    // Take the next `size` outputs from `first` on, at most kBlock. Minus infinity follows them up
    // to the next multiple of kLanes.
    void scan(const float* logits, int32_t first, int32_t size) {
        const float before = maximum_;
        Floats largest_yet = broadcast(maximum_), bound = broadcast(bound_);
        for (int32_t i = 0; i < size; i += kAtOnce) {
            const int32_t end = std::min(i + kAtOnce, size);
            Floats values = load(logits + i);
            for (int32_t j = i + kLanes; j < end; j += kLanes)
                values = larger(load(logits + j), values);
            largest_yet = larger(values, largest_yet);
            if (!exceeds(values, bound)) continue;
            for (int32_t j = i; j < end; j += kLanes) keep(logits + j, first + j, bound);
            if (num_found_ <= most_) continue;
            maximum_ = largest(largest_yet);
            drop_the_rest();
            bound = broadcast(bound_);
        }
        maximum_ = largest(largest_yet);
        if (maximum_ > before) total_ *= std::exp2((before - maximum_) * factor_);
        total_ += sum_of(logits, size);
    }

    // Take what `next` has seen of the outputs after this one's.
    void append(const RunningTop& next) {
        const float maximum = std::max(maximum_, next.maximum_);
        if (maximum > kMinusInfinity) {
            total_ = total_ * std::exp2((maximum_ - maximum) * factor_) +
                     next.total_ * std::exp2((next.maximum_ - maximum) * factor_);
            maximum_ = maximum;
        }
        std::copy_n(next.logits_.begin(), next.num_found_, logits_.begin() + num_found_);
        std::copy_n(next.outputs_.begin(), next.num_found_, outputs_.begin() + num_found_);
        num_found_ += next.num_found_;
        if (num_found_ > most_) drop_the_rest();
    }

    // Write the `count` likeliest outputs, likeliest first and of equal ones the first, and their
    // probabilities; outputs as tokens if there is a map. Probabilities are 0 if the logits have no
    // softmax: infinity or NaN among them, or all excluded.
    void finish(const int64_t* token_map, int32_t* outputs, float* probabilities) {
        int32_t num_likely = 0;
        if (std::isfinite(maximum_) && total_ > 0.0) {
            if (num_found_ > count_) drop_the_rest();
            order_.resize(num_found_);
            for (int32_t i = 0; i < num_found_; ++i) order_[i] = {logits_[i], outputs_[i]};
            std::sort(order_.begin(), order_.end(), [](const Output& a, const Output& b) {
                return a.logit > b.logit || (a.logit == b.logit && a.output < b.output);
            });
            num_likely = std::min(num_found_, count_);
        }
        for (int32_t i = 0; i < num_likely; ++i) {
            const double share = std::exp2((order_[i].logit - maximum_) * factor_) / total_;
            outputs[i] = order_[i].output;
            probabilities[i] = static_cast<float>(std::min(share, 1.0));
        }
        // Fill up with any other outputs.
        for (int32_t output = 0, i = num_likely; i < count_; ++output) {
            if (std::find(outputs, outputs + num_likely, output) != outputs + num_likely) continue;
            outputs[i] = output;
            probabilities[i++] = 0.0f;
        }
        if (token_map == nullptr) return;
        for (int32_t i = 0; i < count_; ++i)
            outputs[i] = static_cast<int32_t>(token_map[outputs[i]]);
    }

   private:
    static constexpr int32_t kAtOnce = 4 * kLanes;  // logits that are looked at together
    static constexpr double kLog2E = 1.4426950408889634;

    struct Output {
        float logit;
        int32_t output;
    };

    static bool exceeds(Floats values, Floats bound) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
        return _mm512_cmp_ps_mask((__m512)values, (__m512)bound, _CMP_GT_OQ) != 0;
#elif defined(__AVX__)
        return _mm256_movemask_ps(_mm256_cmp_ps((__m256)values, (__m256)bound, _CMP_GT_OQ)) != 0;
#else
        const Ints above = values > bound;
        int32_t any = 0;
        for (int lane = 0; lane < kLanes; ++lane) any |= above[lane];
        return any != 0;
#endif
    }

    // Append those of kLanes logits that exceed the bound, in their order, to where there is room.
    void keep(const float* logits, int32_t first, Floats bound) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
        const __m512 values = _mm512_loadu_ps(logits);
        const __mmask16 chosen = _mm512_cmp_ps_mask(values, (__m512)bound, _CMP_GT_OQ);
        if (chosen == 0) return;
        const __m512i lanes =
            _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m512i outputs = _mm512_add_epi32(_mm512_set1_epi32(first), lanes);
        // Storing whole vectors: a store of chosen lanes alone takes many times as long.
        _mm512_storeu_ps(&logits_[num_found_], _mm512_maskz_compress_ps(chosen, values));
        _mm512_storeu_si512(&outputs_[num_found_], _mm512_maskz_compress_epi32(chosen, outputs));
        num_found_ += __builtin_popcount(chosen);
#else
        for (int lane = 0; lane < kLanes; ++lane) {
            logits_[num_found_] = logits[lane];
            outputs_[num_found_] = first + lane;
            num_found_ += logits[lane] > bound[lane];
        }
#endif
    }

    int32_t count_reaching(float bound) const {
        int32_t number = 0;
        for (int32_t i = 0; i < num_found_; ++i) number += logits_[i] >= bound;
        return number;
    }

    // Raise the bound until hardly more than the wanted outputs reach it, and drop the others.
    // Later outputs must exceed it: of equal ones the first are wanted. Bisection, unlike
    // selection, has hardly a branch that depends on the logits.
    void drop_the_rest() {
        if (!std::isfinite(maximum_)) {  // no softmax
            num_found_ = 0;
            bound_ = maximum_;
            return;
        }
        float low = maximum_, high = maximum_;
        for (int32_t i = 0; i < num_found_; ++i) low = std::min(low, logits_[i]);
        int32_t ties = count_ - count_reaching(high);  // outputs that stay if they equal `low`
        if (ties <= 0) {
            low = high;
            ties = count_;
        }
        while (low < high) {
            const float middle = 0.5f * low + 0.5f * high;
            if (middle <= low || middle >= high) break;  // neighbours: only ties are left
            const int32_t reaching = count_reaching(middle);
            if (reaching < count_) {
                high = middle;
                ties = count_ - reaching;
                continue;
            }
            low = middle;
            if (reaching <= count_ + count_ / 8) {
                ties = reaching;  // all stay
                break;
            }
        }
        int32_t kept = 0;
        for (int32_t i = 0; i < num_found_; ++i) {
            const bool stays = logits_[i] > low || (logits_[i] == low && ties-- > 0);
            logits_[kept] = logits_[i];
            outputs_[kept] = outputs_[i];
            kept += stays;
        }
        num_found_ = kept;
        bound_ = low;
    }

    // Of 2^((logit - maximum) * factor); NaN if any logit is.
    double sum_of(const float* logits, int32_t size) const {
        const Floats factor = broadcast(factor_);
        const Floats shift = broadcast(maximum_ == kMinusInfinity ? 0.0f : maximum_);
        Floats sums = {};
        for (int32_t i = 0; i < size; i += kLanes)
            sums += quick_exp2((load(logits + i) - shift) * factor);
        return sum(sums);
    }

    int32_t count_ = 0, most_ = 0, num_found_ = 0;
    float factor_ = 1.0f, maximum_ = kMinusInfinity, bound_ = kMinusInfinity;
    double total_ = 0.0;  // of 2^((logit - maximum) * factor)
    std::vector<float> logits_;  // of what may be among the wanted, in the outputs' order
    std::vector<int32_t> outputs_;
    std::vector<Output> order_;
};

}  // namespace medusa
