// The staging ring of one cache on one device: slots, the plan of a step, and the order
// of deliveries.
//
//   slots     [ 3 ][ 4 ][ 2 ]        segment i lies in slot i mod num_slots
//               ^    ^    ^
//               |    |    being read by a kernel: released when that is done
//               |    being written by the transfer stream
//               ready
//
//   deliveries ->  0  1 | 2 | 3  4 | 5  6  ...      in the order of consumption
//                       head      issued            head <= issued <= head + num_slots
//
// Behind the step's own segments come the first ones of the step to come (look-ahead),
// cut for lengths that grow by T. They count once the next begin brings the stamp of
// this step, the same tails, and extents that they cover; from the first that doesn't
// fit on they are dropped.
//
// A slot's ready event orders its readers behind its copies, its release event the next
// copies behind its readers; stream to stream, never through the host. Nothing waits on
// an event that isn't recorded: a delivery is issued after the launch that frees its
// slot is enqueued and its release recorded.
//
// Calls come from one step at a time under Ring::mutex; no call waits for a device but
// Close, and Prepare where a ring was idle for so long that the wait is over. (On the
// cpu platform a stream of work done at once waits for worker threads, which take no
// lock.)
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ranges.h"
#include "status.h"
#include "timeline.h"
#include "transport.h"

namespace kvjax {

// Slots with which copies go on while a layer computes other things than attention: the
// one being read and a margin of two. Two are nearly as good where copying takes much
// longer than computing, if a layer's last segment is not much smaller than the others
// (even_end): what frees the other slot takes longer than to copy such a one.
constexpr int64_t kMarginSlots = 3;
constexpr int64_t kDefaultSlotBytes = 16 << 20;
// Steps without a live tail cell after which a ring's memory is given back.
constexpr int64_t kIdleSteps = 256;

struct RingSettings {
  int64_t depth = 0;  // attends that a delivery may run ahead; 0 = ordered
  int64_t slot_bytes = kDefaultSlotBytes;
  int64_t num_slots = 0;
  int64_t headroom_bytes = 0;  // device memory that stays free beside the ring
  std::string decline =
      "no ring was opened";  // why there are no slots, if there are none

  int64_t ring_bytes() const { return slot_bytes * num_slots; }
  bool even_end() const { return num_slots > 0 && num_slots < kMarginSlots; }
};

// What happened, counted where it happens. X(name): one count.
#define KVJAX_RING_COUNTS(X)                                                        \
  X(steps)            /* begins */                                                  \
  X(deliveries)       /* segments sent through slots */                             \
  X(early_bytes)      /* live bytes of those */                                     \
  X(ordered_bytes)    /* live bytes copied on the compute stream */                 \
  X(gap_bytes)        /* copied along between sequences, either way */              \
  X(slot_reuses)      /* deliveries that had to wait for a slot's release */        \
  X(ahead_used)       /* segments sent before their step began, and used */         \
  X(ahead_dropped)    /* and not used: counted neither as deliveries nor bytes */   \
  X(ordered_depth)    /* ordered attends: depth 0, declined or closed */            \
  X(ordered_sequence) /* ordered attends: not the next one of the plan */           \
  X(ordered_moved)    /* ordered attends: another tail than begin's */              \
  X(skipped_attends)  /* attends of the plan that never came */                     \
  X(dropped_plans)    /* steps that ended before their last attend */               \
  X(moved_tails)      /* tails not where the last step or begin had them */         \
  X(given_back)       /* times that an idle ring's memory was given back */         \
  X(length_errors)    /* times that lengths did not fit the plan or the cells */    \
  X(stop_slots)       /* times that issuing stopped for want of a slot */           \
  X(stop_depth)       /* times that it stopped at the depth, or before an append */ \
  X(ring_bytes)       /* device memory that the ring holds now */                   \
  X(num_slots)

struct RingStats {
#define KVJAX_COUNT(name) int64_t name = 0;
  KVJAX_RING_COUNTS(KVJAX_COUNT)
#undef KVJAX_COUNT
};

// One layer's tail as begin saw it.
struct Tail {
  int64_t layer;
  const char* data;
  int64_t device_cells, tail_cells, row_bytes;
};

struct AttendKey {
  int64_t layer, window;
  bool operator==(const AttendKey& other) const {
    return layer == other.layer && window == other.window;
  }
};

// A step to come.
struct StepPlan {
  std::vector<int32_t> lengths;  // [B], before the step
  int32_t num_new;               // T
  std::vector<Tail> tails;
  std::vector<AttendKey> attends;  // in order; of layers with a tail
  // Of the step that the cache comes from (0 = none known) and of this one.
  uint64_t stamp_before = 0, stamp = 0;
};

class Ring {
 public:
  Ring(const RingSettings& settings, std::unique_ptr<Transport> transport);
  ~Ring();

  std::mutex& mutex() { return mutex_; }
  const RingSettings& settings() const { return settings_; }
  Transport& transport() { return *transport_; }

  // Takes memory, stream and events, or declines; for the stage before a program runs.
  // Cheap when there is nothing to do. Never fails: a decline is decline().
  void Prepare();

  // Opens a step's plan and issues its first deliveries. An open plan is dropped.
  Status Begin(Stream compute, StepPlan plan);

  // Takes the place of `before`, under whose plan a step may be running: its attends
  // still to come go ordered.
  void Follow(const Ring& before) { plan_ = before.plan_; }

  // How one attend gets its tail.
  struct Route {
    const std::vector<Segment>* segments;
    LayerShape shape;
    bool delivered;  // through slots: Acquire and Release each segment, then Finish
  };
  Status Open(Stream compute, AttendKey key, const char* tail, Route* route);

  // The next segment of the attend that Open answered: `compute` waits for its copies.
  Status Acquire(Stream compute, const char** slot);
  // The launch that reads it is enqueued: its slot may be filled again behind that.
  Status Release(Stream compute);
  // All segments are released. Ends the step at the plan's last attend.
  Status Finish(Stream compute);

  // The step dies here: drops its plan, if one is open. What was sent and never read is
  // joined to `compute`, so that XLA may free the step's tails behind it.
  Status Abort(Stream compute);

  // Copies a segment on the compute stream, for the ordered path.
  Status CopyOrdered(Stream compute, const Segment& segment, const char* tail,
                     char* target);

  // An append wrote this tail: another pointer than begin's means that it was copied.
  void NoteAppend(const char* tail);
  // The error words that kernels set: lengths that fit neither plan nor cells.
  void NoteLengthError() { stats_.length_errors += 1; }

  // Ends deliveries for good: waits until no kernel reads a slot and no copy runs, then
  // gives everything back. Attends still to come go ordered.
  void Close();

  // Notes what the streams do from now on: at most max_marks pieces of work.
  Status StartTrace(int64_t max_marks);
  // Ends that. Waits for the last work noted; `missed` came once the trace was full.
  Status StopTrace(std::vector<Mark>* marks, int64_t* missed);
  // Some work of the attend's own ends here; noted if the ring is being traced.
  void NoteWork(Stream compute, MarkKind kind, int64_t layer = -1, int64_t bytes = 0) {
    Note(compute, {kind, stats_.steps, layer, -1, -1, bytes});
  }

  // What the largest segment of cells of row_bytes takes: a slot, or a block where that
  // is larger. Such cells go ordered.
  int64_t SegmentBytes(int64_t row_bytes) const;

  const std::vector<int32_t>& lengths() const { return plan_.lengths; }
  int32_t num_new() const { return plan_.num_new; }
  RingStats stats() const;
  // Why there is no ring, with the numbers; "" while there is none to tell.
  const std::string& decline() const { return decline_; }

 private:
  struct Slot {
    Event ready = nullptr, release = nullptr;
    bool released = false;  // release has been recorded
  };
  struct PlannedAttend {
    AttendKey key;
    const char* tail;
    LayerShape shape;
    const std::vector<Segment>* segments;
    int64_t first_segment;  // of the step

    int64_t end_segment() const { return first_segment + int64_t(segments->size()); }
  };
  using Cuts = std::map<std::vector<int64_t>, std::vector<Segment>>;  // by shape
  // What a step sent ahead for the next one.
  struct Ahead {
    std::vector<PlannedAttend> attends;
    Cuts cuts;  // the attends' segments
    uint64_t stamp;
    int64_t num_segments;
  };

  bool delivering() const { return memory_ != nullptr; }
  void Note(Stream stream, const Mark& mark) {
    if (timeline_ != nullptr) timeline_->Add(stream, mark);
  }
  Status Take();
  void Drain();
  void GiveBack();
  void Cut();
  void CutAhead();
  Status Deliver(Stream compute, const Ahead& ahead);
  Status Adopt(Stream compute, const Ahead& ahead);
  Status NoteAppended(Stream compute);
  bool MayIssue(size_t attend) const;
  void Count(const Segment& segment);
  const Tail* TailOf(int64_t layer) const;
  const std::vector<Segment>& Segments(const LayerShape& shape);
  std::vector<Segment> CutOf(const LayerShape& shape,
                             const std::vector<int32_t>& lengths) const;
  int64_t num_segments() const {
    return num_attends_ == 0 ? 0 : attends_[num_attends_ - 1].end_segment();
  }
  Status Pump();
  Status Issue(const PlannedAttend& attend, const Segment& segment);
  Status SkipTo(Stream compute, size_t attend);
  int64_t MovedTails(const StepPlan& plan) const;
  void NoteMoved(int64_t num_tails);
  Status Join(Stream compute, int64_t end_segment);
  Slot& slot_of(int64_t delivery) { return slots_[delivery % settings_.num_slots]; }
  // Of the delivery at the head, which the attend at the cursor reads.
  void NoteHead(Stream compute, MarkKind kind) {
    if (timeline_ == nullptr) return;
    timeline_->Add(compute,
                   OfDelivery(kind, attends_[cursor_].key.layer, base_ + head_));
  }
  Mark OfDelivery(MarkKind kind, int64_t layer, int64_t delivery) const {
    return {kind, stats_.steps, layer, delivery, delivery % settings_.num_slots};
  }
  char* memory_of(int64_t delivery) {
    return memory_ + delivery % settings_.num_slots * settings_.slot_bytes;
  }

  const RingSettings settings_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<Timeline> timeline_;  // null: nobody traces
  std::mutex mutex_;
  RingStats stats_;
  std::string decline_;

  Stream transfer_ = nullptr;
  char* memory_ = nullptr;
  Event begun_ = nullptr;
  std::vector<Slot> slots_;
  int64_t idle_steps_ = 0;
  MarkKind idle_ = MarkKind::kIdle;  // why nothing more was issued

  StepPlan plan_;
  Cuts cuts_, ahead_cuts_;
  std::vector<PlannedAttend> attends_;  // of the step, then the first of the next
  size_t num_attends_ = 0;              // of the step
  std::vector<Event>
      appended_;             // recorded behind the appends of the step's first layers
  size_t num_appended_ = 0;  // of this step
  bool rewritten_ = false;   // one of those layers was appended to once more
  size_t cursor_ = 0;        // the next attend
  size_t issuing_ = 0;       // the attend whose segments are being issued
  int64_t head_ = 0;         // segments of this step that are released
  int64_t issued_ = 0;       // segments of this step that are issued
  int64_t base_ = 0;  // deliveries before this step: segment i is delivery base_ + i
};

}  // namespace kvjax
