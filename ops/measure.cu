// measure.h on a GPU. Times are those of the device's own events.
#include <functional>

#include "measure.h"
#include "timed_stream.h"

namespace kvjax {
namespace {

constexpr int kThreads = 512;
constexpr int kBlocksPerProcessor = 4;
constexpr int kLoads = 8;  // of 16 bytes that a thread has on the way

__device__ uint32_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  return uint32_t((x ^ (x >> 27)) * 0x94d049bb133111ebu >> 32);
}

// Bytes without a pattern: zeros are said to be read faster.
__global__ void Scramble(uint32_t* words, int64_t count) {
  const int64_t stride = int64_t(gridDim.x) * blockDim.x;
  int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i < count; i += stride) words[i] = Mix(i + 1);
}

// Reads `count` vectors. Writes only if they fold to `never`, which nothing can know
// before it has read them all.
__global__ void __launch_bounds__(kThreads)
    Read(const uint4* vectors, int64_t count, uint32_t never, uint32_t* found) {
  const int64_t stride = int64_t(gridDim.x) * kThreads;
  int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  uint32_t folded = 0;
  for (; i + (kLoads - 1) * stride < count; i += kLoads * stride) {
    uint4 loaded[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j) loaded[j] = __ldcs(vectors + i + j * stride);
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      folded ^= loaded[j].x ^ loaded[j].y ^ loaded[j].z ^ loaded[j].w;
    }
  }
  for (; i < count; i += stride) {
    const uint4 v = __ldcs(vectors + i);
    folded ^= v.x ^ v.y ^ v.z ^ v.w;
  }
  if (folded == never) *found = folded;
}

// What a measurement takes of a device while it lives.
class Bench {
 public:
  explicit Bench(int device) : timed_(device) {}
  ~Bench() {
    (void)cudaFree(on_device_);
    (void)cudaFreeHost(on_host_);
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  Status Open(int64_t host_bytes, int64_t device_bytes) {
    KVJAX_RETURN_IF_ERROR(timed_.Open());
    KVJAX_RETURN_IF_CUDA_ERROR(cudaMalloc(&on_device_, device_bytes));
    if (host_bytes == 0) return Status::Ok();
    return KVJAX_CUDA(cudaHostAlloc(&on_host_, host_bytes, cudaHostAllocDefault));
  }

  // Pinned memory has the same address on the device.
  Status Fill(char* memory, int64_t bytes) {
    Scramble<<<256, kThreads, 0, stream()>>>(reinterpret_cast<uint32_t*>(memory),
                                             bytes / 4);
    return KVJAX_CUDA(cudaGetLastError());
  }

  // Runs `pass`, timed.
  Status Time(double* seconds, const std::function<Status()>& pass) {
    KVJAX_RETURN_IF_ERROR(timed_.Start());
    KVJAX_RETURN_IF_ERROR(pass());
    return timed_.Stop(seconds);
  }

  cudaStream_t stream() const { return timed_.get(); }
  char* on_device() const { return static_cast<char*>(on_device_); }
  char* on_host() const { return static_cast<char*>(on_host_); }

 private:
  TimedStream timed_;
  void* on_device_ = nullptr;
  void* on_host_ = nullptr;
};

class CudaLink : public Link {
 public:
  CudaLink(int64_t device, int64_t piece_bytes, int64_t pieces)
      : bench_(static_cast<int>(device)), piece_bytes_(piece_bytes), pieces_(pieces) {}

  Status Fill() {
    KVJAX_RETURN_IF_ERROR(bench_.Open(piece_bytes_ * pieces_, piece_bytes_));
    return bench_.Fill(bench_.on_host(), piece_bytes_ * pieces_);
  }

  Status Copy(double* seconds) override {
    return bench_.Time(seconds, [this] {
      for (int64_t i = 0; i < pieces_; ++i) {
        KVJAX_RETURN_IF_CUDA_ERROR(
            cudaMemcpyAsync(bench_.on_device(), bench_.on_host() + i * piece_bytes_,
                            piece_bytes_, cudaMemcpyHostToDevice, bench_.stream()));
      }
      return Status::Ok();
    });
  }

 private:
  Bench bench_;
  const int64_t piece_bytes_, pieces_;
};

}  // namespace

Status Link::Open(int64_t device, int64_t piece_bytes, int64_t pieces,
                  std::unique_ptr<Link>* link) {
  auto opened = std::make_unique<CudaLink>(device, piece_bytes, pieces);
  KVJAX_RETURN_IF_ERROR(opened->Fill());
  *link = std::move(opened);
  return Status::Ok();
}

Status MeasureRead(int64_t device, int64_t bytes, int64_t passes, double* seconds) {
  Bench bench(static_cast<int>(device));
  KVJAX_RETURN_IF_ERROR(bench.Open(0, bytes + 16));
  int processors = 0;
  KVJAX_RETURN_IF_CUDA_ERROR(cudaDeviceGetAttribute(
      &processors, cudaDevAttrMultiProcessorCount, static_cast<int>(device)));
  const int blocks = kBlocksPerProcessor * processors;
  const auto found = reinterpret_cast<uint32_t*>(bench.on_device() + bytes);
  KVJAX_RETURN_IF_ERROR(bench.Fill(bench.on_device(), bytes));
  const auto read = [&] {
    Read<<<blocks, kThreads, 0, bench.stream()>>>(
        reinterpret_cast<const uint4*>(bench.on_device()), bytes / 16, 0x9e3779b9u,
        found);
    return KVJAX_CUDA(cudaGetLastError());
  };
  KVJAX_RETURN_IF_ERROR(read());
  for (int64_t i = 0; i < passes; ++i) {
    KVJAX_RETURN_IF_ERROR(bench.Time(&seconds[i], read));
  }
  return Status::Ok();
}

Status DeviceMemory(int64_t device, int64_t* free_bytes, int64_t* total_bytes) {
  Bench bench(static_cast<int>(device));
  size_t free_now = 0, total = 0;
  KVJAX_RETURN_IF_CUDA_ERROR(cudaMemGetInfo(&free_now, &total));
  *free_bytes = static_cast<int64_t>(free_now);
  *total_bytes = static_cast<int64_t>(total);
  return Status::Ok();
}

}  // namespace kvjax
