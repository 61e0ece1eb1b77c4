// Picks the copy of attention_cpu.cc that this machine runs fastest.
#include "attention.h"

namespace kvjax {

#define KVJAX_DECLARE(target)                                                        \
  namespace target {                                                                 \
  void AttendSpans(const AttentionShape&, const AttentionBuffers&, const char* base, \
                   const std::vector<Span>&, const ParallelFor&);                    \
  }
KVJAX_DECLARE(baseline)
#if defined(__x86_64__)
KVJAX_DECLARE(avx2)
#endif

void AttendSpans(const AttentionShape& shape, const AttentionBuffers& buffers,
                 const char* base, const std::vector<Span>& spans,
                 const ParallelFor& parallel) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return avx2::AttendSpans(shape, buffers, base, spans, parallel);
  }
#endif
  baseline::AttendSpans(shape, buffers, base, spans, parallel);
}

}  // namespace kvjax
