// Vectors of floats as wide as the machine's registers, and conversions to and from 16-bit floats.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace vllm_trie {

#if defined(__AVX512F__) && defined(__AVX512BW__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512BF16__)
#define VLLM_TRIE_BF16_PRODUCTS 1
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef Floats UnalignedFloats __attribute__((aligned(4)));

inline Floats load(const float* from) { return *reinterpret_cast<const UnalignedFloats*>(from); }
inline void store(float* to, Floats values) { *reinterpret_cast<UnalignedFloats*>(to) = values; }
inline Floats broadcast(float value) { return value - Floats{}; }

constexpr float kMinusInfinity = -__builtin_inff();

// The larger one of each lane, `b` where one is NaN.
inline Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}

inline float largest(Floats values) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return _mm512_reduce_max_ps((__m512)values);
#else
  float result = values[0];
  for (int lane = 1; lane < kLanes; ++lane) result = values[lane] > result ? values[lane] : result;
  return result;
#endif
}

// Whether some lane of a comparison's result is true.
inline bool any(Ints lanes) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return _mm512_movepi32_mask((__m512i)lanes);
#else
  int32_t result = 0;
  for (int lane = 0; lane < kLanes; ++lane) result |= lanes[lane];
  return result;
#endif
}

inline float sum(Floats values) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return _mm512_reduce_add_ps((__m512)values);
#else
  float result = values[0];
  for (int lane = 1; lane < kLanes; ++lane) result += values[lane];
  return result;
#endif
}

// 2^x for x <= 0 with a relative error of a float's last bit; exactly 1 at 0, below 2^-126 anything
// that is smaller, and 0 below 2^-127.
inline Floats exp2_nonpositive(Floats x) {
  const Floats in_range = larger(x, broadcast(-127.0f));
  // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
  const Floats magic = broadcast(12582912.0f);
  const Floats shifted = in_range + magic;
  const Floats r = in_range - (shifted - magic);  // in [-0.5, 0.5]
  Floats p = broadcast(0x1.41fbbcp-13f);  // minimax polynomial of degree 6
  p = p * r + 0x1.5f3e54p-10f;
  p = p * r + 0x1.3b2d4cp-7f;
  p = p * r + 0x1.c6aee8p-5f;
  p = p * r + 0x1.ebfbdcp-3f;
  p = p * r + 0x1.62e430p-1f;
  p = p * r + 1.0f;
  // To the exponent; -127 makes the bits of 1 those of 0.
  return (Floats)((Ints)p + ((Ints)shifted << 23));
}

// The hyperbolic tangent with a relative error of some of a float's last bits.
inline Floats tanh_of(Floats x) {
  const Floats size = x < 0.0f ? -x : x;
  const Floats square = x * x;
  Floats p = broadcast(-5.70498872745e-3f);  // Cephes' tanhf, for small arguments
  p = p * square + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  const Floats power = exp2_nonpositive(size * (-2.0f * 1.44269504f));  // e^(-2 |x|)
  const Floats large = 1.0f - 2.0f * power / (1.0f + power);
  return size < 0.625f ? p * square * x + x : x < 0.0f ? -large : large;
}

// The values where the lane's bit is set, minus infinity elsewhere.
inline Floats keep_visible(Floats values, uint32_t bits) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return (Floats)_mm512_mask_mov_ps(_mm512_set1_ps(kMinusInfinity), static_cast<__mmask16>(bits),
                                    (__m512)values);
#else
  Ints lane_bit;
  for (int lane = 0; lane < kLanes; ++lane) lane_bit[lane] = 1 << lane;
  const Ints chosen = lane_bit & (static_cast<int32_t>(bits) - Ints{});
  return chosen != 0 ? values : broadcast(kMinusInfinity);
#endif
}

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// Calls work with a value of the type that the number stands for: 0 float32, 1 bfloat16, 2 float16.
template <typename Work>
void with_dtype(int64_t dtype, const Work& work) {
  switch (dtype) {
    case 0:
      return work(float{});
    case 1:
      return work(BFloat16{});
    case 2:
      return work(Float16{});
  }
}

inline float to_float(float value) { return value; }

inline float to_float(BFloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

inline float to_float(Float16 value) {
#if defined(__F16C__)
  return _cvtsh_ss(value.bits);
#else
  // Shift exponent and mantissa into place, then scale: this makes subnormals right, too.
  uint32_t bits = static_cast<uint32_t>(value.bits & 0x7fff) << 13;
  float result;
  std::memcpy(&result, &bits, 4);
  result *= 0x1p112f;
  if ((value.bits & 0x7c00) == 0x7c00) {
    result = (value.bits & 0x3ff) ? __builtin_nanf("") : __builtin_inff();
  }
  return (value.bits & 0x8000) ? -result : result;
#endif
}

inline void from_float(float value, float* to) { *to = value; }

// Round to nearest, ties to even.
inline void from_float(float value, BFloat16* to) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  to->bits = static_cast<uint16_t>(value == value ? rounded : 0x7fc0);
}

inline void from_float(float value, Float16* to) {
#if defined(__F16C__)
  to->bits = static_cast<uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT));
#else
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  uint32_t half;
  if (magnitude > 0x7f800000) {
    half = 0x7e00;
  } else if (magnitude >= 0x47800000) {  // 65536 and more; 65520 and more round up to it below
    half = 0x7c00;
  } else if (magnitude < 0x38800000) {  // subnormal: let the float adder round
    float absolute;
    std::memcpy(&absolute, &magnitude, 4);
    absolute += 0.5f;
    uint32_t shifted;
    std::memcpy(&shifted, &absolute, 4);
    half = shifted - 0x3f000000;
  } else {
    half = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  }
  to->bits = static_cast<uint16_t>(sign | half);
#endif
}

inline Floats load_floats(const float* from) { return load(from); }

inline Floats load_floats(const BFloat16* from) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16);
#elif defined(__AVX2__)
  const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16);
#else
  Floats result;
  for (int lane = 0; lane < kLanes; ++lane) result[lane] = to_float(from[lane]);
  return result;
#endif
}

inline Floats load_floats(const Float16* from) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__AVX__) && defined(__F16C__)
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  Floats result;
  for (int lane = 0; lane < kLanes; ++lane) result[lane] = to_float(from[lane]);
  return result;
#endif
}

}  // namespace vllm_trie
