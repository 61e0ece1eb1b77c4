// XLA's cpu threads flush denormals to zero; a GPU keeps them. To give the same bits a
// host thread keeps them too while one of these lives.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace kvjax {

class KeepDenormals {
 public:
#if defined(__x86_64__)
  KeepDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ & ~kFlushBits); }
  ~KeepDenormals() { _mm_setcsr(saved_); }
#elif defined(__aarch64__)
  KeepDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" ::"r"(saved_ & ~kFlushBits));
  }
  ~KeepDenormals() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }
#endif
  KeepDenormals(const KeepDenormals&) = delete;
  KeepDenormals& operator=(const KeepDenormals&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr uint32_t kFlushBits = 0x8040;  // FTZ and DAZ
  uint32_t saved_;
#elif defined(__aarch64__)
  static constexpr uint64_t kFlushBits = uint64_t(1) << 24;  // FZ
  uint64_t saved_ = 0;
#endif
};

}  // namespace kvjax
