// What a ring's two streams did when, noted while somebody traces it.
//
//   transfer  | idle |  wait_release  |  copy  | idle |  copy  | ...
//   compute   |  xla  | begin |  xla  | resident | wait_ready | launch | launch | ...
//             ^       ^ points: timed events, recorded behind the work that they end
//
// A mark is what a stream did from the point before until its own, so the marks of a
// stream lie end to end and sum up to all of its time.
#pragma once

#include <cstdint>
#include <vector>

#include "status.h"
#include "transport.h"

namespace kvjax {

// X(enumerator, name): one kind. Those of the transfer stream come first.
#define KVJAX_MARK_KINDS(X)                                                       \
  X(kIdle, "idle")                /* all that was planned had been issued */      \
  X(kIdleDepth, "idle_depth")     /* the next delivery was too far ahead */       \
  X(kIdleSlots, "idle_slots")     /* no slot's release had been enqueued */       \
  X(kWaitBegin, "wait_begin")     /* for the step before, on the device */        \
  X(kWaitRelease, "wait_release") /* for the slot's last reader */                \
  X(kWaitAppend, "wait_append")   /* for the append that a look-ahead reads */    \
  X(kCopy, "copy")                /* of one delivery */                           \
  X(kXla, "xla")                  /* XLA's own work between our calls, or none */ \
  X(kBegin, "begin")              /* lengths to the host, and the plan */         \
  X(kResident, "resident")        /* launches over cells on the device */         \
  X(kHost, "host")                /* none: the host had not come to more */       \
  X(kWaitReady, "wait_ready")     /* for a delivery */                            \
  X(kLaunch, "launch")            /* over a segment */                            \
  X(kOrderedCopy, "ordered_copy") /* of a segment, without a slot */              \
  X(kFinish, "finish")            /* an attend's end; may wait if emulated */

enum class MarkKind : int64_t {
#define KVJAX_KIND(enumerator, name) enumerator,
  KVJAX_MARK_KINDS(KVJAX_KIND)
#undef KVJAX_KIND
};

// Plain data: it crosses the C interface. -1 = says nothing of that.
struct Mark {
  MarkKind kind;
  int64_t step = -1;      // begins since the ring was opened; of the step it is for
  int64_t layer = -1;     // of the cells
  int64_t delivery = -1;  // since the ring was opened; a segment that was dropped and
                          // the one sent in its stead share a number
  int64_t slot = -1;
  int64_t bytes = 0;              // copied, those in gaps between sequences among them
  double begin_s = 0, end_s = 0;  // since the trace was started
};

// Not thread-safe: its ring's mutex guards it.
class Timeline {
 public:
  // Of a ring's transport, which must outlive it.
  explicit Timeline(Transport* transport) : transport_(*transport) {}
  ~Timeline();
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;

  // Makes all events that it will need, and starts the clock. Waits for that.
  Status Start(int64_t max_marks);
  // `stream` ends this piece of work here. Counted only once max_marks are taken.
  void Add(Stream stream, const Mark& mark);
  // Waits until all points are passed, then fills in when.
  Status Read(std::vector<Mark>* marks);

  int64_t missed() const { return missed_; }  // marks that came once it was full

 private:
  Status StartClock();

  Transport& transport_;
  Event start_ = nullptr;
  std::vector<Event> points_;  // of each mark that may come
  std::vector<Mark> marks_;
  int64_t missed_ = 0;
};

}  // namespace kvjax
