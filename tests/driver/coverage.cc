#include "coverage.h"

#include <algorithm>

#include "block_math.h"

namespace kvjax {

int64_t Coverage::StoredEnd(int64_t length) const {
  return std::min(length, shape_.num_cells());
}

std::string Coverage::Add(const std::vector<Span>& spans, int64_t slot_bytes) {
  if (spans.empty() || spans.size() > kMaxSpans)
    return "a launch of too few or many spans";
  std::vector<std::pair<int64_t, int64_t>> entries;
  int32_t before = -1;
  for (const Span& span : spans) {
    // Kernels run a launch's spans side by side.
    if (span.seq <= before) return "a launch takes a sequence twice, or out of order";
    before = span.seq;
    const std::string wrong = AddSpan(span);
    if (!wrong.empty()) return wrong;
    const int64_t bytes = (span.end_cell - span.first_cell) * shape_.row_bytes;
    entries.push_back({span.offset, span.offset + bytes});
  }
  if (slot_bytes == 0) return "";
  std::sort(entries.begin(), entries.end());
  int64_t end = 0;
  for (const auto& [from, to] : entries) {
    if (from < end) return "entries of a slot overlap";
    end = to;
  }
  return end > slot_bytes ? "an entry leaves its slot" : "";
}

std::string Coverage::AddSpan(const Span& span) {
  if (span.seq < 0 || span.seq >= shape_.num_seqs) return "no such sequence";
  const int64_t length = lengths_[span.seq];
  if (span.length != length) return "a span of another length";
  Covered& covered = covered_[span.seq];
  if (covered.ended) return "a span behind a sequence's last one";
  if (span.first == covered.started) return "a span that wrongly starts, or doesn't";
  if (span.first_cell > span.end_cell) return "a span of less than no cells";
  const int64_t visible = std::min(FirstVisible(length, shape_.window), length);
  if (span.first) covered = {visible / kBlock, visible, true, false};
  if (span.first_block != covered.end_block || span.num_blocks < 0) {
    return "a block is covered twice or not at all";
  }
  covered.end_block += span.num_blocks;
  if (span.end_cell > span.first_cell) {
    if (span.first_cell < int64_t(span.first_block) * kBlock ||
        span.end_cell > covered.end_block * kBlock) {
      return "a cell outside its span's blocks";
    }
    const bool resident = span.end_cell <= shape_.device_cells;
    const int64_t from =
        resident ? std::max<int64_t>(span.first_cell, visible) : span.first_cell;
    if (from != covered.end_cell) return "a cell is read twice or not at all";
    covered.end_cell = span.end_cell;
  }
  covered.ended = span.last;
  return "";
}

std::string Coverage::Complete() const {
  for (int32_t b = 0; b < shape_.num_seqs; ++b) {
    const Covered& covered = covered_[b];
    if (!covered.started || !covered.ended) return "a sequence without a result";
    const int64_t end = StoredEnd(lengths_[b]);
    if (covered.end_cell < end) return "a live cell is not read";
    const int64_t end_block = CeilDiv(
        std::min<int64_t>(lengths_[b] + shape_.num_new, shape_.num_cells()), kBlock);
    if (covered.end_block < end_block) return "a row's block is not covered";
  }
  return "";
}

int64_t Coverage::LiveBytes() const {
  int64_t cells = 0;
  for (int64_t length : lengths_) {
    const int64_t from =
        std::max<int64_t>(shape_.device_cells, FirstVisible(length, shape_.window));
    cells += std::max<int64_t>(0, StoredEnd(length) - from);
  }
  return cells * shape_.row_bytes;
}

}  // namespace kvjax
