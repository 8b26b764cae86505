// Parallel regions on the OpenMP runtime that the process has already.
//
// A second OpenMP runtime next to torch's would have threads that compete for the same cores. So
// this library links none: it calls the entry points that compilers emit for `#pragma omp parallel`
// and that GNU's, LLVM's and Intel's runtimes all export. Where the process has no OpenMP runtime,
// work runs on the calling thread.
#pragma once

extern "C" {
__attribute__((weak)) void GOMP_parallel(void (*function)(void*), void* data, unsigned num_threads,
                                         unsigned flags);
__attribute__((weak)) int omp_get_thread_num(void);
__attribute__((weak)) int omp_get_num_threads(void);
}

namespace vllm_trie {

inline bool have_openmp() { return GOMP_parallel && omp_get_thread_num && omp_get_num_threads; }

// Calls work(thread, size) on the calling thread if `num_threads` is 1, and otherwise on OpenMP's
// whole team, whose size is that of torch's. GNU's runtime ends the threads that a smaller team
// leaves out, and torch's next operation would start them anew.
template <typename Work>
void run_parallel(int num_threads, Work& work) {
  if (num_threads <= 1 || !have_openmp()) {
    work(0, 1);
    return;
  }
  GOMP_parallel(
      [](void* data) {
        (*static_cast<Work*>(data))(omp_get_thread_num(), omp_get_num_threads());
      },
      &work, 0, 0);
}

}  // namespace vllm_trie
