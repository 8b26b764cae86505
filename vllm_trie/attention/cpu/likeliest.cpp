// The likeliest tokens of rows of logits with their probabilities, read once.
//
// The largest value of each block of a row gives a bound: as many blocks as tokens are wanted reach
// the bound, so the likeliest tokens do, too. Only these blocks are looked into.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#include "../../native/parallel.hpp"
#include "../../native/vectors.hpp"

namespace {

using namespace vllm_trie;

constexpr int64_t kBlock = 512;  // tokens; its floats stay in the nearest cache for the second read
constexpr int kMaxLikeliest = 64;
constexpr float kLog2E = 0x1.715476p+0f;

template <typename T>
class Row {
 public:
  // Writes `count` tokens, the likeliest first and of equals the smallest, and their probabilities.
  // As argmax does, a row with a NaN names the first one. Such rows have probabilities of 0, and so
  // have those without a finite largest value.
  void read(const T* logits, int64_t size, int count, int32_t* tokens, float* probabilities) {
    maxima_.clear();
    total_ = 0.0;
    largest_ = kMinusInfinity;
    has_nan_ = false;
    for (int64_t i = 0; i < size; i += kBlock)
      read_block(logits + i, static_cast<int>(std::min(kBlock, size - i)));
    choose(logits, size, count, tokens, probabilities);
    const bool is_finite = !has_nan_ && std::isfinite(largest_);
    for (int i = 0; i < count; ++i)
      probabilities[i] =
          is_finite ? static_cast<float>(std::exp(probabilities[i] - largest_) / total_)
                    : 0.0f;
    if (has_nan_)
      tokens[0] = static_cast<int32_t>(
          std::find_if(logits, logits + size, [](T x) { return std::isnan(to_float(x)); }) - logits);
  }

 private:
  // The block's maximum, and its part of the sum of exp(value - largest).
  void read_block(const T* values, int size) {
    Floats maxima = broadcast(kMinusInfinity);
    Ints nans = {};
    int i = 0;
    for (; i + kLanes <= size; i += kLanes) {
      const Floats x = load_floats(values + i);
      maxima = x > maxima ? x : maxima;
      nans |= x != x;
    }
    float maximum = largest(maxima);
    for (int lane = 0; lane < kLanes; ++lane) has_nan_ |= nans[lane] != 0;
    for (int j = i; j < size; ++j) {
      const float x = to_float(values[j]);
      maximum = std::max(maximum, x);
      has_nan_ |= std::isnan(x);
    }
    maxima_.push_back(maximum);
    if (!(maximum > kMinusInfinity)) return;
    if (maximum > largest_) {
      total_ *= std::exp(largest_ - maximum);
      largest_ = maximum;
    }
    const Floats shift = broadcast(largest_);
    Floats sums = {};
    for (i = 0; i + kLanes <= size; i += kLanes)
      sums += exp2_nonpositive((load_floats(values + i) - shift) * kLog2E);
    for (; i < size; ++i) total_ += std::exp(to_float(values[i]) - largest_);
    total_ += sum(sums);
  }

  // Leaves logits in place of the probabilities.
  void choose(const T* logits, int64_t size, int count, int32_t* tokens, float* values) {
    float bound = kMinusInfinity;
    if (static_cast<int>(maxima_.size()) > count) {
      sorted_.assign(maxima_.begin(), maxima_.end());
      std::nth_element(sorted_.begin(), sorted_.begin() + count - 1, sorted_.end(),
                       std::greater<>());
      bound = sorted_[count - 1];
    }
    int found = 0;
    for (int64_t block = 0; block < static_cast<int64_t>(maxima_.size()); ++block) {
      if (maxima_[block] < bound) continue;
      const int64_t end = std::min((block + 1) * kBlock, size);
      for (int64_t i = block * kBlock; i < end; ++i) {
        const float x = to_float(logits[i]);
        if (found == count ? !(x > values[count - 1]) : x != x) continue;
        int at = found < count ? found++ : count - 1;
        for (; at > 0 && x > values[at - 1]; --at) {
          values[at] = values[at - 1];
          tokens[at] = tokens[at - 1];
        }
        values[at] = x;
        tokens[at] = static_cast<int32_t>(i);
      }
    }
    std::fill(tokens + found, tokens + count, 0);  // of NaNs alone
    std::fill(values + found, values + count, kMinusInfinity);
  }

  std::vector<float> maxima_, sorted_;  // by block
  double total_;
  float largest_;
  bool has_nan_;
};

}  // namespace

// dtype: as with_dtype() counts. Rows of `stride` elements, of which `size` are read; `count`
// results a row. Returns 0, or -1 for sizes that cannot be.
extern "C" int vllm_trie_likeliest(int64_t dtype, const void* logits, int64_t num_rows,
                                   int64_t stride, int64_t size, int count, int32_t* tokens,
                                   float* probabilities, int num_threads) {
  if (count < 1 || count > size || count > kMaxLikeliest || size > INT32_MAX) return -1;
  with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    auto work = [&](int thread, int team) {
      Row<T> reader;
      for (int64_t row = num_rows * thread / team; row < num_rows * (thread + 1) / team; ++row)
        reader.read(static_cast<const T*>(logits) + row * stride, size, count,
                    tokens + row * count, probabilities + row * count);
    };
    run_parallel(num_rows > 1 ? num_threads : 1, work);
  });
  return 0;
}
