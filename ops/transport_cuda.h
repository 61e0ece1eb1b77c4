// The transport of a GPU: copy engine, CUDA streams and events, memory outside XLA's
// allocator; and the pinned words through which kernels tell the host.
#pragma once

#include <cuda_runtime.h>

#include "transport.h"

namespace kvjax {

class CudaTransport : public Transport {
 public:
  explicit CudaTransport(int device) : device_(device) {}
  ~CudaTransport() override;

  // Pinned words that kernels may write and the host reads after a wait: at least
  // `count` of them, 0 at first. Call before a program runs, when no kernel can write
  // them.
  Status PrepareWords(int64_t count);
  int32_t* words() const { return words_; }
  int64_t num_words() const { return num_words_; }

  Status Allocate(int64_t bytes, char** memory) override;
  void Free(char* memory) override;
  Status FreeBytes(int64_t* bytes) override;
  Status MakeStream(Stream* stream) override;
  void FreeStream(Stream stream) override;
  Status MakeEvent(Event* event) override;
  void FreeEvent(Event event) override;
  Status MakeTimedEvent(Event* event) override;
  Status Elapsed(Event from, Event to, double* seconds) override;
  Status Enqueue(Stream stream, const std::vector<Copy>& copies, const char* source,
                 char* target) override;
  Status Record(Event event, Stream stream) override;
  Status Wait(Stream stream, Event event) override;
  bool SourcesStayMapped() const override { return true; }
  Status Synchronize(Event event) override;

 private:
  const int device_;
  int32_t* words_ = nullptr;
  int64_t num_words_ = 0;
};

}  // namespace kvjax
