#include "cache.h"

#include <algorithm>

#include "block_math.h"

namespace kvjax {

TestCache::TestCache(Random* random, Machine* machine)
    : random_(*random), machine_(*machine) {
  DrawLayers();
  DrawLengths();
  for (size_t i = 0; i < layers_.size(); ++i) Fill(int64_t(i));
}

void TestCache::DrawLayers() {
  const bool many = random_.Chance(0.05);  // more sequences than a launch has spans
  const bool wide = !many && random_.Chance(0.05);  // gaps cost more than copies
  num_seqs_ = int32_t(many ? random_.Between(60, 140) : random_.Between(1, 5));
  const int64_t num_blocks = random_.Between(1, many ? 2 : 6);
  num_cells_ = num_blocks * kBlock;
  const int64_t row_bytes = wide ? 1024 : 16 * random_.Between(1, many ? 2 : 4);
  const int64_t device_blocks = random_.Between(0, num_blocks - 1);
  layers_.resize(random_.Between(1, many || wide ? 2 : 6));
  for (TestLayer& layer : layers_) {
    const bool other = random_.Chance(0.2) && &layer != &layers_[0];
    const int64_t blocks = other ? random_.Between(0, num_blocks) : device_blocks;
    layer.device_cells = blocks * kBlock;
    layer.tail_cells = num_cells_ - layer.device_cells;
    layer.row_bytes = random_.Chance(0.1) ? 16 * random_.Between(1, 4) : row_bytes;
    layer.device = machine_.Allocate(num_seqs_ * layer.device_cells * layer.row_bytes);
    layer.tail = machine_.Allocate(num_seqs_ * layer.tail_cells * layer.row_bytes);
    layer.versions.resize(num_seqs_ * num_cells_);
  }
}

void TestCache::DrawLengths() {
  for (int32_t b = 0; b < num_seqs_; ++b) {
    const int64_t border = random_.Between(0, num_cells_ / kBlock) * kBlock;
    const int64_t length =
        random_.Pick<int64_t>({0, 1, border - 1, border, border + 1, num_cells_,
                               random_.Between(0, num_cells_)});
    // A length past the capacity is the caller's mistake, which a launch must find.
    const int64_t most = num_cells_ + (random_.Chance(0.02) ? 3 : 0);
    lengths_.push_back(int32_t(std::clamp<int64_t>(length, 0, most)));
    if (random_.Chance(0.01)) lengths_.back() = int32_t(most);
  }
  where_.resize(num_seqs_);
  appended_.resize(num_seqs_);
}

LayerShape TestCache::ShapeOf(AttendKey key) const {
  const TestLayer& layer = layers_[key.layer];
  return {num_seqs_,        num_new_,        layer.device_cells,
          layer.tail_cells, layer.row_bytes, key.window};
}

void TestCache::DrawStep() {
  num_new_ =
      int32_t(random_.Chance(0.1) ? random_.Between(100, 300) : random_.Between(1, 4));
  for (int32_t b = 0; b < num_seqs_; ++b) {
    if (random_.Chance(0.05)) lengths_[b] = int32_t(random_.Between(0, num_cells_));
    const int64_t room = std::max<int64_t>(0, num_cells_ - lengths_[b]);
    const bool active = random_.Chance(0.9);
    appended_[b] = int32_t(active ? std::min<int64_t>(room, num_new_) : 0);
    where_[b].clear();
    for (int32_t t = 0; t < appended_[b]; ++t) where_[b].push_back(lengths_[b] + t);
    if (appended_[b] < num_new_ && lengths_[b] > 0 && random_.Chance(0.2)) {
      where_[b].push_back(
          random_.Between(0, std::min<int64_t>(lengths_[b], num_cells_) - 1));
    }
  }
}

void TestCache::Advance() {
  for (int32_t b = 0; b < num_seqs_; ++b) lengths_[b] += appended_[b];
}

std::vector<Tail> TestCache::Tails() const {
  std::vector<Tail> tails;
  for (size_t i = 0; i < layers_.size(); ++i) {
    const TestLayer& layer = layers_[i];
    if (layer.tail_cells == 0) continue;
    tails.push_back({int64_t(i), layer.tail.data, layer.device_cells, layer.tail_cells,
                     layer.row_bytes});
  }
  return tails;
}

void TestCache::Fill(int64_t layer) {
  std::vector<CellWrite> writes;
  for (int64_t b = 0; b < num_seqs_; ++b) {
    for (int64_t cell = 0; cell < num_cells_; ++cell) {
      writes.push_back({Home(layers_[layer], b, cell), Content(layer, b, cell)});
    }
  }
  machine_.Store(std::move(writes), layers_[layer].row_bytes);
}

void TestCache::Append(int64_t layer) {
  std::vector<CellWrite> writes;
  for (int64_t b = 0; b < num_seqs_; ++b) {
    for (int64_t cell : where_[b]) {
      layers_[layer].versions[b * num_cells_ + cell] += 1;
      writes.push_back({Home(layers_[layer], b, cell), Content(layer, b, cell)});
    }
  }
  machine_.Store(std::move(writes), layers_[layer].row_bytes);
}

void TestCache::Rewrite() {
  for (size_t i = 0; i < layers_.size(); ++i) {
    for (uint64_t& version : layers_[i].versions) version += 1;
    Fill(int64_t(i));
  }
}

Range TestCache::Move(int64_t layer) {
  const Range old = layers_[layer].tail;
  layers_[layer].tail = machine_.Allocate(old.bytes);
  machine_.Duplicate(old, layers_[layer].tail);
  return old;
}

char* TestCache::Home(const TestLayer& layer, int64_t seq, int64_t cell) const {
  if (cell < layer.device_cells) {
    return layer.device.data + (seq * layer.device_cells + cell) * layer.row_bytes;
  }
  const int64_t in_tail = seq * layer.tail_cells + cell - layer.device_cells;
  return layer.tail.data + in_tail * layer.row_bytes;
}

uint64_t TestCache::Content(int64_t layer, int64_t seq, int64_t cell) const {
  const uint64_t version = layers_[layer].versions[seq * num_cells_ + cell];
  return ((uint64_t(layer) << 40) + (uint64_t(seq) << 24) + uint64_t(cell)) * 1000003 +
         (version << 50) + version;
}

bool TestCache::Replaced(int64_t seq, int64_t cell) const {
  return !where_[seq].empty() && where_[seq].back() == cell;  // DrawStep: only the last
}

void TestCache::Reads(int64_t layer, const Span& span, const char* base,
                      std::vector<CellRead>* reads) const {
  for (int64_t cell = span.first_cell; cell < span.end_cell; ++cell) {
    if (Replaced(span.seq, cell)) continue;
    const int64_t in_span = (cell - span.first_cell) * layers_[layer].row_bytes;
    reads->push_back({base + span.offset + in_span,
                      Home(layers_[layer], span.seq, cell),
                      Content(layer, span.seq, cell)});
  }
}

}  // namespace kvjax
