#include "timeline.h"

namespace kvjax {
namespace {

bool OnTransfer(MarkKind kind) { return kind <= MarkKind::kCopy; }

}  // namespace

Timeline::~Timeline() {
  for (Event point : points_) transport_.FreeEvent(point);
  if (start_ != nullptr) transport_.FreeEvent(start_);
}

Status Timeline::Start(int64_t max_marks) {
  // All of them now: nothing is made while a program runs.
  for (int64_t i = 0; i < max_marks; ++i) {
    Event point = nullptr;
    KVJAX_RETURN_IF_ERROR(transport_.MakeTimedEvent(&point));
    points_.push_back(point);
  }
  marks_.reserve(max_marks);
  KVJAX_RETURN_IF_ERROR(transport_.MakeTimedEvent(&start_));
  return StartClock();
}

// On a stream of its own: the ring may have none yet, and XLA's is not known.
Status Timeline::StartClock() {
  Stream stream = nullptr;
  KVJAX_RETURN_IF_ERROR(transport_.MakeStream(&stream));
  Status status = transport_.Record(start_, stream);
  if (status.ok()) status = transport_.Synchronize(start_);
  transport_.FreeStream(stream);
  return status;
}

void Timeline::Add(Stream stream, const Mark& mark) {
  if (marks_.size() == points_.size()) {
    missed_ += 1;
    return;
  }
  // If it fails, so does what the ring enqueues next, and Read.
  (void)transport_.Record(points_[marks_.size()], stream);
  marks_.push_back(mark);
}

Status Timeline::Read(std::vector<Mark>* marks) {
  // Of each stream: its last point and when that was passed. A device tells times as
  // floats; those between neighbours are short, so they keep their precision.
  Event last[] = {start_, start_};
  double before[] = {0, 0};
  for (size_t i = 0; i < marks_.size(); ++i) {
    Mark& mark = marks_[i];
    // Only points that were passed tell their time.
    KVJAX_RETURN_IF_ERROR(transport_.Synchronize(points_[i]));
    const bool stream = OnTransfer(mark.kind);
    double took_s = 0;
    KVJAX_RETURN_IF_ERROR(transport_.Elapsed(last[stream], points_[i], &took_s));
    mark.begin_s = before[stream];
    mark.end_s = before[stream] += took_s;
    last[stream] = points_[i];
  }
  *marks = std::move(marks_);
  return Status::Ok();
}

}  // namespace kvjax
