#include "ranges.h"

#include <algorithm>

#include "block_math.h"

namespace kvjax {
namespace {

// Stored cells end here, even if a length passes the capacity.
int64_t StoredEnd(const LayerShape& shape, int64_t length) {
  return std::min<int64_t>(length, shape.num_cells());
}

// The first cell of the tail that a step sees; StoredEnd or above if it sees none.
int64_t TailStart(const LayerShape& shape, int64_t length) {
  return std::max<int64_t>(shape.device_cells, FirstVisible(length, shape.window));
}

// Blocks up to here may hold a cell or a row of the step.
int64_t EndBlock(const LayerShape& shape, int64_t length) {
  return CeilDiv(std::min<int64_t>(length + shape.num_new, shape.num_cells()), kBlock);
}

// Sequences of one first cell, copied as one strided copy; not yet placed.
struct Group {
  int32_t seq;  // the first
  int64_t first_cell;
  int64_t width = 0;  // bytes
  int64_t live = 0;
  int32_t height = 0;

  int64_t bytes() const { return width * height; }
};

// Fills segments one after another.
class Cutter {
 public:
  Cutter(const LayerShape& shape, int64_t slot_bytes)
      : shape_(shape), slot_bytes_(slot_bytes) {}

  // Adds cells [cell, end) of a sequence, its last ones, over as many segments as they
  // need; even_end: the last two share what is left for them.
  void Add(int32_t seq, int64_t length, int64_t cell, int64_t end, bool first,
           bool even_end) {
    while (cell < end) {
      const int64_t stop = Fits(cell, end, even_end);
      if (stop <= cell || segment_.spans.size() == kMaxSpans) {
        Close();
        continue;
      }
      Place(seq, cell, (stop - cell) * shape_.row_bytes);
      const int64_t first_block = cell / kBlock;
      const bool last = stop == end;
      const int64_t end_block = last ? EndBlock(shape_, length) : stop / kBlock;
      segment_.spans.push_back({seq, int32_t(length), int32_t(first_block),
                                int32_t(end_block - first_block), int32_t(cell),
                                int32_t(stop), 0, first, last});
      cell = stop;
      first = false;
      if (!last) Close();  // a launch takes a sequence once
    }
  }

  std::vector<Segment> Take() {
    if (!segment_.spans.empty()) Close();
    return std::move(segments_);
  }

 private:
  int64_t used() const { return closed_bytes_ + group_.bytes(); }

  // How far cells from `cell` go into the room left: to the end or a block border.
  int64_t Fits(int64_t cell, int64_t end, bool even_end) const {
    const int64_t room = (slot_bytes_ - used()) / shape_.row_bytes;
    const int64_t stop = cell + room, half = cell + CeilDiv(end - cell, 2);
    if (stop >= end) return end;
    const bool shared = even_end && end - stop <= slot_bytes_ / shape_.row_bytes;
    return std::min(stop, shared ? half + kBlock - 1 : stop) / kBlock * kBlock;
  }

  // Puts one sequence's run into the open group, if a gap costs less than a copy.
  void Place(int32_t seq, int64_t cell, int64_t bytes) {
    const int64_t width = std::max(group_.width, bytes);
    const int64_t grown = width * (group_.height + 1);
    const int64_t gap = grown - group_.live - bytes;
    const bool joins = group_.height > 0 && cell == group_.first_cell &&
                       seq == group_.seq + group_.height && gap <= kGapBytes &&
                       closed_bytes_ + grown <= slot_bytes_;
    if (!joins) {
      CloseGroup();
      group_ = {seq, cell};
    }
    group_.width = std::max(group_.width, bytes);
    group_.live += bytes;
    group_.height += 1;
  }

  void CloseGroup() {
    if (group_.height == 0) return;
    const int64_t source_pitch = shape_.tail_cells * shape_.row_bytes;
    const int64_t in_tail =
        (group_.first_cell - shape_.device_cells) * shape_.row_bytes;
    segment_.copies.push_back({group_.seq * source_pitch + in_tail, closed_bytes_,
                               group_.width, group_.height, source_pitch,
                               group_.width});
    Span* spans = &segment_.spans[segment_.spans.size() - group_.height];
    for (int i = 0; i < group_.height; ++i) {
      spans[i].offset = closed_bytes_ + i * group_.width;
    }
    segment_.live_bytes += group_.live;
    segment_.gap_bytes += group_.bytes() - group_.live;
    closed_bytes_ += group_.bytes();
    group_ = {};
  }

  void Close() {
    CloseGroup();
    segments_.push_back(std::move(segment_));
    segment_ = {};
    closed_bytes_ = 0;
  }

  const LayerShape& shape_;
  const int64_t slot_bytes_;
  std::vector<Segment> segments_;
  Segment segment_;
  Group group_{};
  int64_t closed_bytes_ = 0;
};

}  // namespace

int64_t FirstVisible(int64_t length, int64_t window) {
  return window > 0 ? std::max<int64_t>(0, length - window + 1) : 0;
}

std::vector<Span> ResidentSpans(const LayerShape& shape, const int32_t* lengths) {
  std::vector<Span> spans;
  for (int32_t b = 0; b < shape.num_seqs; ++b) {
    const int64_t length = lengths[b];
    const bool last = TailStart(shape, length) >= StoredEnd(shape, length);
    const int64_t cell = std::min(FirstVisible(length, shape.window), length);
    const int64_t first_block = cell / kBlock;
    const int64_t end_block =
        last ? EndBlock(shape, length) : shape.device_cells / kBlock;
    if (first_block >= end_block && !last) continue;
    const int64_t start = first_block * kBlock;
    const int64_t offset = (b * shape.device_cells + start) * shape.row_bytes;
    spans.push_back({b, int32_t(length), int32_t(first_block),
                     int32_t(std::max<int64_t>(0, end_block - first_block)),
                     int32_t(start),
                     int32_t(std::max(start, std::min(length, shape.device_cells))),
                     offset, true, last});
  }
  return spans;
}

std::vector<Segment> CutTail(const LayerShape& shape, const int32_t* lengths,
                             int64_t slot_bytes, bool even_end) {
  Cutter cutter(shape, slot_bytes);
  int32_t end = shape.num_seqs;  // of those with live cells
  while (end > 0 &&
         TailStart(shape, lengths[end - 1]) >= StoredEnd(shape, lengths[end - 1])) {
    --end;
  }
  for (int32_t b = 0; b < end; ++b) {
    const int64_t visible = FirstVisible(lengths[b], shape.window);
    const bool first = visible / kBlock * kBlock >= shape.device_cells;
    cutter.Add(b, lengths[b], TailStart(shape, lengths[b]),
               StoredEnd(shape, lengths[b]), first, even_end && b == end - 1);
  }
  return cutter.Take();
}

}  // namespace kvjax
