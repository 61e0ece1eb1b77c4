#include "ring.h"

#include <algorithm>
#include <cstdio>

#include "block_math.h"

namespace kvjax {
namespace {

LayerShape ShapeOf(const StepPlan& plan, const Tail& tail, int64_t window) {
  return {int32_t(plan.lengths.size()), plan.num_new,   tail.device_cells,
          tail.tail_cells,              tail.row_bytes, window};
}

}  // namespace

Ring::Ring(const RingSettings& settings, std::unique_ptr<Transport> transport)
    : settings_(settings), transport_(std::move(transport)) {
  if (settings_.num_slots == 0) decline_ = settings_.decline;
}

Ring::~Ring() { Close(); }

void Ring::Prepare() {
  if (memory_ != nullptr) {
    if (idle_steps_ < kIdleSteps) return;
    Drain();
    GiveBack();
    stats_.given_back += 1;
    return;
  }
  if (!decline_.empty() || idle_steps_ >= kIdleSteps) return;
  const Status taken = Take();
  if (taken.ok()) return;
  GiveBack();
  decline_ = taken.message;
  std::fprintf(stderr, "kvjax: no ring, going on with the ordered path: %s\n",
               decline_.c_str());
}

Status Ring::Take() {
  int64_t free_bytes = 0;
  KVJAX_RETURN_IF_ERROR(transport_->FreeBytes(&free_bytes));
  if (free_bytes - settings_.ring_bytes() < settings_.headroom_bytes) {
    return Status::Exhausted(
        "the ring needs " + std::to_string(settings_.ring_bytes()) + " bytes and " +
        std::to_string(settings_.headroom_bytes) + " must stay free, the device has " +
        std::to_string(free_bytes));
  }
  KVJAX_RETURN_IF_ERROR(transport_->Allocate(settings_.ring_bytes(), &memory_));
  stats_.ring_bytes = settings_.ring_bytes();
  stats_.num_slots = settings_.num_slots;
  KVJAX_RETURN_IF_ERROR(transport_->MakeStream(&transfer_));
  KVJAX_RETURN_IF_ERROR(transport_->MakeEvent(&begun_));
  slots_.resize(settings_.num_slots);
  for (Slot& slot : slots_) {
    KVJAX_RETURN_IF_ERROR(transport_->MakeEvent(&slot.ready));
    KVJAX_RETURN_IF_ERROR(transport_->MakeEvent(&slot.release));
  }
  return Status::Ok();
}

// The host waits until no kernel reads a slot and no copy writes one; freeing under them
// corrupts whoever gets the memory next.
void Ring::Drain() {
  for (int64_t i = head_; i < issued_; ++i) {
    (void)transport_->Synchronize(slot_of(base_ + i).ready);
  }
  for (Slot& slot : slots_) {
    if (slot.released) (void)transport_->Synchronize(slot.release);
  }
}

void Ring::GiveBack() {
  for (Slot& slot : slots_) {
    if (slot.ready != nullptr) transport_->FreeEvent(slot.ready);
    if (slot.release != nullptr) transport_->FreeEvent(slot.release);
  }
  slots_.clear();
  if (begun_ != nullptr) transport_->FreeEvent(begun_);
  if (transfer_ != nullptr) transport_->FreeStream(transfer_);
  if (memory_ != nullptr) transport_->Free(memory_);
  begun_ = nullptr;
  transfer_ = nullptr;
  memory_ = nullptr;
  stats_.ring_bytes = stats_.num_slots = 0;
}

Status Ring::Begin(Stream compute, StepPlan plan) {
  KVJAX_RETURN_IF_ERROR(Abort(compute));
  stats_.steps += 1;
  NoteMoved(MovedTails(plan));
  plan_ = std::move(plan);
  Cut();
  if (!delivering()) return Status::Ok();
  // The step's deliveries read cells that the step before appended on `compute`; without
  // this they could be sent before those are written.
  KVJAX_RETURN_IF_ERROR(transport_->Record(begun_, compute));
  KVJAX_RETURN_IF_ERROR(transport_->Wait(transfer_, begun_));
  return Pump();
}

// Lists the attends to come with their segments; layers of one shape share a cut.
void Ring::Cut() {
  base_ += issued_;
  cursor_ = issuing_ = 0;
  head_ = issued_ = 0;
  attends_.clear();
  cuts_.clear();
  int64_t num_segments = 0;
  for (const AttendKey& key : plan_.attends) {
    const Tail* tail = TailOf(key.layer);
    if (tail == nullptr || SegmentBytes(tail->row_bytes) > settings_.slot_bytes) continue;
    const LayerShape shape = ShapeOf(plan_, *tail, key.window);
    const std::vector<Segment>& segments = Segments(shape);
    attends_.push_back({key, tail, shape, &segments, num_segments});
    num_segments += int64_t(segments.size());
  }
  idle_steps_ = num_segments > 0 ? 0 : idle_steps_ + 1;
}

int64_t Ring::SegmentBytes(int64_t row_bytes) const {
  return std::max(settings_.slot_bytes, kBlock * row_bytes);
}

const Tail* Ring::TailOf(int64_t layer) const {
  for (const Tail& tail : plan_.tails) {
    if (tail.layer == layer) return &tail;
  }
  return nullptr;
}

// The cut of a shape, made once a step.
const std::vector<Segment>& Ring::Segments(const LayerShape& shape) {
  const std::vector<int64_t> key = {shape.device_cells, shape.tail_cells, shape.row_bytes,
                                    shape.window};
  auto found = cuts_.find(key);
  if (found == cuts_.end()) {
    auto segments =
        CutTail(shape, plan_.lengths.data(), SegmentBytes(shape.row_bytes));
    found = cuts_.emplace(key, std::move(segments)).first;
  }
  return found->second;
}

// Issues deliveries in the order of consumption while depth and free slots allow.
Status Ring::Pump() {
  if (!delivering()) return Status::Ok();
  for (; issuing_ < attends_.size(); ++issuing_) {
    const PlannedAttend& attend = attends_[issuing_];
    const int64_t end = attend.first_segment + int64_t(attend.segments->size());
    while (issued_ < end) {
      if (int64_t(issuing_) > int64_t(cursor_) + settings_.depth) {
        stats_.stop_depth += 1;
        return Status::Ok();
      }
      if (issued_ - head_ == settings_.num_slots) {
        stats_.stop_slots += 1;
        return Status::Ok();
      }
      const Segment& segment = (*attend.segments)[issued_ - attend.first_segment];
      KVJAX_RETURN_IF_ERROR(Issue(attend, segment));
    }
  }
  return Status::Ok();
}

Status Ring::Issue(const PlannedAttend& attend, const Segment& segment) {
  const int64_t delivery = base_ + issued_;
  Slot& slot = slot_of(delivery);
  if (slot.released) {
    // The slot's last kernel may still read it; without this the copy overwrites cells
    // under it.
    KVJAX_RETURN_IF_ERROR(transport_->Wait(transfer_, slot.release));
    stats_.slot_reuses += 1;
  }
  for (const Copy& copy : segment.copies) {
    KVJAX_RETURN_IF_ERROR(
        transport_->Enqueue(transfer_, copy, attend.tail->data, memory_of(delivery)));
  }
  KVJAX_RETURN_IF_ERROR(transport_->Record(slot.ready, transfer_));
  issued_ += 1;
  stats_.deliveries += 1;
  stats_.early_bytes += segment.live_bytes;
  stats_.gap_bytes += segment.gap_bytes;
  return Status::Ok();
}

Status Ring::Open(Stream compute, AttendKey key, const char* tail, Route* route) {
  const bool delivers = delivering();
  auto next = std::find_if(attends_.begin() + cursor_, attends_.end(),
                           [&](const PlannedAttend& a) { return a.key == key; });
  if (next == attends_.end()) {
    // Behind the cursor or not in the plan: the tail's shape is all that is needed.
    const Tail* known = TailOf(key.layer);
    if (known != nullptr) {
      (delivers ? stats_.ordered_sequence : stats_.ordered_depth) += 1;
      const LayerShape shape = ShapeOf(plan_, *known, key.window);
      *route = {&Segments(shape), shape, false};
      return Status::Ok();
    }
    return Status::Invalid("attend of layer " + std::to_string(key.layer) +
                           " without a begin that lists its tail");
  }
  const size_t index = next - attends_.begin();
  if (index > cursor_) {
    stats_.skipped_attends += int64_t(index - cursor_);
    KVJAX_RETURN_IF_ERROR(SkipTo(compute, index));
  }
  const bool moved = next->tail->data != tail;
  if (moved) stats_.ordered_moved += 1;
  if (!moved && !delivers) stats_.ordered_depth += 1;
  *route = {next->segments, next->shape, delivers && !moved};
  if (route->delivered) return Pump();
  return SkipTo(compute, index + 1);
}

Status Ring::Acquire(Stream compute, const char** slot) {
  if (issued_ == head_) {
    return Status::Internal("segment " + std::to_string(head_) + " was never issued");
  }
  // The slot's copies may still run; without this the kernel reads what was there before.
  KVJAX_RETURN_IF_ERROR(transport_->Wait(compute, slot_of(base_ + head_).ready));
  *slot = memory_of(base_ + head_);
  return Status::Ok();
}

Status Ring::Release(Stream compute) {
  Slot& slot = slot_of(base_ + head_);
  KVJAX_RETURN_IF_ERROR(transport_->Record(slot.release, compute));
  slot.released = true;
  head_ += 1;
  return Pump();
}

Status Ring::Finish(Stream compute) { return SkipTo(compute, cursor_ + 1); }

// Moves the cursor to an attend. Segments before it that were issued and never read are
// joined to `compute`, so that XLA may free their tail behind it; others are not issued.
Status Ring::SkipTo(Stream compute, size_t attend) {
  const int64_t total =
      attends_.empty() ? 0
                       : attends_.back().first_segment + int64_t(attends_.back().segments->size());
  const int64_t target = attend < attends_.size() ? attends_[attend].first_segment : total;
  KVJAX_RETURN_IF_ERROR(Join(compute, std::min(issued_, target)));
  if (issued_ < target) {
    base_ -= target - issued_;
    head_ = issued_ = target;
  }
  cursor_ = attend;
  issuing_ = std::max(issuing_, cursor_);
  return Pump();
}

// Releases issued segments up to `end` that nothing read.
Status Ring::Join(Stream compute, int64_t end) {
  for (; head_ < end; ++head_) {
    Slot& slot = slot_of(base_ + head_);
    // XLA may free or reuse the tail behind this step; without this a copy may still read
    // it then.
    KVJAX_RETURN_IF_ERROR(transport_->Wait(compute, slot.ready));
    KVJAX_RETURN_IF_ERROR(transport_->Record(slot.release, compute));
    slot.released = true;
  }
  return Status::Ok();
}

Status Ring::Abort(Stream compute) {
  if (cursor_ >= attends_.size()) return Status::Ok();
  KVJAX_RETURN_IF_ERROR(Join(compute, issued_));
  stats_.skipped_attends += int64_t(attends_.size() - cursor_);
  stats_.dropped_plans += 1;
  cursor_ = attends_.size();
  return Status::Ok();
}

Status Ring::CopyOrdered(Stream compute, const Segment& segment, const char* tail,
                         char* target) {
  for (const Copy& copy : segment.copies) {
    KVJAX_RETURN_IF_ERROR(transport_->Enqueue(compute, copy, tail, target));
  }
  stats_.ordered_bytes += segment.live_bytes;
  stats_.gap_bytes += segment.gap_bytes;
  return Status::Ok();
}

void Ring::NoteAppend(const char* tail) {
  for (const Tail& known : plan_.tails) {
    if (known.data == tail) return;
  }
  NoteMoved(1);
}

// Tails of the last step's cache that aren't where that step left them. XLA may copy a
// tail that isn't donated before begin sees it.
int64_t Ring::MovedTails(const StepPlan& plan) const {
  const bool follows = plan.stamp_before != 0 && plan.stamp_before == plan_.stamp &&
                       plan.tails.size() == plan_.tails.size();
  int64_t moved = 0;
  for (size_t i = 0; follows && i < plan.tails.size(); ++i) {
    moved += plan.tails[i].data != plan_.tails[i].data;
  }
  return moved;
}

void Ring::NoteMoved(int64_t num_tails) {
  if (num_tails > 0 && stats_.moved_tails == 0) {
    std::fprintf(stderr,
                 "kvjax: a tail was copied within a step. Donate the cache in the "
                 "outermost jit: jax.jit(step, donate_argnames=\"cache\")\n");
  }
  stats_.moved_tails += num_tails;
}

void Ring::Close() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (memory_ != nullptr) {
    Drain();
    GiveBack();
  }
  head_ = issued_;
  decline_ = "the ring is closed";
}

RingStats Ring::stats() const { return stats_; }

}  // namespace kvjax
