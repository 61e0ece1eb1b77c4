#include "handlers.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace kvjax {
namespace {

int64_t RowBytes(const ffi::AnyBuffer& part) {
  const auto dims = part.dimensions();
  return dims[1] * dims[2] * int64_t(ffi::ByteWidth(part.element_type()));
}

Status TypeOf(const ffi::AnyBuffer& buffer, const char* name, Type* type) {
  switch (buffer.element_type()) {
    case ffi::F32: *type = Type::kF32; return Status::Ok();
    case ffi::BF16: *type = Type::kBf16; return Status::Ok();
    default: return Status::Invalid(std::string(name) + " must be float32 or bfloat16");
  }
}

std::string Text(const ffi::AnyBuffer& buffer) {
  std::string text = "[";
  for (int64_t dim : buffer.dimensions()) text += std::to_string(dim) + ",";
  text.back() = ']';
  return text;
}

Status CheckRank(const ffi::AnyBuffer& buffer, const char* name, size_t rank) {
  if (buffer.dimensions().size() == rank) return Status::Ok();
  return Status::Invalid(std::string(name) + " must have " + std::to_string(rank) +
                         " axes, got " + std::to_string(buffer.dimensions().size()));
}

// Whether `part` [rows, K, R] holds an extent of as many sequences as `rows`
// [B, T, K, R], in such records.
Status CheckExtent(const ffi::AnyBuffer& part, const Extent& extent,
                   const ffi::AnyBuffer& rows) {
  KVJAX_RETURN_IF_ERROR(CheckRank(part, "a part", 3));
  KVJAX_RETURN_IF_ERROR(CheckRank(rows, "rows", 4));
  const auto p = part.dimensions(), r = rows.dimensions();
  const bool fits =
      p[1] == r[2] && p[2] == r[3] && part.element_type() == rows.element_type() &&
      extent.first >= 0 && extent.first <= p[0] && extent.num_cells > 0 &&
      extent.num_cells <= (p[0] - extent.first) / std::max<int64_t>(r[0], 1);
  if (fits) return Status::Ok();
  return Status::Invalid("rows " + Text(rows) + " don't fit " +
                         std::to_string(extent.num_cells) + " cells a sequence from " +
                         std::to_string(extent.first) + " on in a part " + Text(part));
}

Status NoRing() { return Status::Invalid("there is no such ring"); }

}  // namespace

Status MakePlan(const BeginAttrs& attrs, const ffi::AnyBuffer& tokens,
                const ffi::Buffer<ffi::S32>& lengths,
                const ffi::Buffer<ffi::U32>& stamp, const ffi::AnyBuffer& tail,
                StepPlan* plan) {
  KVJAX_RETURN_IF_ERROR(CheckRank(tokens, "tokens", 2));
  KVJAX_RETURN_IF_ERROR(CheckRank(tail, "the tail", 3));
  if (int64_t(lengths.element_count()) != tokens.dimensions()[0] ||
      stamp.element_count() != 2) {
    return Status::Invalid("begin got tokens " + Text(tokens) + ", " +
                           std::to_string(lengths.element_count()) + " lengths and " +
                           std::to_string(stamp.element_count()) +
                           " words of a stamp of 2");
  }
  if (attrs.first_cells.size() != attrs.tail_layers.size() ||
      attrs.attend_layers.size() != attrs.attend_windows.size()) {
    return Status::Invalid("begin needs a first cell a layer and a window an attend");
  }
  plan->num_new = int32_t(tokens.dimensions()[1]);
  const int64_t num_seqs = tokens.dimensions()[0];
  Extent extent{0, 0};
  for (size_t i = 0; i < attrs.tail_layers.size(); ++i) {
    extent.num_cells = attrs.num_cells - attrs.first_cells[i];
    plan->tails.push_back({attrs.tail_layers[i], extent.In(tail), attrs.first_cells[i],
                           extent.num_cells, RowBytes(tail)});
    extent.first += num_seqs * extent.num_cells;
  }
  if (extent.first != tail.dimensions()[0]) {
    return Status::Invalid("the tail " + Text(tail) + " should have " +
                           std::to_string(extent.first) + " rows");
  }
  for (size_t i = 0; i < attrs.attend_layers.size(); ++i) {
    plan->attends.push_back({attrs.attend_layers[i], attrs.attend_windows[i]});
  }
  return Status::Ok();
}

char* Extent::In(const ffi::AnyBuffer& part) const {
  return static_cast<char*>(part.untyped_data()) + first * RowBytes(part);
}

Status MakeShape(const AttendOperands& operands, const AttendAttrs& attrs,
                 AttentionShape* shape) {
  KVJAX_RETURN_IF_ERROR(CheckRank(operands.q, "q", 4));
  KVJAX_RETURN_IF_ERROR(CheckRank(operands.rows, "rows", 4));
  const auto q = operands.q.dimensions(), rows = operands.rows.dimensions();
  const size_t num_parts =
      (operands.device.num_cells != 0) + (operands.tail.num_cells != 0);
  if (num_parts == 0 || num_parts != operands.parts.size()) {
    return Status::Invalid("attend got " + std::to_string(operands.parts.size()) +
                           " parts, the layer lies in " + std::to_string(num_parts));
  }
  size_t i = 0;
  for (const Extent& extent : {operands.device, operands.tail}) {
    if (extent.num_cells == 0) continue;
    const ffi::AnyBuffer part = *operands.parts.get<ffi::AnyBuffer>(i++);
    KVJAX_RETURN_IF_ERROR(CheckExtent(part, extent, operands.rows));
  }
  *shape = {};
  shape->num_seqs = int32_t(q[0]);
  shape->num_new = int32_t(q[1]);
  shape->num_heads = int32_t(q[2]);
  shape->head_dim = int32_t(q[3]);
  shape->num_kv_heads = int32_t(rows[2]);
  shape->record_size = int32_t(rows[3]);
  shape->value_dim = int32_t(attrs.value_dim);
  shape->capacity = int32_t(operands.device.num_cells + operands.tail.num_cells);
  shape->window = int32_t(attrs.window);
  shape->scale = attrs.scale;
  shape->soft_cap = attrs.soft_cap;
  KVJAX_RETURN_IF_ERROR(TypeOf(operands.q, "q", &shape->query_type));
  KVJAX_RETURN_IF_ERROR(TypeOf(operands.rows, "rows", &shape->cell_type));
  const bool fits = rows[0] == q[0] && rows[1] == q[1] && rows[2] > 0 &&
                    q[2] % rows[2] == 0 && shape->head_dim % kLanes == 0 &&
                    shape->head_dim <= 256 && shape->value_dim % kLanes == 0 &&
                    shape->value_dim <= 256 &&
                    shape->head_dim + shape->value_dim <= shape->record_size &&
                    int64_t(operands.where.element_count()) == q[0] * q[1] &&
                    int64_t(operands.lengths.element_count()) == q[0];
  if (fits) return Status::Ok();
  return Status::Invalid("q " + Text(operands.q) + " doesn't fit rows " +
                         Text(operands.rows) + ", values of " +
                         std::to_string(attrs.value_dim) + ", lengths or where");
}

AttendCall MakeCall(const AttendOperands& operands, const AttentionShape& shape,
                    AttendKey key) {
  const size_t num_parts = operands.parts.size();
  const ffi::AnyBuffer tail = *operands.parts.get<ffi::AnyBuffer>(num_parts - 1);
  AttendCall call{key,
                  shape.num_seqs,
                  shape.num_new,
                  RowBytes(tail),
                  operands.device.num_cells,
                  operands.tail.num_cells,
                  nullptr,
                  operands.tail.In(tail)};
  if (call.device_cells > 0) {
    call.device = operands.device.In(*operands.parts.get<ffi::AnyBuffer>(0));
  }
  return call;
}

Status CheckAppend(const ffi::AnyBuffer& part, const Extent& extent,
                   const ffi::AnyBuffer& rows, const ffi::Buffer<ffi::S32>& where) {
  KVJAX_RETURN_IF_ERROR(CheckExtent(part, extent, rows));
  const auto dims = rows.dimensions();
  if (int64_t(where.element_count()) == dims[0] * dims[1]) return Status::Ok();
  return Status::Invalid("rows " + Text(rows) + " don't fit where, which has " +
                         std::to_string(where.element_count()) + " cells");
}

ffi::Error AbortStep(Ring& ring, Stream compute, const Status& status) {
  std::lock_guard<std::mutex> lock(ring.mutex());
  (void)ring.Abort(compute);
  return ToError(status);
}

bool Told(const Status& status, char* reason, int64_t size) {
  if (status.ok()) return true;
  std::strncpy(reason, status.message.c_str(), size - 1);
  reason[size - 1] = 0;
  return false;
}

uint64_t NextStamp() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

}  // namespace kvjax

KVJAX_EXPORT int kvjax_abi() { return KVJAX_ABI; }
KVJAX_EXPORT int kvjax_ffi_minor() { return XLA_FFI_API_MINOR; }

// Names of the counts of kvjax_ring_stats, in order, each followed by a comma.
KVJAX_EXPORT const char* kvjax_ring_stat_names() {
#define KVJAX_NAME(name) #name ","
  return KVJAX_RING_COUNTS(KVJAX_NAME);
#undef KVJAX_NAME
}

// Fills `counts` in that order; false if there is no such ring.
KVJAX_EXPORT bool kvjax_ring_stats(int64_t ring_id, int64_t device, int64_t* counts) {
  const auto ring = kvjax::PeekRing(ring_id, device);
  if (ring == nullptr) return false;
  std::lock_guard<std::mutex> lock(ring->mutex());
  const kvjax::RingStats stats = ring->stats();
#define KVJAX_PUT(name) *counts++ = stats.name;
  KVJAX_RING_COUNTS(KVJAX_PUT)
#undef KVJAX_PUT
  return true;
}

// Why there is no ring, cut to `size` bytes; "" while there is nothing to tell.
KVJAX_EXPORT void kvjax_ring_decline(int64_t ring_id, int64_t device, char* text,
                                     int64_t size) {
  const auto ring = kvjax::PeekRing(ring_id, device);
  if (ring == nullptr || size < 1) return;
  std::lock_guard<std::mutex> lock(ring->mutex());
  std::strncpy(text, ring->decline().c_str(), size - 1);
  text[size - 1] = 0;
}

KVJAX_EXPORT void kvjax_ring_close(int64_t ring_id, int64_t device) {
  kvjax::CloseRing(ring_id, device);
}

// Names of MarkKind in order, each followed by a comma.
KVJAX_EXPORT const char* kvjax_trace_kinds() {
#define KVJAX_NAME(enumerator, name) name ","
  return KVJAX_MARK_KINDS(KVJAX_NAME);
#undef KVJAX_NAME
}

// See Ring::StartTrace. The next two: true, or false and a reason.
KVJAX_EXPORT bool kvjax_trace_start(int64_t ring_id, int64_t device, int64_t max_marks,
                                    char* reason, int64_t size) {
  const auto ring = kvjax::PeekRing(ring_id, device);
  if (ring == nullptr) return kvjax::Told(kvjax::NoRing(), reason, size);
  std::lock_guard<std::mutex> lock(ring->mutex());
  return kvjax::Told(ring->StartTrace(max_marks), reason, size);
}

// See Ring::StopTrace. Fills `marks`, which has room for the max_marks of the start.
KVJAX_EXPORT bool kvjax_trace_stop(int64_t ring_id, int64_t device, kvjax::Mark* marks,
                                   int64_t* num_marks, int64_t* missed, char* reason,
                                   int64_t size) {
  const auto ring = kvjax::PeekRing(ring_id, device);
  if (ring == nullptr) return kvjax::Told(kvjax::NoRing(), reason, size);
  std::lock_guard<std::mutex> lock(ring->mutex());
  std::vector<kvjax::Mark> noted;
  const kvjax::Status status = ring->StopTrace(&noted, missed);
  if (!status.ok()) return kvjax::Told(status, reason, size);
  std::copy(noted.begin(), noted.end(), marks);
  *num_marks = int64_t(noted.size());
  return true;
}
