#include "transport_cuda.h"

#include "copies_cuda.h"
#include "cuda_status.h"
#include "on_device.h"

namespace kvjax {
namespace {

cudaStream_t AsStream(Stream stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t AsEvent(Event event) { return static_cast<cudaEvent_t>(event); }

}  // namespace

CudaTransport::~CudaTransport() {
  const OnDevice on(device_);
  if (words_ != nullptr) (void)cudaFreeHost(words_);
}

Status CudaTransport::PrepareWords(int64_t count) {
  if (count <= num_words_) return Status::Ok();
  const OnDevice on(device_);
  int32_t* words = nullptr;
  KVJAX_RETURN_IF_CUDA_ERROR(
      cudaHostAlloc(reinterpret_cast<void**>(&words), count * 4, cudaHostAllocDefault));
  for (int64_t i = 0; i < count; ++i) words[i] = 0;
  if (words_ != nullptr) (void)cudaFreeHost(words_);
  words_ = words;
  num_words_ = count;
  return Status::Ok();
}

Status CudaTransport::Allocate(int64_t bytes, char** memory) {
  const OnDevice on(device_);
  return KVJAX_CUDA(cudaMalloc(reinterpret_cast<void**>(memory), bytes));
}

void CudaTransport::Free(char* memory) {
  const OnDevice on(device_);
  (void)cudaFree(memory);
}

Status CudaTransport::FreeBytes(int64_t* bytes) {
  const OnDevice on(device_);
  size_t free_bytes = 0, total = 0;
  KVJAX_RETURN_IF_CUDA_ERROR(cudaMemGetInfo(&free_bytes, &total));
  *bytes = int64_t(free_bytes);
  return Status::Ok();
}

Status CudaTransport::MakeStream(Stream* stream) {
  const OnDevice on(device_);
  int least = 0, greatest = 0;
  KVJAX_RETURN_IF_CUDA_ERROR(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  cudaStream_t made = nullptr;
  KVJAX_RETURN_IF_CUDA_ERROR(
      cudaStreamCreateWithPriority(&made, cudaStreamNonBlocking, greatest));
  *stream = made;
  return Status::Ok();
}

void CudaTransport::FreeStream(Stream stream) {
  const OnDevice on(device_);
  (void)cudaStreamDestroy(AsStream(stream));
}

Status CudaTransport::MakeEvent(Event* event) {
  const OnDevice on(device_);
  cudaEvent_t made = nullptr;
  KVJAX_RETURN_IF_CUDA_ERROR(cudaEventCreateWithFlags(&made, cudaEventDisableTiming));
  *event = made;
  return Status::Ok();
}

void CudaTransport::FreeEvent(Event event) {
  const OnDevice on(device_);
  (void)cudaEventDestroy(AsEvent(event));
}

Status CudaTransport::MakeTimedEvent(Event* event) {
  const OnDevice on(device_);
  cudaEvent_t made = nullptr;
  KVJAX_RETURN_IF_CUDA_ERROR(cudaEventCreate(&made));
  *event = made;
  return Status::Ok();
}

Status CudaTransport::Elapsed(Event from, Event to, double* seconds) {
  float ms = 0;
  KVJAX_RETURN_IF_CUDA_ERROR(cudaEventElapsedTime(&ms, AsEvent(from), AsEvent(to)));
  *seconds = double(ms) / 1e3;
  return Status::Ok();
}

Status CudaTransport::Enqueue(Stream stream, const std::vector<Copy>& copies,
                              const char* source, char* target) {
  return EnqueueCopies(AsStream(stream), copies, source, target);
}

Status CudaTransport::Record(Event event, Stream stream) {
  return KVJAX_CUDA(cudaEventRecord(AsEvent(event), AsStream(stream)));
}

Status CudaTransport::Wait(Stream stream, Event event) {
  return KVJAX_CUDA(cudaStreamWaitEvent(AsStream(stream), AsEvent(event), 0));
}

Status CudaTransport::Synchronize(Event event) {
  return KVJAX_CUDA(cudaEventSynchronize(AsEvent(event)));
}

}  // namespace kvjax
