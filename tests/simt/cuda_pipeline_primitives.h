// Asynchronous copies into shared memory, played on a host: each is done at once or
// when it is waited for, whichever was drawn.
#pragma once

#include "cuda_runtime.h"

inline void __pipeline_memcpy_async(void* target, const void* source, size_t bytes) {
  simt::Cta::current()->CopyLater(target, source, bytes);
}
inline void __pipeline_commit() { simt::Cta::current()->CommitCopies(); }
#define __pipeline_wait_prior(groups) \
  simt::Cta::current()->AwaitCopies(__FILE__, __LINE__, groups)
