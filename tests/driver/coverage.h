// What the launches of one attend covered: every block of every sequence once, in
// order.
#pragma once

#include <string>
#include <vector>

#include "ranges.h"

namespace kvjax {

class Coverage {
 public:
  Coverage(const LayerShape& shape, const std::vector<int32_t>& lengths)
      : shape_(shape), lengths_(lengths), covered_(lengths.size()) {}

  // One launch's spans; those of a slot lie apart and inside it (slot_bytes > 0).
  // Returns what is wrong, "" if nothing is.
  std::string Add(const std::vector<Span>& spans, int64_t slot_bytes);
  // All launches are made.
  std::string Complete() const;
  // Bytes of the cells that the step sees in the tail.
  int64_t LiveBytes() const;

 private:
  struct Covered {
    int64_t end_block = 0, end_cell = 0;
    bool started = false, ended = false;
  };

  std::string AddSpan(const Span& span);
  int64_t StoredEnd(int64_t length) const;

  const LayerShape shape_;
  const std::vector<int32_t>& lengths_;
  std::vector<Covered> covered_;
};

}  // namespace kvjax
