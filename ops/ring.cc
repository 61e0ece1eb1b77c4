#include "ring.h"

#include <algorithm>
#include <cstdio>

#include "block_math.h"

namespace kvjax {
namespace {

LayerShape ShapeOf(const StepPlan& plan, const Tail& tail, int64_t window) {
  return {int32_t(plan.lengths.size()),
          plan.num_new,
          tail.device_cells,
          tail.tail_cells,
          tail.row_bytes,
          window};
}

std::vector<int64_t> KeyOf(const LayerShape& shape) {
  return {shape.num_seqs, shape.device_cells, shape.tail_cells, shape.row_bytes,
          shape.window};
}

// Whether what was sent for one segment holds all that another asks for, where it
// looks.
bool Covers(const Segment& sent, const Segment& wanted) {
  if (sent.spans.size() != wanted.spans.size()) return false;
  for (size_t i = 0; i < sent.spans.size(); ++i) {
    const Span &a = sent.spans[i], &b = wanted.spans[i];
    if (a.seq != b.seq || a.first_cell != b.first_cell || a.offset != b.offset ||
        a.end_cell < b.end_cell) {
      return false;
    }
  }
  return true;
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
    head_ = issued_;
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
  appended_.resize(std::min(settings_.depth, settings_.num_slots));
  for (Event& event : appended_) {
    KVJAX_RETURN_IF_ERROR(transport_->MakeEvent(&event));
  }
  return Status::Ok();
}

// The host waits until no kernel reads a slot and no copy writes one; freeing under
// them corrupts whoever gets the memory next.
void Ring::Drain() {
  for (Slot& slot : slots_) {
    (void)transport_->Synchronize(slot.ready);
    (void)transport_->Synchronize(slot.release);
  }
}

void Ring::GiveBack() {
  for (Slot& slot : slots_) {
    if (slot.ready != nullptr) transport_->FreeEvent(slot.ready);
    if (slot.release != nullptr) transport_->FreeEvent(slot.release);
  }
  slots_.clear();
  for (Event event : appended_) {
    if (event != nullptr) transport_->FreeEvent(event);
  }
  appended_.clear();
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
  const Ahead ahead{{attends_.begin() + num_attends_, attends_.end()},
                    std::move(ahead_cuts_),
                    rewritten_ ? 0 : plan_.stamp,
                    issued_ - head_};
  plan_ = std::move(plan);
  base_ += head_;
  Cut();
  if (delivering()) KVJAX_RETURN_IF_ERROR(Deliver(compute, ahead));
  NoteWork(compute, MarkKind::kBegin);
  return Status::Ok();
}

// The first deliveries of a step, from where the step before left off.
Status Ring::Deliver(Stream compute, const Ahead& ahead) {
  Note(transfer_, {idle_, stats_.steps});
  idle_ = MarkKind::kIdle;
  KVJAX_RETURN_IF_ERROR(Adopt(compute, ahead));
  // The step's deliveries read cells that the step before appended on `compute`;
  // without this they could be sent before those are written.
  KVJAX_RETURN_IF_ERROR(transport_->Record(begun_, compute));
  KVJAX_RETURN_IF_ERROR(transport_->Wait(transfer_, begun_));
  Note(transfer_, {MarkKind::kWaitBegin, stats_.steps});
  return Pump();
}

// Lists the attends to come with their segments; layers of one shape share a cut.
void Ring::Cut() {
  cursor_ = issuing_ = num_appended_ = 0;
  rewritten_ = false;
  head_ = issued_ = 0;
  attends_.clear();
  cuts_.clear();
  ahead_cuts_.clear();
  int64_t num_segments = 0;
  for (const AttendKey& key : plan_.attends) {
    const Tail* tail = TailOf(key.layer);
    if (tail == nullptr || SegmentBytes(tail->row_bytes) > settings_.slot_bytes)
      continue;
    const LayerShape shape = ShapeOf(plan_, *tail, key.window);
    const std::vector<Segment>& segments = Segments(shape);
    attends_.push_back({key, tail->data, shape, &segments, num_segments});
    num_segments += int64_t(segments.size());
  }
  num_attends_ = attends_.size();
  idle_steps_ = num_segments > 0 ? 0 : idle_steps_ + 1;
  if (delivering()) CutAhead();
}

// Lists the first attends of the next step, for lengths that grow by T.
void Ring::CutAhead() {
  std::vector<int32_t> lengths(plan_.lengths.size());
  int64_t num_segments = this->num_segments();
  for (size_t i = 0; i < std::min(num_attends_, appended_.size()); ++i) {
    const PlannedAttend attend = attends_[i];
    const LayerShape& shape = attend.shape;
    for (size_t b = 0; b < lengths.size(); ++b) {
      const int64_t grown = int64_t(plan_.lengths[b]) + shape.num_new;
      lengths[b] = int32_t(std::min(grown, shape.num_cells()));
    }
    auto [cut, is_new] = ahead_cuts_.try_emplace(KeyOf(shape));
    if (is_new) cut->second = CutOf(shape, lengths);
    attends_.push_back({attend.key, attend.tail, shape, &cut->second, num_segments});
    num_segments += int64_t(cut->second.size());
  }
}

// Takes over what the step before sent ahead, as far as it fits this step.
Status Ring::Adopt(Stream compute, const Ahead& ahead) {
  if (ahead.num_segments == 0) return Status::Ok();
  const bool next_step = ahead.stamp != 0 && plan_.stamp_before == ahead.stamp;
  const size_t most = next_step ? std::min(num_attends_, ahead.attends.size()) : 0;
  int64_t used = 0;
  for (size_t i = 0; i < most; ++i) {
    const PlannedAttend &sent = ahead.attends[i], &wanted = attends_[i];
    if (!(sent.key == wanted.key) || sent.tail != wanted.tail ||
        KeyOf(sent.shape) != KeyOf(wanted.shape)) {
      break;
    }
    const int64_t all =
        int64_t(std::min(sent.segments->size(), wanted.segments->size()));
    const int64_t limit = std::min(all, ahead.num_segments - used);
    int64_t k = 0;
    for (; k < limit && Covers((*sent.segments)[k], (*wanted.segments)[k]); ++k) {
      Count((*wanted.segments)[k]);
    }
    used += k;
    if (k < int64_t(std::max(sent.segments->size(), wanted.segments->size()))) break;
  }
  issued_ = used;
  stats_.ahead_used += used;
  stats_.ahead_dropped += ahead.num_segments - used;
  if (used == ahead.num_segments) return Status::Ok();
  // XLA may free the tail that these read behind this step; without this a copy may
  // still read it then. Copies are in order: the last one's event tells of all.
  return transport_->Wait(compute, slot_of(base_ + ahead.num_segments - 1).ready);
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
  auto [cut, is_new] = cuts_.try_emplace(KeyOf(shape));
  if (is_new) cut->second = CutOf(shape, plan_.lengths);
  return cut->second;
}

// As this ring delivers it: the same for a step and for what is sent ahead of it.
std::vector<Segment> Ring::CutOf(const LayerShape& shape,
                                 const std::vector<int32_t>& lengths) const {
  return CutTail(shape, lengths.data(), SegmentBytes(shape.row_bytes),
                 settings_.even_end());
}

// Issues deliveries in the order of consumption while depth and free slots allow.
Status Ring::Pump() {
  if (!delivering()) return Status::Ok();
  for (; issuing_ < attends_.size(); ++issuing_) {
    const PlannedAttend& attend = attends_[issuing_];
    while (issued_ < attend.end_segment()) {
      if (!MayIssue(issuing_)) {
        stats_.stop_depth += 1;
        idle_ = MarkKind::kIdleDepth;
        return Status::Ok();
      }
      if (issued_ - head_ == settings_.num_slots) {
        stats_.stop_slots += 1;
        idle_ = MarkKind::kIdleSlots;
        return Status::Ok();
      }
      const Segment& segment = (*attend.segments)[issued_ - attend.first_segment];
      KVJAX_RETURN_IF_ERROR(Issue(attend, segment));
      idle_ = MarkKind::kIdle;
    }
  }
  return Status::Ok();
}

// Within the depth; and of the next step only layers that this one has appended to.
bool Ring::MayIssue(size_t attend) const {
  if (int64_t(attend) > int64_t(cursor_) + settings_.depth) return false;
  return attend < num_attends_ || attend - num_attends_ < num_appended_;
}

void Ring::Count(const Segment& segment) {
  stats_.deliveries += 1;
  stats_.early_bytes += segment.live_bytes;
  stats_.gap_bytes += segment.gap_bytes;
}

Status Ring::Issue(const PlannedAttend& attend, const Segment& segment) {
  const int64_t delivery = base_ + issued_;
  Slot& slot = slot_of(delivery);
  const bool ahead = issuing_ >= num_attends_;
  Mark mark = OfDelivery(idle_, attend.key.layer, delivery);
  mark.step += ahead;
  Note(transfer_, mark);
  if (slot.released) {
    // The slot's last kernel may still read it; without this the copy overwrites cells
    // under it.
    KVJAX_RETURN_IF_ERROR(transport_->Wait(transfer_, slot.release));
    stats_.slot_reuses += 1;
    mark.kind = MarkKind::kWaitRelease;
    Note(transfer_, mark);
  }
  if (ahead) {
    // The next step reads the rows that this one appends; without this they could be
    // sent before they are written.
    KVJAX_RETURN_IF_ERROR(
        transport_->Wait(transfer_, appended_[issuing_ - num_attends_]));
    mark.kind = MarkKind::kWaitAppend;
    Note(transfer_, mark);
  }
  KVJAX_RETURN_IF_ERROR(
      transport_->Enqueue(transfer_, segment.copies, attend.tail, memory_of(delivery)));
  mark.kind = MarkKind::kCopy;
  mark.bytes = segment.live_bytes + segment.gap_bytes;
  Note(transfer_, mark);
  KVJAX_RETURN_IF_ERROR(transport_->Record(slot.ready, transfer_));
  issued_ += 1;
  if (!ahead) Count(segment);
  return Status::Ok();
}

Status Ring::Open(Stream compute, AttendKey key, const char* tail, Route* route) {
  NoteWork(compute, MarkKind::kXla);
  const bool delivers = delivering();
  const auto end = attends_.begin() + num_attends_;
  const auto next = std::find_if(attends_.begin() + cursor_, end,
                                 [&](const PlannedAttend& a) { return a.key == key; });
  if (next == end) {
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
  const bool moved = next->tail != tail;
  if (moved) stats_.ordered_moved += 1;
  if (!moved && !delivers) stats_.ordered_depth += 1;
  *route = {next->segments, next->shape, delivers && !moved};
  if (!route->delivered) return SkipTo(compute, index + 1);
  KVJAX_RETURN_IF_ERROR(NoteAppended(compute));
  return Pump();
}

// The append of the attend at the cursor is enqueued: its layer may be sent ahead
// behind it.
Status Ring::NoteAppended(Stream compute) {
  if (cursor_ != num_appended_ || cursor_ >= appended_.size()) return Status::Ok();
  num_appended_ += 1;
  return transport_->Record(appended_[cursor_], compute);
}

Status Ring::Acquire(Stream compute, const char** slot) {
  if (issued_ == head_) {
    return Status::Internal("segment " + std::to_string(head_) + " was never issued");
  }
  NoteHead(compute, MarkKind::kHost);
  // The slot's copies may still run; without this the kernel reads what was there
  // before.
  KVJAX_RETURN_IF_ERROR(transport_->Wait(compute, slot_of(base_ + head_).ready));
  NoteHead(compute, MarkKind::kWaitReady);
  *slot = memory_of(base_ + head_);
  return Status::Ok();
}

Status Ring::Release(Stream compute) {
  NoteHead(compute, MarkKind::kLaunch);
  Slot& slot = slot_of(base_ + head_);
  KVJAX_RETURN_IF_ERROR(transport_->Record(slot.release, compute));
  slot.released = true;
  head_ += 1;
  return Pump();
}

Status Ring::Finish(Stream compute) {
  KVJAX_RETURN_IF_ERROR(SkipTo(compute, cursor_ + 1));
  NoteWork(compute, MarkKind::kFinish);
  return Status::Ok();
}

// Moves the cursor to an attend. Segments before it that were issued and never read are
// joined to `compute`, so that XLA may free their tail behind it; others are not
// issued.
Status Ring::SkipTo(Stream compute, size_t attend) {
  const int64_t target =
      attend < num_attends_ ? attends_[attend].first_segment : num_segments();
  KVJAX_RETURN_IF_ERROR(Join(compute, std::min(issued_, target)));
  if (issued_ < target) {
    base_ -= target - issued_;
    head_ = issued_ = target;
  }
  cursor_ = attend;
  issuing_ = std::max(issuing_, cursor_);
  KVJAX_RETURN_IF_ERROR(Pump());
  if (cursor_ < num_attends_ || issued_ == head_ || transport_->SourcesStayMapped()) {
    return Status::Ok();
  }
  // The caller may free the tail once the step is over; without this a copy may read
  // freed memory.
  return transport_->Synchronize(slot_of(base_ + issued_ - 1).ready);
}

// Releases issued segments up to `end` that nothing read.
Status Ring::Join(Stream compute, int64_t end) {
  for (; head_ < end; ++head_) {
    Slot& slot = slot_of(base_ + head_);
    // XLA may free or reuse the tail behind this step; without this a copy may still
    // read it then.
    KVJAX_RETURN_IF_ERROR(transport_->Wait(compute, slot.ready));
    KVJAX_RETURN_IF_ERROR(transport_->Record(slot.release, compute));
    slot.released = true;
  }
  return Status::Ok();
}

Status Ring::Abort(Stream compute) {
  if (cursor_ >= num_attends_) return Status::Ok();
  KVJAX_RETURN_IF_ERROR(Join(compute, issued_));
  stats_.skipped_attends += int64_t(num_attends_ - cursor_);
  stats_.dropped_plans += 1;
  cursor_ = num_attends_;
  return Status::Ok();
}

Status Ring::CopyOrdered(Stream compute, const Segment& segment, const char* tail,
                         char* target) {
  KVJAX_RETURN_IF_ERROR(transport_->Enqueue(compute, segment.copies, tail, target));
  stats_.ordered_bytes += segment.live_bytes;
  stats_.gap_bytes += segment.gap_bytes;
  return Status::Ok();
}

void Ring::NoteAppend(const char* tail) {
  for (size_t i = 0; i < num_appended_; ++i) {
    // Written again after it may have been sent ahead: no begin adopts that.
    rewritten_ |= attends_[i].tail == tail;
  }
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

Status Ring::StartTrace(int64_t max_marks) {
  if (timeline_ != nullptr) return Status::Invalid("the ring is being traced already");
  auto timeline = std::make_unique<Timeline>(transport_.get());
  KVJAX_RETURN_IF_ERROR(timeline->Start(max_marks));
  timeline_ = std::move(timeline);
  return Status::Ok();
}

Status Ring::StopTrace(std::vector<Mark>* marks, int64_t* missed) {
  if (timeline_ == nullptr) return Status::Invalid("the ring is not being traced");
  const auto timeline = std::move(timeline_);
  *missed = timeline->missed();
  return timeline->Read(marks);
}

RingStats Ring::stats() const { return stats_; }

}  // namespace kvjax
