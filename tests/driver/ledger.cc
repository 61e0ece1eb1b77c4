#include "ledger.h"

#include <algorithm>

namespace kvjax {

void Ledger::Begin(std::vector<AttendKey> attends) {
  Abort();
  counts_.steps += 1;
  attends_ = std::move(attends);
  cursor_ = 0;
}

void Ledger::Abort() {
  if (!open()) return;
  counts_.dropped_plans += 1;
  counts_.skipped_attends += int64_t(attends_.size() - cursor_);
  cursor_ = attends_.size();
}

bool Ledger::Attend(AttendKey key, bool moved, bool delivering) {
  const auto next = std::find(attends_.begin() + cursor_, attends_.end(), key);
  if (next == attends_.end()) {
    (delivering ? counts_.ordered_sequence : counts_.ordered_depth) += 1;
    return false;
  }
  const size_t index = next - attends_.begin();
  counts_.skipped_attends += int64_t(index - cursor_);
  cursor_ = index;
  if (delivering && !moved) return true;
  (moved ? counts_.ordered_moved : counts_.ordered_depth) += 1;
  cursor_ += 1;
  return false;
}

std::string Ledger::Compare(const RingStats& stats) const {
#define KVJAX_COMPARE(name)                                                \
  if (stats.name != counts_.name) {                                        \
    return #name " is " + std::to_string(stats.name) + ", it should be " + \
           std::to_string(counts_.name);                                   \
  }
  KVJAX_COMPARE(steps)
  KVJAX_COMPARE(ordered_depth)
  KVJAX_COMPARE(ordered_sequence)
  KVJAX_COMPARE(ordered_moved)
  KVJAX_COMPARE(skipped_attends)
  KVJAX_COMPARE(dropped_plans)
  KVJAX_COMPARE(moved_tails)
  KVJAX_COMPARE(given_back)
#undef KVJAX_COMPARE
  return "";
}

}  // namespace kvjax
