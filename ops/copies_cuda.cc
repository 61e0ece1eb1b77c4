#include "copies_cuda.h"

#include "cuda_status.h"

namespace kvjax {
namespace {

// Runs of bytes: what one call takes.
struct Runs {
  std::vector<void*> targets;
  std::vector<const void*> sources;
  std::vector<size_t> sizes;
};

// All in one call: the copy engine then goes from one to the next without a pause.
Status EnqueueRuns(cudaStream_t stream, const Runs& runs) {
#if CUDART_VERSION >= 13000
  if (runs.sizes.size() > 1) {
    cudaMemcpyAttributes attributes = {};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    size_t first = 0;  // that has them
    return KVJAX_CUDA(cudaMemcpyBatchAsync(runs.targets.data(), runs.sources.data(),
                                           runs.sizes.data(), runs.sizes.size(),
                                           &attributes, &first, 1, stream));
  }
#endif
  for (size_t i = 0; i < runs.sizes.size(); ++i) {
    KVJAX_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(runs.targets[i], runs.sources[i],
                                               runs.sizes[i], cudaMemcpyHostToDevice,
                                               stream));
  }
  return Status::Ok();
}

}  // namespace

Status EnqueueCopies(cudaStream_t stream, const std::vector<Copy>& copies,
                     const char* source, char* target) {
  Runs runs;
  for (const Copy& copy : copies) {
    if (copy.height == 1) {
      runs.targets.push_back(target + copy.target);
      runs.sources.push_back(source + copy.source);
      runs.sizes.push_back(copy.width);
      continue;
    }
    KVJAX_RETURN_IF_CUDA_ERROR(cudaMemcpy2DAsync(
        target + copy.target, copy.target_pitch, source + copy.source,
        copy.source_pitch, copy.width, copy.height, cudaMemcpyHostToDevice, stream));
  }
  return EnqueueRuns(stream, runs);
}

}  // namespace kvjax
