// Makes a device current while it lives: calls come from XLA's threads and Python's.
#pragma once

#include "cuda_status.h"

namespace kvjax {

class OnDevice {
 public:
  explicit OnDevice(int device)
      : before_(Current()), status_(KVJAX_CUDA(cudaSetDevice(device))) {}
  ~OnDevice() { (void)cudaSetDevice(before_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  // Whether there is such a device.
  const Status& status() const { return status_; }

 private:
  static int Current() {
    int device = 0;
    (void)cudaGetDevice(&device);
    return device;
  }

  const int before_;
  const Status status_;
};

}  // namespace kvjax
