// What a ring's counts must say after begins and attends, kept apart from the ring.
#pragma once

#include <string>
#include <vector>

#include "ring.h"

namespace kvjax {

class Ledger {
 public:
  void Begin(std::vector<AttendKey> attends);
  // An attend that comes next; whether it must be delivered through slots.
  bool Attend(AttendKey key, bool moved, bool delivering);
  // The step dies, if it isn't over.
  void Abort();
  // A delivered attend is over.
  void EndDelivered() { cursor_ += 1; }

  // Attends of the plan are still to come.
  bool open() const { return cursor_ < attends_.size(); }
  RingStats& counts() { return counts_; }
  // Names the first count that differs, "" if none does. Bytes and stops aren't here.
  std::string Compare(const RingStats& stats) const;

 private:
  std::vector<AttendKey> attends_;
  size_t cursor_ = 0;
  RingStats counts_;
};

}  // namespace kvjax
