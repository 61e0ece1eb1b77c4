#include "attend.h"

#include <algorithm>
#include <string>

namespace kvjax {
namespace {

// A launch's table holds kMaxSpans.
Status LaunchAll(const Launch& launch, const char* base,
                 const std::vector<Span>& spans) {
  for (size_t i = 0; i < spans.size(); i += kMaxSpans) {
    const size_t end = std::min(spans.size(), i + kMaxSpans);
    KVJAX_RETURN_IF_ERROR(launch(base, {spans.begin() + i, spans.begin() + end}));
  }
  return Status::Ok();
}

Status CheckCall(const AttendCall& call, const LayerShape& shape) {
  const bool same = shape.num_seqs == call.num_seqs && shape.num_new == call.num_new &&
                    shape.device_cells == call.device_cells &&
                    shape.tail_cells == call.tail_cells &&
                    shape.row_bytes == call.row_bytes;
  if (same) return Status::Ok();
  const auto text = [](const auto& x) {
    return std::to_string(x.num_seqs) + " sequences of " + std::to_string(x.num_new) +
           " tokens, " + std::to_string(x.device_cells) + " + " +
           std::to_string(x.tail_cells) + " cells of " + std::to_string(x.row_bytes) +
           " bytes";
  };
  return Status::Invalid("attend of layer " + std::to_string(call.key.layer) + " has " +
                         text(call) + ", begin had " + text(shape) +
                         ": caches that differ need a ring_id each");
}

Status AttendDelivered(Ring& ring, Stream compute, const std::vector<Segment>& segments,
                       const Launch& launch) {
  for (const Segment& segment : segments) {
    const char* slot = nullptr;
    KVJAX_RETURN_IF_ERROR(ring.Acquire(compute, &slot));
    KVJAX_RETURN_IF_ERROR(launch(slot, segment.spans));
    KVJAX_RETURN_IF_ERROR(ring.Release(compute));
  }
  return ring.Finish(compute);
}

Status AttendOrdered(Ring& ring, Stream compute, const std::vector<Segment>& segments,
                     const AttendCall& call, const Launch& launch,
                     const Scratch& scratch) {
  if (segments.empty()) return Status::Ok();
  char* memory = nullptr;
  KVJAX_RETURN_IF_ERROR(scratch(ring.SegmentBytes(call.row_bytes), &memory));
  for (const Segment& segment : segments) {
    KVJAX_RETURN_IF_ERROR(ring.CopyOrdered(compute, segment, call.tail, memory));
    ring.NoteWork(compute, MarkKind::kOrderedCopy, call.key.layer,
                  segment.live_bytes + segment.gap_bytes);
    KVJAX_RETURN_IF_ERROR(launch(memory, segment.spans));
    ring.NoteWork(compute, MarkKind::kLaunch, call.key.layer);
  }
  return Status::Ok();
}

Status AttendPlanned(Ring& ring, Stream compute, const AttendCall& call,
                     const Launch& launch, const Scratch& scratch) {
  Ring::Route route;
  KVJAX_RETURN_IF_ERROR(ring.Open(compute, call.key, call.tail, &route));
  KVJAX_RETURN_IF_ERROR(CheckCall(call, route.shape));
  const auto resident = ResidentSpans(route.shape, ring.lengths().data());
  KVJAX_RETURN_IF_ERROR(LaunchAll(launch, call.device, resident));
  ring.NoteWork(compute, MarkKind::kResident, call.key.layer);
  return route.delivered
             ? AttendDelivered(ring, compute, *route.segments, launch)
             : AttendOrdered(ring, compute, *route.segments, call, launch, scratch);
}

}  // namespace

Status Attend(Ring& ring, Stream compute, const AttendCall& call, const Launch& launch,
              const Scratch& scratch) {
  const Status status = AttendPlanned(ring, compute, call, launch, scratch);
  // The program ends with this error, and XLA frees its tails.
  if (!status.ok()) (void)ring.Abort(compute);
  return status;
}

}  // namespace kvjax
