// A stream of one's own on a GPU, and what was enqueued on it timed by the device's
// events; for measurements.
#pragma once

#include <cuda_runtime.h>

#include "on_device.h"

namespace kvjax {

// The device is current while it lives. Waits for its stream when it goes.
class TimedStream {
 public:
  explicit TimedStream(int device) : on_(device) {}
  ~TimedStream() {
    if (start_ != nullptr) (void)cudaEventDestroy(start_);
    if (end_ != nullptr) (void)cudaEventDestroy(end_);
    if (stream_ != nullptr) {
      (void)cudaStreamSynchronize(stream_);
      (void)cudaStreamDestroy(stream_);
    }
    (void)cudaGetLastError();  // not sticky: leave none for XLA
  }
  TimedStream(const TimedStream&) = delete;
  TimedStream& operator=(const TimedStream&) = delete;

  Status Open() {
    KVJAX_RETURN_IF_ERROR(on_.status());
    KVJAX_RETURN_IF_CUDA_ERROR(cudaEventCreate(&start_));
    KVJAX_RETURN_IF_CUDA_ERROR(cudaEventCreate(&end_));
    return KVJAX_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }

  Status Start() { return KVJAX_CUDA(cudaEventRecord(start_, stream_)); }

  // Waits for all since Start.
  Status Stop(double* seconds) {
    KVJAX_RETURN_IF_CUDA_ERROR(cudaEventRecord(end_, stream_));
    KVJAX_RETURN_IF_CUDA_ERROR(cudaEventSynchronize(end_));
    float milliseconds = 0;
    KVJAX_RETURN_IF_CUDA_ERROR(cudaEventElapsedTime(&milliseconds, start_, end_));
    *seconds = milliseconds / 1e3;
    return Status::Ok();
  }

  cudaStream_t get() const { return stream_; }

 private:
  OnDevice on_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t start_ = nullptr, end_ = nullptr;
};

}  // namespace kvjax
