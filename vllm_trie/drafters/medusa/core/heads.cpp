#include "heads.hpp"

#include <algorithm>
#include <chrono>
#include <new>
#include <vector>

#include "../../../native/parallel.hpp"
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

// Shares out `num_matrices` matrices of `num_outputs` outputs: calls work(thread, matrix, first, end)
// for the parts of each. Throws std::bad_alloc if any of the calls does.
template <typename Work>
void share_outputs(int64_t num_threads, int64_t num_matrices, int64_t num_outputs,
                   const Work& work) {
    const int64_t shares = (num_outputs + kShare - 1) / kShare, total = num_matrices * shares;
    bool failed = false;  // only ever set
    auto part = [&](int thread, int team) {
        const int64_t end = total * (thread + 1) / team;
        try {
            for (int64_t begin = total * thread / team; begin < end;) {
                const int64_t matrix = begin / shares;
                const int64_t until = std::min(end, (matrix + 1) * shares);
                work(thread, matrix, (begin - matrix * shares) * kShare,
                     std::min(num_outputs, (until - matrix * shares) * kShare));
                begin = until;
            }
        } catch (const std::bad_alloc&) {
            __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
        }
    };
    run_parallel(static_cast<int>(std::min(num_threads, total)), part);
    if (failed) throw std::bad_alloc();
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

    void run(const Heads& heads, const void* const* hidden, int64_t num_rows, int64_t num_threads,
             int32_t* tokens, float* probabilities, int64_t* product_nanoseconds) {
        const int64_t start = product_nanoseconds ? nanoseconds() : 0;
        heads_ = &heads;
        num_rows_ = num_rows;
        num_threads_ = std::max<int64_t>(num_threads, 1);
        stride_ = padded_size<Weight>(heads.hidden_size) + kLineBytes / sizeof(Row);
        gather(hidden);
        for (int64_t layer = 0; layer < heads.num_layers; ++layer) pass_blocks(layer);
        const int64_t looking = pass_outputs(product_nanoseconds != nullptr);
        if (product_nanoseconds) *product_nanoseconds = nanoseconds() - start - looking;
        finish(tokens, probabilities);
    }

   private:
    int64_t num_states() const { return heads_->num_heads * num_rows_; }

    // Every head begins with the same states, filled up with zeros.
    void gather(const void* const* hidden) {
        const int64_t size = heads_->hidden_size;
        states_ = state_buffer_.room_for(num_states() * stride_);
        rows_ = row_buffers_[0].room_for(num_states() * stride_);
        next_rows_ = row_buffers_[1].room_for(num_states() * stride_);
        std::fill_n(next_rows_, num_states() * stride_, Row{});
        for (int64_t i = 0; i < num_states(); ++i) {
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
        share_outputs(num_threads_, heads_->num_heads, size, [&](int, int64_t head, int64_t first,
                                                                 int64_t end) {
            static thread_local Buffer<float> buffer;
            float* results = buffer.room_for(num_rows_ * kShare);
            const int64_t block = head * heads_->num_layers + layer;
            const Weight* weights =
                static_cast<const Weight*>(heads_->block_weights) + block * size * size;
            const Weight* bias = static_cast<const Weight*>(heads_->block_biases);
            if (bias != nullptr) bias += block * size;
            for (int64_t at = first; at < end; at += kShare) {
                const int64_t count = std::min(kShare, end - at);
                multiply_rows(weights + at * size, size, count, rows_ + head * num_rows_ * stride_,
                              num_rows_, stride_, results, kShare);
                for (int64_t row = 0; row < num_rows_; ++row)
                    add_block(results + row * kShare, bias ? bias + at : nullptr, count,
                              (head * num_rows_ + row) * stride_ + at);
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
    // the slowest thread looked at logits, if `timed`.
    int64_t pass_outputs(bool timed) {
        const int64_t num_matrices = heads_->shares_output ? 1 : heads_->num_heads;
        const int64_t num_rows = num_states() / num_matrices;
        parts_.resize(num_threads_);
        for (Part& part : parts_) {
            part.looking = 0;
            part.used.assign(num_states(), false);
            if (part.tops.size() < static_cast<size_t>(num_states()))
                part.tops.resize(num_states());
        }
        share_outputs(num_threads_, num_matrices, heads_->num_outputs,
                      [&](int thread, int64_t matrix, int64_t first, int64_t end) {
            static thread_local Buffer<float> buffer;
            float* logits = buffer.room_for(num_rows * kLogitStride);
            const int64_t state = matrix * num_rows;
            const Weight* weights = static_cast<const Weight*>(heads_->output_weights) +
                                    matrix * heads_->num_outputs * heads_->hidden_size;
            Part& part = parts_[thread];
            for (int64_t i = state; i < state + num_rows; ++i) {
                part.used[i] = true;
                part.tops[i].begin(static_cast<int32_t>(heads_->num_candidates),
                                   heads_->temperatures[i / num_rows_]);
            }
            for (int64_t at = first; at < end; at += kBlock) {
                const int64_t count = std::min<int64_t>(kBlock, end - at);
                multiply_rows(weights + at * heads_->hidden_size, heads_->hidden_size, count,
                              rows_ + state * stride_, num_rows, stride_, logits, kLogitStride);
                const int64_t before = timed ? nanoseconds() : 0;
                for (int64_t i = 0; i < num_rows; ++i)
                    part.tops[state + i].scan(logits + i * kLogitStride, static_cast<int32_t>(at),
                                              static_cast<int32_t>(count));
                if (timed) part.looking += nanoseconds() - before;
            }
        });
        int64_t longest = 0;
        for (const Part& part : parts_) longest = std::max(longest, part.looking);
        return longest;
    }

    void finish(int32_t* tokens, float* probabilities) {
        const int64_t count = heads_->num_candidates;
        for (int64_t i = 0; i < num_states(); ++i) {
            RunningTop* top = nullptr;
            for (Part& part : parts_) {  // in the order of the outputs
                if (!part.used[i]) continue;
                if (top != nullptr)
                    top->append(part.tops[i]);
                else
                    top = &part.tops[i];
            }
            // Rows come before heads there.
            const int64_t place = i % num_rows_ * heads_->num_heads + i / num_rows_;
            top->finish(heads_->token_map, tokens + place * count, probabilities + place * count);
        }
    }

    // What one thread has seen of the outputs of each head at each row.
    struct Part {
        std::vector<RunningTop> tops;
        std::vector<char> used;
        int64_t looking;
    };

    const Heads* heads_;
    int64_t num_rows_, num_threads_, stride_;
    // [num_heads, num_rows, stride]: states, and as the products want them before and after a block.
    float* states_;
    Row *rows_, *next_rows_;
    Buffer<float> state_buffer_;
    Buffer<Row> row_buffers_[2];
    std::vector<Part> parts_;
};

}  // namespace

void head_candidates(const Heads& heads, const void* const* rows, int64_t num_rows,
                     int64_t num_threads, int32_t* tokens, float* probabilities,
                     int64_t* product_nanoseconds) {
    with_dtype(heads.dtype, [&](auto type) {
        static thread_local Network<decltype(type)> network;
        network.run(heads, rows, num_rows, num_threads, tokens, probabilities,
                    product_nanoseconds);
    });
}

}  // namespace medusa
