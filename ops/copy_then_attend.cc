// What both platforms share of copy_then_attend.h: the cut, and the C symbol.
#include "copy_then_attend.h"

#include <string>

#include "handlers.h"

namespace kvjax {

Status CutLayer(const CopyThenAttend& work, std::vector<Segment>* segments) {
  const AttentionShape& shape = work.shape;
  if (work.slot_bytes < kBlock * work.row_bytes()) {
    return Status::Invalid("a slot of " + std::to_string(work.slot_bytes) +
                           " bytes holds no block of cells");
  }
  for (int32_t i = 0; i < shape.num_seqs; ++i) {
    if (work.lengths[i] < 1 || work.lengths[i] >= shape.capacity) {
      return Status::Invalid("sequence " + std::to_string(i) + " holds " +
                             std::to_string(work.lengths[i]) + " of " +
                             std::to_string(shape.capacity) +
                             " cells: it must hold one and have room for one");
    }
  }
  const LayerShape layer{shape.num_seqs, shape.num_new,    0,
                         shape.capacity, work.row_bytes(), shape.window};
  *segments = CutTail(layer, work.lengths, work.slot_bytes);
  return Status::Ok();
}

}  // namespace kvjax

// True, or false and a reason, cut to `size` bytes. `shape` by its fields in order.
KVJAX_EXPORT bool kvjax_copy_then_attend(int64_t device,
                                         const kvjax::AttentionShape* shape,
                                         int64_t num_layers, const char* const* tails,
                                         const int32_t* lengths, const void* q,
                                         const void* rows, int64_t slot_bytes,
                                         int64_t passes, void* out, double* seconds,
                                         char* reason, int64_t size) {
  const kvjax::CopyThenAttend work{*shape, num_layers, tails,  lengths, q,
                                   rows,   slot_bytes, passes, out};
  return kvjax::Told(kvjax::RunCopyThenAttend(device, work, seconds), reason, size);
}
