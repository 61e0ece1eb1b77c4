// The kernels of float32 cells.
#include "attention_kernels.cuh"

namespace kvjax {

Choice ChooseF32(const AttentionShape& shape, bool run) {
  return ChooseOf<float>(shape, run);
}

Status PrepareF32() { return PrepareOf<float>(); }

}  // namespace kvjax
