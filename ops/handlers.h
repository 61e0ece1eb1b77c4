// What the FFI handlers of both platforms share: operands to shapes, checks, C symbols.
#pragma once

#include <string>

#include "attend.h"
#include "attention.h"
#include "registry.h"
#include "xla/ffi/api/ffi.h"

#define KVJAX_ABI 3
#define KVJAX_EXPORT extern "C" __attribute__((visibility("default")))

namespace kvjax {

namespace ffi = xla::ffi;

inline ffi::Error ToError(const Status& status) {
  switch (status.code) {
    case StatusCode::kOk: return ffi::Error::Success();
    case StatusCode::kInvalid:
      return ffi::Error::InvalidArgument("kvjax: " + status.message);
    case StatusCode::kExhausted:
      return ffi::Error(ffi::ErrorCode::kResourceExhausted, "kvjax: " + status.message);
    default: return ffi::Error::Internal("kvjax: " + status.message);
  }
}

// Bound by begin. The tail holds the layers of `tail_layers` one after another; each of
// their sequences has `num_cells` cells, all but its first `first_cells` in the tail.
struct BeginAttrs {
  int64_t ring_id, num_cells;
  ffi::Span<const int64_t> tail_layers, first_cells, attend_layers, attend_windows;
};

// A step's plan out of begin's operands; lengths are filled in by the caller.
Status MakePlan(const BeginAttrs& attrs, const ffi::AnyBuffer& tokens,
                const ffi::Buffer<ffi::S32>& lengths,
                const ffi::Buffer<ffi::U32>& stamp, const ffi::AnyBuffer& tail,
                StepPlan* plan);

// A layer within a part [rows, K, R]: cell s of sequence b is row
// first + b * num_cells + s.
struct Extent {
  int64_t first, num_cells;

  char* In(const ffi::AnyBuffer& part) const;
};

// What attend and its parts agree on.
struct AttendOperands {
  ffi::AnyBuffer q, rows;
  ffi::Buffer<ffi::S32> lengths, where;
  ffi::RemainingArgs parts;  // device part, then tail; those that hold the layer
  Extent device, tail;       // no cells: not among the parts
};
struct AttendAttrs {
  float scale, soft_cap;
  int64_t window, value_dim;
};

Status MakeShape(const AttendOperands& operands, const AttendAttrs& attrs,
                 AttentionShape* shape);

// The call of an attend over a tail, whose operands MakeShape has checked.
AttendCall MakeCall(const AttendOperands& operands, const AttentionShape& shape,
                    AttendKey key);

// The extent must lie in the part, and rows must fit it.
Status CheckAppend(const ffi::AnyBuffer& part, const Extent& extent,
                   const ffi::AnyBuffer& rows, const ffi::Buffer<ffi::S32>& where);

// The error of an op that never came to its launches. The program ends with it, and XLA
// frees its tail: what was sent is joined to `compute` first.
ffi::Error AbortStep(Ring& ring, Stream compute, const Status& status);

// Whether a C symbol succeeded; if not, why goes to `reason`, cut to `size` bytes.
bool Told(const Status& status, char* reason, int64_t size);

// A step's new stamp: unique in this process, never 0.
uint64_t NextStamp();

}  // namespace kvjax
