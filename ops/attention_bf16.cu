// The kernels of bfloat16 cells.
#include "attention_kernels.cuh"

namespace kvjax {

Choice ChooseBf16(const AttentionShape& shape, bool run) {
  return ChooseOf<uint16_t>(shape, run);
}

Status PrepareBf16() { return PrepareOf<uint16_t>(); }

}  // namespace kvjax
