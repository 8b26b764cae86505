#include <chrono>
#include <vector>

#include "candidates.hpp"
#include "products.hpp"
#include "running_top.hpp"

namespace medusa {
namespace {

// Outputs that go to one thread together.
constexpr int64_t kShare = 64;
// Between the logits of two rows: a cache keeps little of what lies a power of two apart.
constexpr int64_t kLogitStride = kBlock + 16;
static_assert(kShare % kLanes == 0 && kBlock % kShare == 0, "whole vectors, whole shares");

int64_t nanoseconds() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

// Memory that is kept for the next call, on the border of a cache line.
template <typename T>
class Buffer {
   public:
    T* room_for(int64_t size) {
        const size_t lines = (sizeof(T) * size + sizeof(Line) - 1) / sizeof(Line);
        if (lines_.size() < lines) lines_.resize(lines);
        return reinterpret_cast<T*>(lines_.data());
    }

   private:
    struct alignas(kLineBytes) Line {
        char bytes[kLineBytes];
    };
    std::vector<Line> lines_;
};

// Share out `num_matrices` matrices of `num_outputs` outputs: call work(thread, matrix, first, end)
// for the parts of each.
template <typename Work>
void share_outputs(int64_t num_threads, int64_t num_matrices, int64_t num_outputs,
                   const Work& work) {
    const int64_t shares = (num_outputs + kShare - 1) / kShare;
    share_out(num_threads, num_matrices * shares, [&](int thread, int64_t begin, int64_t end) {
        while (begin < end) {
            const int64_t matrix = begin / shares, first = matrix * shares;
            const int64_t until = std::min(end, first + shares);
            work(thread, matrix, (begin - first) * kShare,
                 std::min(num_outputs, (until - first) * kShare));
            begin = until;
        }
    });
}

// y / (1 + exp(-y))
Floats silu(Floats y) {
    const Floats positive = y > 0.0f ? y : -y;
    const Floats power = exp2_nonpositive(positive * -1.44269504f);
    return y * (y > 0.0f ? broadcast(1.0f) : power) / (1.0f + power);
}

template <typename Weight>
class Network {
   public:
    using Row = RowOf<Weight>;

    void run(const Heads& heads, const void* const* hidden, int64_t num_rows, int32_t* tokens,
             float* probabilities) {
        const int64_t start = nanoseconds();
        heads_ = &heads;
        num_rows_ = num_rows;
        num_states_ = heads.num_heads * num_rows;
        stride_ = padded_size<Weight>(heads.hidden_size) + kLineBytes / sizeof(Row);
        gather(hidden);
        for (int64_t layer = 0; layer < heads.num_layers; ++layer) pass_blocks(layer);
        const int64_t looking = pass_outputs();
        *heads.product_nanoseconds = nanoseconds() - start - looking;
        finish(tokens, probabilities);
    }

   private:
    // Every head begins with the same states, filled up with zeros.
    void gather(const void* const* hidden) {
        const int64_t size = heads_->hidden_size;
        states_ = state_buffer_.room_for(num_states_ * stride_);
        rows_ = row_buffers_[0].room_for(num_states_ * stride_);
        next_rows_ = row_buffers_[1].room_for(num_states_ * stride_);
        std::fill_n(next_rows_, num_states_ * stride_, Row{});
        for (int64_t i = 0; i < num_states_; ++i) {
            const Weight* from = static_cast<const Weight*>(hidden[i % num_rows_]);
            float* state = states_ + i * stride_;
            Row* row = rows_ + i * stride_;
            for (int64_t k = 0; k < size; ++k) {
                state[k] = to_float(from[k]);
                from_float(state[k], &row[k]);
            }
            std::fill(row + size, row + stride_, Row{});
        }
    }

    // One residual block of each head.
    void pass_blocks(int64_t layer) {
        const int64_t size = heads_->hidden_size;
        share_outputs(heads_->num_threads, heads_->num_heads, size,
                      [&](int, int64_t head, int64_t first, int64_t end) {
            static thread_local Buffer<float> buffer;
            float* results = buffer.room_for(num_rows_ * kShare);
            const int64_t block = head * heads_->num_layers + layer, state = head * num_rows_;
            const Weight* weights =
                static_cast<const Weight*>(heads_->block_weights) + block * size * size;
            const Weight* bias = static_cast<const Weight*>(heads_->block_biases);
            if (bias != nullptr) bias += block * size;
            for (int64_t at = first; at < end; at += kShare) {
                const int64_t count = std::min(kShare, end - at);
                multiply_rows(weights + at * size, size, count, rows_ + state * stride_, num_rows_,
                              stride_, results, kShare);
                for (int64_t row = 0; row < num_rows_; ++row)
                    add_block(results + row * kShare, bias ? bias + at : nullptr, count,
                              (state + row) * stride_ + at);
            }
        });
        std::swap(rows_, next_rows_);
    }

    void add_block(float* results, const Weight* bias, int64_t count, int64_t place) {
        if (bias != nullptr)
            for (int64_t i = 0; i < count; ++i) results[i] += to_float(bias[i]);
        for (int64_t i = 0; i < count; i += kLanes) store(results + i, silu(load(results + i)));
        for (int64_t i = 0; i < count; ++i) {
            states_[place + i] += results[i];
            from_float(states_[place + i], &next_rows_[place + i]);
        }
    }

    // The output layers, and what is to be known of their logits. Returns for how many nanoseconds
    // the slowest thread looked at logits.
    int64_t pass_outputs() {
        const int64_t num_matrices = heads_->shares_output ? 1 : heads_->num_heads;
        const int64_t num_rows = num_states_ / num_matrices, size = heads_->hidden_size;
        parts_.resize(heads_->num_threads);
        for (Part& part : parts_) {
            part.looking = 0;
            if (part.tops.size() < static_cast<size_t>(num_states_)) part.tops.resize(num_states_);
            for (int64_t i = 0; i < num_states_; ++i)
                part.tops[i].begin(static_cast<int32_t>(heads_->num_candidates),
                                   heads_->temperatures[i / num_rows_]);
        }
        share_outputs(heads_->num_threads, num_matrices, heads_->num_outputs,
                      [&](int thread, int64_t matrix, int64_t first, int64_t end) {
            static thread_local Buffer<float> buffer;
            float* logits = buffer.room_for(num_rows * kLogitStride);
            const int64_t state = matrix * num_rows;
            const Weight* weights = static_cast<const Weight*>(heads_->output_weights) +
                                    matrix * heads_->num_outputs * size;
            Part& part = parts_[thread];
            for (int64_t at = first; at < end; at += kBlock) {
                const int64_t count = std::min<int64_t>(kBlock, end - at);
                multiply_rows(weights + at * size, size, count, rows_ + state * stride_, num_rows,
                              stride_, logits, kLogitStride);
                const int64_t before = nanoseconds();
                for (int64_t i = 0; i < num_rows; ++i)
                    part.tops[state + i].scan(logits + i * kLogitStride, static_cast<int32_t>(at),
                                              static_cast<int32_t>(count));
                part.looking += nanoseconds() - before;
            }
        });
        int64_t longest = 0;
        for (const Part& part : parts_) longest = std::max(longest, part.looking);
        return longest;
    }

    void finish(int32_t* tokens, float* probabilities) {
        const int64_t count = heads_->num_candidates;
        for (int64_t i = 0; i < num_states_; ++i) {
            RunningTop& top = parts_[0].tops[i];
            for (size_t part = 1; part < parts_.size(); ++part)  // in the order of the outputs
                top.append(parts_[part].tops[i]);
            // Rows come before heads there.
            const int64_t place = i % num_rows_ * heads_->num_heads + i / num_rows_;
            top.finish(heads_->token_map, tokens + place * count, probabilities + place * count);
        }
    }

    // What one thread has seen of the outputs of each head at each row.
    struct Part {
        std::vector<RunningTop> tops;
        int64_t looking;
    };

    const Heads* heads_;
    int64_t num_rows_, num_states_, stride_;
    // [num_heads, num_rows, stride]: states, and as the products want them before and after a block.
    float* states_;
    Row *rows_, *next_rows_;
    Buffer<float> state_buffer_;
    Buffer<Row> row_buffers_[2];
    std::vector<Part> parts_;
};

}  // namespace

void head_candidates(const Heads& heads, const void* const* rows, int64_t num_rows,
                     int32_t* tokens, float* probabilities) {
    with_dtype(heads.dtype, [&](auto type) {
        static thread_local Network<decltype(type)> network;
        network.run(heads, rows, num_rows, tokens, probabilities);
    });
}

}  // namespace medusa
