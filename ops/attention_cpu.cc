// AttendSpans on a host. Compiled once for any x86-64 and once for FMA and AVX2, with
// KVJAX_TARGET naming the copy; attention.cc picks one. Both give the same bits.
#include <algorithm>
#include <memory>

#include "attention.h"
#include "denormals.h"

namespace kvjax::KVJAX_TARGET {
namespace {

constexpr int kTile = 4;  // query rows computed together

struct Element {
  Type type;
  float Load(const void* data, int64_t i) const {
    return type == Type::kF32 ? static_cast<const float*>(data)[i]
                              : FromBf16(static_cast<const uint16_t*>(data)[i]);
  }
};

template <typename T>
void Widen(const void* source, int32_t n, float* target);
template <>
void Widen<float>(const void* source, int32_t n, float* target) {
  std::copy_n(static_cast<const float*>(source), n, target);
}
template <>
void Widen<uint16_t>(const void* source, int32_t n, float* target) {
  const uint16_t* x = static_cast<const uint16_t*>(source);
  for (int32_t i = 0; i < n; ++i) target[i] = FromBf16(x[i]);
}

// What lies in a cell of the block at hand.
enum Kind : int32_t { kNothing, kStored, kRow };

// One block of one kv head: its cells widened to float, masked ones 0.
struct Block {
  int32_t first_cell;
  int32_t num_cells;  // up to the sequence's end
  alignas(32) int32_t kind[kBlock];
  alignas(32) float keys[kBlock * 256];
  alignas(32) float values[kBlock * 256];
};

// A tile's scores and weights, and one block's result.
struct Tile {
  int32_t place[kTile];  // of each query; -1 = dropped
  alignas(32) float q[kTile][256];
  alignas(32) float p[kTile][kBlock];
  float m[kTile], sum[kTile];
  alignas(32) float values[kTile][256];
};

class Worker {
 public:
  Worker(const AttentionShape& shape, const AttentionBuffers& buffers, const char* base,
         const Span& span, int32_t head)
      : s_(shape), b_(buffers), base_(base), span_(span), head_(head) {}

  void Run() {
    if (span_.first) ClearState();
    for (int32_t i = 0; i < span_.num_blocks; ++i) Attend(span_.first_block + i);
    if (span_.last) Write();
  }

 private:
  const int32_t* where() const { return b_.where + int64_t(span_.seq) * s_.num_new; }

  float* state(int32_t row) const {
    const int64_t index =
        (int64_t(span_.seq) * s_.num_kv_heads + head_) * s_.rows() + row;
    return b_.state + index * StateFloats(s_.value_dim);
  }

  void ClearState() {
    for (int32_t r = 0; r < s_.rows(); ++r) {
      ClearPart(state(r));
      ClearPart(state(r) + s_.value_dim + 2);
    }
  }
  void ClearPart(float* part) {
    std::fill_n(part, s_.value_dim, 0.0f);
    part[s_.value_dim] = kEmpty;
    part[s_.value_dim + 1] = 0.0f;
  }

  void Attend(int32_t index) {
    Load(index);
    for (int32_t r = 0; r < s_.rows(); r += kTile) {
      switch (std::min(kTile, s_.rows() - r)) {
        case 1: Attend<1>(r); break;
        case 2: Attend<2>(r); break;
        case 3: Attend<3>(r); break;
        default: Attend<4>(r);
      }
    }
    if (index % kGroup == kGroup - 1) CloseGroups();
  }

  void Load(int32_t index) {
    block_.first_cell = index * kBlock;
    const int32_t end = EndCell(s_, span_.length);
    block_.num_cells = std::clamp(end - block_.first_cell, 0, kBlock);
    int32_t row_of[kBlock];
    std::fill_n(row_of, kBlock, -1);
    for (int32_t t = 0; t < s_.num_new; ++t) {
      const int32_t c = where()[t] - block_.first_cell;
      if (where()[t] >= 0 && c >= 0 && c < kBlock) row_of[c] = t;
    }
    const int64_t record = int64_t(s_.record_size) * SizeOf(s_.cell_type);
    for (int32_t c = 0; c < kBlock; ++c) {
      const int32_t cell = block_.first_cell + c;
      const char* source = nullptr;
      block_.kind[c] = kNothing;
      if (c < block_.num_cells && row_of[c] >= 0) {
        const int64_t t = int64_t(span_.seq) * s_.num_new + row_of[c];
        source = static_cast<const char*>(b_.rows) + t * s_.num_kv_heads * record;
        block_.kind[c] = kRow;
      } else if (cell >= span_.first_cell && cell < span_.end_cell) {
        const int64_t i = cell - span_.first_cell;
        source = base_ + span_.offset + i * s_.num_kv_heads * record;
        block_.kind[c] = kStored;
      }
      LoadRecord(source == nullptr ? nullptr : source + head_ * record, c);
    }
  }

  void LoadRecord(const char* source, int32_t c) {
    float* key = block_.keys + c * s_.head_dim;
    float* value = block_.values + c * s_.value_dim;
    if (source == nullptr) {
      std::fill_n(key, s_.head_dim, 0.0f);
      std::fill_n(value, s_.value_dim, 0.0f);
      return;
    }
    const int64_t value_at = int64_t(s_.head_dim) * SizeOf(s_.cell_type);
    if (s_.cell_type == Type::kF32) {
      Widen<float>(source, s_.head_dim, key);
      Widen<float>(source + value_at, s_.value_dim, value);
    } else {
      Widen<uint16_t>(source, s_.head_dim, key);
      Widen<uint16_t>(source + value_at, s_.value_dim, value);
    }
  }

  template <int kRows>
  void Attend(int32_t first_row) {
    if (!LoadQueries<kRows>(first_row)) return;
    Scores<kRows>();
    for (int r = 0; r < kRows; ++r) Weights(r);
    Values<kRows>();
    for (int r = 0; r < kRows; ++r) {
      if (tile_.m[r] == kEmpty) continue;
      FoldInto(state(first_row + r), tile_.values[r], tile_.m[r], tile_.sum[r]);
    }
  }

  // False if no query of the tile can see the block.
  template <int kRows>
  bool LoadQueries(int32_t first_row) {
    bool sees = false;
    const Element element{s_.query_type};
    const float scale = QueryScale(s_.scale, s_.soft_cap);
    for (int r = 0; r < kRows; ++r) {
      const int32_t t = (first_row + r) / s_.group();
      const int32_t n = head_ * s_.group() + (first_row + r) % s_.group();
      tile_.place[r] = where()[t];
      const bool before = span_.end_cell > block_.first_cell;
      sees |= tile_.place[r] >= 0 && (before || tile_.place[r] >= block_.first_cell);
      const int64_t at =
          ((int64_t(span_.seq) * s_.num_new + t) * s_.num_heads + n) * s_.head_dim;
      for (int32_t h = 0; h < s_.head_dim; ++h) {
        tile_.q[r][h] = Mul(element.Load(b_.q, at + h), scale);
      }
    }
    return sees;
  }

  template <int kRows>
  void Scores() {
    const int32_t n = block_.num_cells;
    int32_t c = 0;
    for (; c + 2 <= n; c += 2) Dots<kRows, 2>(c);
    if (c < n) Dots<kRows, 1>(c);
  }

  template <int kRows, int kCells>
  void Dots(int32_t c) {
    float sums[kRows][kCells][kLanes] = {};
    for (int32_t h = 0; h < s_.head_dim; h += kLanes) {
      for (int i = 0; i < kCells; ++i) {
        const float* key = block_.keys + (c + i) * s_.head_dim + h;
        for (int r = 0; r < kRows; ++r) {
          const float* q = tile_.q[r] + h;
#pragma GCC unroll 8
          for (int e = 0; e < kLanes; ++e) {
            sums[r][i][e] = Fma(key[e], q[e], sums[r][i][e]);
          }
        }
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int i = 0; i < kCells; ++i) {
        tile_.p[r][c + i] = Score(LaneSum(sums[r][i]), s_.soft_cap);
      }
    }
  }

  // Scores of row r become weights; masked and missing cells get 0.
  void Weights(int r) {
    const int32_t place = tile_.place[r], n = block_.num_cells;
    const int32_t low = s_.window > 0 ? place - s_.window : -1;
    float* p = tile_.p[r];
    for (int32_t c = 0; c < n; ++c) {
      const int32_t cell = block_.first_cell + c;
      const bool seen =
          (block_.kind[c] == kStored) | ((block_.kind[c] == kRow) & (cell <= place));
      p[c] = (seen & (cell > low) & (place >= 0)) ? p[c] : kEmpty;
    }
    for (int32_t c = n; c < kBlock; ++c) p[c] = kEmpty;
    float m = kEmpty;
    for (int32_t c = 0; c < n; ++c) m = Max(p[c], m);
    tile_.m[r] = m;
    if (m == kEmpty) {
      std::fill_n(p, kBlock, 0.0f);
      return;
    }
    for (int32_t c = 0; c < kBlock; ++c) p[c] = Exp2(Add(p[c], -m));
    tile_.sum[r] = TreeSum(p);
  }

  // Four runs of 32 weights, each halved five times, then summed as chains are.
  static float TreeSum(const float* p) {
    float run[4];
    for (int w = 0; w < 4; ++w) {
      float x[32];
      std::copy_n(p + 32 * w, 32, x);
      for (int half = 16; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) x[i] = Add(x[i], x[i + half]);
      }
      run[w] = x[0];
    }
    return ChainSum(run[0], run[1], run[2], run[3]);
  }

  template <int kRows>
  void Values() {
    const int32_t n = block_.num_cells;
    for (int32_t h = 0; h < s_.value_dim; h += kLanes) {
      float sums[kChains][kRows][kLanes] = {};
      int32_t c = 0;
      for (; c + kChains <= n; c += kChains) {
#pragma GCC unroll 4
        for (int w = 0; w < kChains; ++w) Weigh<kRows>(sums[w], c + w, h);
      }
      for (int w = 0; c + w < n; ++w) Weigh<kRows>(sums[w], c + w, h);
      for (int r = 0; r < kRows; ++r) {
        for (int e = 0; e < kLanes; ++e) {
          tile_.values[r][h + e] =
              ChainSum(sums[0][r][e], sums[1][r][e], sums[2][r][e], sums[3][r][e]);
        }
      }
    }
  }

  template <int kRows>
  void Weigh(float (&sums)[kRows][kLanes], int32_t c, int32_t h) {
    const float* value = block_.values + c * s_.value_dim + h;
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const float p = tile_.p[r][c];
#pragma GCC unroll 8
      for (int e = 0; e < kLanes; ++e) sums[r][e] = Fma(p, value[e], sums[r][e]);
    }
  }

  // Folds (values, m, sum) into a part of a state.
  void FoldInto(float* part, const float* values, float m, float sum) {
    const int32_t size = s_.value_dim;
    const FoldScale fold = Folding(part[size], m);
    for (int32_t h = 0; h < size; ++h) part[h] = Folded(part[h], values[h], fold);
    part[size] = fold.largest;
    part[size + 1] = Folded(part[size + 1], sum, fold);
  }

  void CloseGroups() {
    for (int32_t r = 0; r < s_.rows(); ++r) {
      float* group = state(r);
      const int32_t size = s_.value_dim;
      if (group[size] == kEmpty) continue;
      FoldInto(group + size + 2, group, group[size], group[size + 1]);
      ClearPart(group);
    }
  }

  void Write() {
    CloseGroups();
    bool fits = PlanFits(s_, span_.length, b_.lengths[span_.seq]);
    for (int32_t t = 0; t < s_.num_new; ++t) {
      fits &= PlaceFits(s_, span_.length, where()[t]);
    }
    if (!fits) *b_.error = 1;
    for (int32_t r = 0; r < s_.rows(); ++r) {
      const int32_t t = r / s_.group(), n = head_ * s_.group() + r % s_.group();
      const float* total = state(r) + s_.value_dim + 2;
      const int64_t at =
          ((int64_t(span_.seq) * s_.num_new + t) * s_.num_heads + n) * s_.value_dim;
      for (int32_t h = 0; h < s_.value_dim; ++h) {
        float x = Div(total[h], total[s_.value_dim + 1]);
        if (where()[t] < 0) x = 0.0f;
        if (!fits) x = NAN;
        if (s_.query_type == Type::kF32) {
          static_cast<float*>(b_.out)[at + h] = x;
        } else {
          static_cast<uint16_t*>(b_.out)[at + h] = ToBf16(x);
        }
      }
    }
  }

  const AttentionShape& s_;
  const AttentionBuffers& b_;
  const char* const base_;
  const Span& span_;
  const int32_t head_;
  Block block_;
  Tile tile_;
};

}  // namespace

void AttendSpans(const AttentionShape& shape, const AttentionBuffers& buffers,
                 const char* base, const std::vector<Span>& spans,
                 const ParallelFor& parallel) {
  const int64_t heads = shape.num_kv_heads;
  parallel(int64_t(spans.size()) * heads, [&](int64_t i) {
    const KeepDenormals keep;
    auto worker = std::make_unique<Worker>(shape, buffers, base, spans[i / heads],
                                           int32_t(i % heads));
    worker->Run();
  });
}

}  // namespace kvjax::KVJAX_TARGET
