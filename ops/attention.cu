#include <algorithm>
#include <mutex>
#include <set>
#include <string>
#include <type_traits>

#include "attention_gpu.h"
#include "cuda_status.h"

namespace kvjax {
namespace {

constexpr int kRunRows = 8;         // query rows of a tile that folds as it goes
constexpr int kFoldThreads = 1024;  // of a fold's CTA; and blocks of one of its rounds
constexpr int kFoldSlice = 32;      // values of a fold's CTA where no state is carried

constexpr int kThreads =
    kBlock;  // thread c scores cell c; warp w is chain w of the values
constexpr int kWarps = kThreads / 32;
static_assert(kWarps == kChains, "a warp for each chain");

// The spans of a launch. count 0: every sequence of a layer without a tail.
struct SpanTable {
  int32_t count;
  int32_t start[kMaxSpans + 1];  // blocks before each span
  Span spans[kMaxSpans];
};

struct Params {
  AttentionShape s;
  AttentionBuffers b;
  const char* base;
  float* workspace;  // [block of the launch, K, T * G, Hv + 2]: values, m, sum
  SpanTable table;
};

// ------------------------------------------------------------------ layout on chip

// Bytes from one staged key to the next: 16 more than a key, so that a column's
// elements fall on all banks.
__host__ __device__ inline int StagedRow(const AttentionShape& s, int element) {
  return s.head_dim * element + 16;
}

// Shared memory of a CTA. Sums alias the staged keys, which are read by then.
template <int R>
struct Shared {
  const char** source;  // [kBlock]
  float* p;             // [kBlock, R]
  float* q;             // [H / kLanes, R, kLanes]
  int64_t* query_at;    // [R] where each query lies; -1 = no such row
  float* warp_max;      // [kWarps, R]
  float* warp_sum;      // [kWarps, R]
  float* m;             // [R]
  float* sum;           // [R]
  int32_t* place;       // [R]
  int32_t* row_of;      // [kBlock]
  float* state;         // [R, 2, Hv + 2], run kernel only
  char* keys;           // [kBlock, StagedRow]
  float* sums;          // [kChains, R, Hv]

  __host__ __device__ static int Bytes(const AttentionShape& s, int element, bool run) {
    const int sums = kChains * R * s.value_dim * 4;
    return Fixed(s, run) + max(kBlock * StagedRow(s, element), sums);
  }
  __host__ __device__ static int Fixed(const AttentionShape& s, bool run) {
    const int floats = R * s.head_dim + kBlock * R + 2 * kWarps * R + 3 * R + kBlock +
                       (run ? R * 2 * (s.value_dim + 2) : 0);
    return (8 * (kBlock + R) + floats * 4 + 15) / 16 * 16;
  }

  __device__ Shared(char* memory, const AttentionShape& s, bool run) {
    source = reinterpret_cast<const char**>(memory);
    p = reinterpret_cast<float*>(source + kBlock);
    q = p + kBlock * R;
    query_at = reinterpret_cast<int64_t*>(q + R * s.head_dim);
    warp_max = reinterpret_cast<float*>(query_at + R);
    warp_sum = warp_max + kWarps * R;
    m = warp_sum + kWarps * R;
    sum = m + R;
    place = reinterpret_cast<int32_t*>(sum + R);
    row_of = place + R;
    state = reinterpret_cast<float*>(row_of + kBlock);
    keys = memory + Fixed(s, run);
    sums = reinterpret_cast<float*>(keys);
  }
};

// ------------------------------------------------------------------ loads

// Where a block's records of one head lie: evenly from `plain` on, or where it is null
// as source[c] says, null for a masked cell.
struct Cells {
  const char* plain;
  int stride;  // bytes
  const char* const* source;

  template <bool kPlain>
  __device__ const char* At(int c) const {
    return kPlain ? plain + c * stride : source[c];
  }
};

// Starts copying a block's keys into shared memory, 16 bytes a piece, a key's pieces to
// neighbouring threads; zeros where a cell is masked. What was there before has been
// read. (One bulk copy a key, Hopper's, is no faster: its engine takes about 60 cycles
// for each.)
template <bool kPlain>
__device__ void StageKeys(const Cells& cells, int bytes, int row, char* keys) {
  const int pieces = bytes / 16, cells_on = kThreads / pieces,
            pieces_on = kThreads % pieces;
  int c = threadIdx.x / pieces, piece = threadIdx.x % pieces;
  uint32_t to = uint32_t(__cvta_generic_to_shared(keys + c * row + piece * 16));
#pragma unroll 4
  while (c < kBlock) {
    const char* from = cells.At<kPlain>(c);
    if (kPlain || from != nullptr) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to),
                   "l"(from + piece * 16));
    } else {
      *reinterpret_cast<uint4*>(keys + c * row + piece * 16) = make_uint4(0, 0, 0, 0);
    }
    c += cells_on;
    piece += pieces_on;
    to += cells_on * row + pieces_on * 16;
    if (piece >= pieces) {
      piece -= pieces;
      c += 1;
      to += row - pieces * 16;
    }
  }
  asm volatile("cp.async.commit_group;");
}

// All threads: the staged keys are there.
__device__ void AwaitKeys() {
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();  // the other threads' pieces
}

// N consecutive elements as they are stored: a register or a few.
template <typename E, int N>
struct Packed {
  static constexpr int kWords = N * sizeof(E) / 4;
  uint32_t words[kWords];

  using Word = std::conditional_t<kWords % 4 == 0, uint4,
                                  std::conditional_t<kWords == 2, uint2, uint32_t>>;
  static constexpr int kLoads = kWords * 4 / sizeof(Word);

  static __device__ Packed Load(const char* shared) {
    Packed x;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      reinterpret_cast<Word*>(x.words)[i] = reinterpret_cast<const Word*>(shared)[i];
    }
    return x;
  }
  static __device__ Packed LoadGlobal(const char* memory) {
    Packed x;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      reinterpret_cast<Word*>(x.words)[i] =
          __ldg(reinterpret_cast<const Word*>(memory) + i);
    }
    return x;
  }

  __device__ void Widen(float (&x)[N]) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (sizeof(E) == 4) {
        x[i] = __uint_as_float(words[i]);
      } else {
        x[2 * i] = __uint_as_float(words[i] << 16);
        x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
      }
    }
  }
};

template <int R>
__device__ void LoadRow(const float* memory, float (&x)[R]) {
  if constexpr (R % 4 == 0) {
    Packed<float, R>::Load(reinterpret_cast<const char*>(memory)).Widen(x);
  } else {
#pragma unroll
    for (int r = 0; r < R; ++r) x[r] = memory[r];
  }
}

// ------------------------------------------------------------------ one block

// What is at hand: one sequence, one kv head, a tile of R query rows.
struct Work {
  Span span;
  int32_t head;
  int32_t first_row;
};

__device__ const int32_t* WhereOf(const Params& p, const Work& w) {
  return p.b.where + int64_t(w.span.seq) * p.s.num_new;
}

template <int R>
__device__ void LoadQueries(const Params& p, const Work& w, const Shared<R>& shared) {
  const AttentionShape& s = p.s;
  const float scale = QueryScale(s.scale, s.soft_cap);
  if (threadIdx.x < R) {
    const int row = w.first_row + int(threadIdx.x);
    const int t = row / s.group(), n = w.head * s.group() + row % s.group();
    const bool there = row < s.rows();
    const int64_t token = int64_t(w.span.seq) * s.num_new + t;
    shared.query_at[threadIdx.x] = there ? (token * s.num_heads + n) * s.head_dim : -1;
    shared.place[threadIdx.x] = there ? WhereOf(p, w)[t] : -1;
  }
  __syncthreads();  // where the queries are
  for (int h = threadIdx.x; h < s.head_dim; h += kThreads) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int64_t at = shared.query_at[r];
      float x = 0.0f;
      if (at >= 0) {
        x = s.query_type == Type::kF32
                ? static_cast<const float*>(p.b.q)[at + h]
                : FromBf16(static_cast<const uint16_t*>(p.b.q)[at + h]);
      }
      shared.q[(h / kLanes * R + r) * kLanes + h % kLanes] = Mul(x, scale);
    }
  }
}

enum Kind { kNothing, kStored, kRow };

// Finds where the block's cells lie, and thread c's kind. All threads.
template <int R>
__device__ Kind FindCells(const Params& p, const Work& w, const Shared<R>& shared,
                          int first_cell, int num_cells, Cells* cells) {
  const AttentionShape& s = p.s;
  const int c = threadIdx.x;
  const int record = s.record_size * (s.cell_type == Type::kF32 ? 4 : 2);
  cells->stride = s.num_kv_heads * record;
  cells->source = shared.source;
  // May lie before the block's own first cell; it is not read there.
  const char* const stored = p.base + w.span.offset + int64_t(w.head) * record +
                             int64_t(first_cell - w.span.first_cell) * cells->stride;
  bool has_rows = false;
  for (int t = c; t < s.num_new; t += kThreads) {
    const int place = WhereOf(p, w)[t];
    has_rows |= place >= first_cell && place < first_cell + kBlock;
  }
  has_rows = __syncthreads_or(has_rows);
  if (!has_rows && w.span.first_cell <= first_cell &&
      w.span.end_cell >= first_cell + kBlock) {
    cells->plain = stored;
    return kStored;
  }
  cells->plain = nullptr;
  shared.row_of[c] = -1;
  __syncthreads();  // none of the rows is found
  for (int t = c; t < s.num_new; t += kThreads) {
    const int place = WhereOf(p, w)[t] - first_cell;
    if (WhereOf(p, w)[t] >= 0 && place >= 0 && place < kBlock) shared.row_of[place] = t;
  }
  __syncthreads();  // all are
  const int cell = first_cell + c;
  const char* source = nullptr;
  Kind kind = kNothing;
  if (c < num_cells && shared.row_of[c] >= 0) {
    const int64_t row = int64_t(w.span.seq) * s.num_new + shared.row_of[c];
    source = static_cast<const char*>(p.b.rows) + row * cells->stride + w.head * record;
    kind = kRow;
  } else if (cell >= w.span.first_cell && cell < w.span.end_cell) {
    source = stored + c * cells->stride;
    kind = kStored;
  }
  shared.source[c] = source;
  __syncthreads();  // all sources are there
  return kind;
}

// A warp's chain of values, on its way into registers while the scores are made. Lane i
// has VEC of each value; as many cells are under way as a few dozen registers hold.
template <typename E, int VEC, int R>
class Values {
 public:
  // Starts loading.
  __device__ Values(const AttentionShape& s, const Cells& cells)
      : cells_(cells),
        at_((s.head_dim + lane() * VEC) * int(sizeof(E))),
        lane_holds_(lane() * VEC < s.value_dim) {
    if (cells.plain != nullptr) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) under_way_[i] = Load<true>(i);
    } else {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) under_way_[i] = Load<false>(i);
    }
  }

  // Sums the chain by the weights in shared.p into shared.sums. Keys must have been
  // read.
  __device__ void Sum(const AttentionShape& s, const Shared<R>& shared, int num_cells) {
    float sums[R][VEC] = {};
    if (cells_.plain != nullptr) {
      SumChain<true>(shared, kBlock, sums);
    } else {
      SumChain<false>(shared, num_cells, sums);
    }
    if (!lane_holds_) return;
    float* to = shared.sums + threadIdx.x / 32 * R * s.value_dim + lane() * VEC;
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int e = 0; e < VEC; ++e) to[r * s.value_dim + e] = sums[r][e];
    }
  }

 private:
  static constexpr int kChain = kBlock / kChains;
  static constexpr int kRegisters = R > 4 ? 32 : 64;
  static constexpr int kFit = kRegisters / Packed<E, VEC>::kWords;
  static constexpr int kAhead = kFit < kChain ? kFit : kChain;

  static __device__ int lane() { return threadIdx.x % 32; }
  static __device__ int CellOf(int i) { return threadIdx.x / 32 + i * kChains; }

  template <bool kPlain>
  __device__ Packed<E, VEC> Load(int i) const {
    const char* source = cells_.At<kPlain>(CellOf(i));
    if (!lane_holds_ || (!kPlain && source == nullptr)) return {};
    return Packed<E, VEC>::LoadGlobal(source + at_);
  }

  template <bool kPlain>
  __device__ void SumChain(const Shared<R>& shared, int num_cells,
                           float (&sums)[R][VEC]) {
#pragma unroll
    for (int first = 0; first < kChain; first += kAhead) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int c = CellOf(first + i);
        if (kPlain || c < num_cells) {
          float v[VEC], p[R];
          under_way_[i].Widen(v);
          LoadRow<R>(shared.p + c * R, p);
#pragma unroll
          for (int r = 0; r < R; ++r) {
#pragma unroll
            for (int e = 0; e < VEC; ++e) sums[r][e] = Fma(p[r], v[e], sums[r][e]);
          }
        }
        if (first + kAhead < kChain) under_way_[i] = Load<kPlain>(first + kAhead + i);
      }
    }
  }

  const Cells& cells_;
  const int at_;  // bytes from a record to this lane's piece of its value
  const bool lane_holds_;
  Packed<E, VEC> under_way_[kAhead];
};

// Scores of thread c's cell for the R rows.
template <typename E, int R>
__device__ void Scores(const AttentionShape& s, const Shared<R>& shared,
                       float (&x)[R]) {
  const char* key = shared.keys + threadIdx.x * StagedRow(s, sizeof(E));
  float sums[R][kLanes] = {};
  const float* rows = shared.q;
#pragma unroll 2
  for (int h = 0; h < s.head_dim; h += kLanes, rows += R * kLanes) {
    float k[kLanes];
    Packed<E, kLanes>::Load(key + h * sizeof(E)).Widen(k);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      float q[kLanes];
      LoadRow<kLanes>(rows + r * kLanes, q);
#pragma unroll
      for (int e = 0; e < kLanes; ++e) sums[r][e] = Fma(k[e], q[e], sums[r][e]);
    }
  }
#pragma unroll
  for (int r = 0; r < R; ++r) x[r] = Score(LaneSum(sums[r]), s.soft_cap);
}

// Scores become weights in shared.p; shared.m and shared.sum are the block's.
template <int R>
__device__ void Weights(const AttentionShape& s, const Shared<R>& shared, int cell,
                        Kind kind, float (&x)[R]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const int place = shared.place[r];
    const int low = s.window > 0 ? place - s.window : -1;
    const bool seen = (kind == kStored || (kind == kRow && cell <= place)) &&
                      cell > low && place >= 0;
    x[r] = seen ? x[r] : kEmpty;
    float m = Max(x[r], kEmpty);
    for (int step = 16; step > 0; step /= 2) {
      m = Max(m, __shfl_xor_sync(~0u, m, step));
    }
    if (lane == 0) shared.warp_max[warp * R + r] = m;
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < R; ++r) {
    float m = kEmpty;
    for (int w = 0; w < kWarps; ++w) m = Max(shared.warp_max[w * R + r], m);
    const float weight = m == kEmpty ? 0.0f : Exp2(Add(x[r], -m));
    shared.p[threadIdx.x * R + r] = weight;
    float sum = weight;
    for (int step = 16; step > 0; step /= 2) {
      sum = Add(sum, __shfl_xor_sync(~0u, sum, step));
    }
    if (lane == 0) shared.warp_sum[warp * R + r] = sum;
    if (threadIdx.x == 0) shared.m[r] = m;
  }
  __syncthreads();
  if (threadIdx.x < R) {
    const float* sums = shared.warp_sum + threadIdx.x;
    shared.sum[threadIdx.x] = ChainSum(sums[0], sums[R], sums[2 * R], sums[3 * R]);
  }
}

// Block `index` for a tile: shared.m, shared.sum, and the four chains in shared.sums.
template <typename E, int VEC, int R>
__device__ void AttendBlock(const Params& p, const Work& w, const Shared<R>& shared,
                            int index) {
  const AttentionShape& s = p.s;
  const int first_cell = index * kBlock, c = threadIdx.x;
  const int left = EndCell(s, w.span.length) - first_cell;
  const int num_cells = left < 0 ? 0 : (left > kBlock ? kBlock : left);
  Cells cells;
  const Kind kind = FindCells(p, w, shared, first_cell, num_cells, &cells);
  const int key_bytes = s.head_dim * int(sizeof(E)), row = StagedRow(s, sizeof(E));
  if (cells.plain != nullptr) {
    StageKeys<true>(cells, key_bytes, row, shared.keys);
  } else {
    StageKeys<false>(cells, key_bytes, row, shared.keys);
  }
  Values<E, VEC, R> values(s, cells);
  AwaitKeys();
  float x[R];
  Scores<E, R>(s, shared, x);
  Weights<R>(s, shared, first_cell + c, kind, x);
  values.Sum(s, shared, num_cells);
  __syncthreads();  // all chains are there
}

template <int R>
__device__ float BlockValue(const AttentionShape& s, const Shared<R>& shared, int i) {
  const int stride = R * s.value_dim;
  return ChainSum(shared.sums[i], shared.sums[stride + i], shared.sums[2 * stride + i],
                  shared.sums[3 * stride + i]);
}

// ------------------------------------------------------------------ spans

// The span that covers a whole sequence of a layer without a tail.
__device__ Span SequenceSpan(const AttentionShape& s, const int32_t* lengths, int seq) {
  const int length = lengths[seq];
  const int visible = s.window > 0 && length >= s.window ? length - s.window + 1 : 0;
  const int first_block = min(visible, length) / kBlock;
  const int end_block = (EndCell(s, length) + kBlock - 1) / kBlock;
  const int64_t cell_bytes =
      int64_t(s.num_kv_heads) * s.record_size * (s.cell_type == Type::kF32 ? 4 : 2);
  const int start = first_block * kBlock;
  Span span;
  span.seq = seq;
  span.length = length;
  span.first_block = first_block;
  span.num_blocks = max(0, end_block - first_block);
  span.first_cell = start;
  span.end_cell = max(start, min(length, s.capacity));
  span.offset = (int64_t(seq) * s.capacity + start) * cell_bytes;
  span.first = span.last = true;
  return span;
}

__device__ Span SpanAt(const Params& p, int index) {
  return p.table.count > 0 ? p.table.spans[index]
                           : SequenceSpan(p.s, p.b.lengths, index);
}

// Blocks of the launch before span `index`.
__device__ int64_t StartOf(const Params& p, int index) {
  return p.table.count > 0 ? p.table.start[index]
                           : int64_t(index) * (p.s.capacity / kBlock);
}

__device__ float* PartialOf(const Params& p, int64_t block, int head, int row) {
  const int64_t index = (block * p.s.num_kv_heads + head) * p.s.rows() + row;
  return p.workspace + index * (p.s.value_dim + 2);
}

__device__ float* StateOf(const Params& p, int seq, int head, int row) {
  const int64_t index = (int64_t(seq) * p.s.num_kv_heads + head) * p.s.rows() + row;
  return p.b.state + index * StateFloats(p.s.value_dim);
}

__device__ void WriteOut(const Params& p, const Work& w, int row, int h, float x,
                         bool fits) {
  const AttentionShape& s = p.s;
  const int t = row / s.group(), n = w.head * s.group() + row % s.group();
  if (WhereOf(p, w)[t] < 0) x = 0.0f;
  if (!fits) x = NAN;
  const int64_t at =
      ((int64_t(w.span.seq) * s.num_new + t) * s.num_heads + n) * s.value_dim + h;
  if (s.query_type == Type::kF32) {
    static_cast<float*>(p.b.out)[at] = x;
  } else {
    static_cast<uint16_t*>(p.b.out)[at] = ToBf16(x);
  }
}

// Whether the launches held all that the sequence's queries see; all threads call it.
__device__ bool Fits(const Params& p, const Work& w) {
  bool fits = PlanFits(p.s, w.span.length, p.b.lengths[w.span.seq]);
  for (int t = threadIdx.x; t < p.s.num_new; t += blockDim.x) {
    fits &= PlaceFits(p.s, w.span.length, WhereOf(p, w)[t]);
  }
  fits = __syncthreads_and(fits);
  if (!fits && threadIdx.x == 0 && p.b.error != nullptr) *p.b.error = 1;
  return fits;
}

// ------------------------------------------------------------------ split and fold

// One CTA a block: [blocks of the launch, K, tiles of R rows].
template <typename E, int VEC, int R>
__global__ void __launch_bounds__(kThreads, R > 4 ? 2 : 4)
    SplitKernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) char memory[];
  const Shared<R> shared(memory, p.s, false);
  int index = 0;
  if (p.table.count > 0) {
    while (int(blockIdx.x) >= p.table.start[index + 1]) ++index;
  } else {
    index = blockIdx.x / (p.s.capacity / kBlock);
  }
  Work w{SpanAt(p, index), int32_t(blockIdx.y), int32_t(blockIdx.z) * R};
  const int i = int(blockIdx.x - StartOf(p, index));
  if (i >= w.span.num_blocks) return;
  LoadQueries(p, w, shared);
  AttendBlock<E, VEC, R>(p, w, shared, w.span.first_block + i);
  const int size = p.s.value_dim;
  float* const partials = PartialOf(p, blockIdx.x, w.head, w.first_row);
#pragma unroll
  for (int r = 0; r < R; ++r) {
    if (w.first_row + r >= p.s.rows()) break;
    for (int h = threadIdx.x; h < size; h += kThreads) {
      partials[r * (size + 2) + h] = BlockValue(p.s, shared, r * size + h);
    }
  }
  const int row = w.first_row + int(threadIdx.x);
  if (threadIdx.x < R && row < p.s.rows()) {
    float* partial = PartialOf(p, blockIdx.x, w.head, row) + p.s.value_dim;
    partial[0] = shared.m[threadIdx.x];
    partial[1] = shared.sum[threadIdx.x];
  }
}

// A running state of one query row, of which a thread holds one value.
struct Running {
  float value = 0.0f, m = kEmpty, sum = 0.0f;
};

// How far a running state and an item are scaled when one is folded into the other; the
// scales depend on the largest scores alone. state < 0: nothing to fold.
struct Scales {
  float state, item;
};

// Thread i's scales when items with largest scores `m` (lane i of each run of `width`
// lanes has item i) are folded in order into a state whose largest was `before`.
__device__ Scales ScalesOf(float before, float m, int width) {
  const int i = threadIdx.x % width;
  float largest = m;  // of items 0 to i
  for (int step = 1; step < width; step *= 2) {
    const float other = __shfl_up_sync(~0u, largest, step, width);
    if (i >= step) largest = Max(largest, other);
  }
  float previous = __shfl_up_sync(~0u, largest, 1, width);
  previous = i == 0 ? before : Max(before, previous);
  if (m == kEmpty) return {-1.0f, 0.0f};
  const FoldScale fold = Folding(previous, m);
  return {fold.state, fold.item};
}

__device__ float FoldOne(float state, float item, Scales scales) {
  const float folded = Folded(state, item, {0.0f, scales.state, scales.item});
  return scales.state < 0.0f ? state : folded;
}

// Folds a span's blocks in order: [T * G * slices of the values, K, spans]. In rounds
// of kFoldThreads blocks: a thread for each block's scales, a warp for the groups';
// then some groups at a time, a thread for each value of each, and one for each value
// of the total. More than one slice only where no state is carried: they would share
// its m and sum.
__global__ void __launch_bounds__(kFoldThreads)
    FoldKernel(const __grid_constant__ Params p, int slices) {
  constexpr int kGroups = kFoldThreads / kGroup;
  __shared__ Scales block_scales[kFoldThreads], group_scales[kGroups];
  __shared__ float block_m[kFoldThreads], block_sum[kFoldThreads];
  __shared__ float group_m[kGroups], group_sum[kGroups];
  __shared__ float groups[kFoldThreads];  // [groups at a time, width]: their values
  __shared__ float total_m;

  const int size = p.s.value_dim, width = (size / slices + 31) / 32 * 32;
  const int row = blockIdx.x / slices,
            h = blockIdx.x % slices * width + threadIdx.x % width;
  const int at = h < size ? h : 0, at_once = kFoldThreads / width;
  const int turn = threadIdx.x / width;  // which of the groups at a time
  const Work w{SpanAt(p, blockIdx.z), int32_t(blockIdx.y), row};
  float* const state =
      p.b.state == nullptr ? nullptr : StateOf(p, w.span.seq, w.head, row);
  // All threads keep m and sum of the group that is not full and of the total; the
  // thread of turn 0 also a value of both.
  Running open, total;
  if (!w.span.first) {
    open = {state[at], state[size], state[size + 1]};
    total = {state[size + 2 + at], state[2 * size + 2], state[2 * size + 3]};
  }
  const bool fits = w.span.last && Fits(p, w);
  const int first = w.span.first_block, end = first + w.span.num_blocks;
  const int first_group = first / kGroup;
  const int64_t start = StartOf(p, blockIdx.z) - first;
  for (int round = first_group * kGroup; round < end; round += kFoldThreads) {
    const int i = threadIdx.x, block = round + i;
    const bool here = block >= first && block < end;
    const float* partial = PartialOf(p, here ? start + block : 0, w.head, row) + size;
    block_m[i] = here ? partial[0] : kEmpty;
    block_sum[i] = here ? partial[1] : 0.0f;
    const bool continues = block / kGroup == first_group;
    block_scales[i] = ScalesOf(continues ? open.m : kEmpty, block_m[i], kGroup);
    __syncthreads();  // the blocks' scales are there

    const int num_groups = min(kGroups, (end - round + kGroup - 1) / kGroup);
    if (i < num_groups) {
      const bool opened = round / kGroup + i == first_group;
      Running group{0.0f, opened ? open.m : kEmpty, opened ? open.sum : 0.0f};
#pragma unroll
      for (int j = i * kGroup; j < i * kGroup + kGroup; ++j) {
        group.sum = FoldOne(group.sum, block_sum[j], block_scales[j]);
        group.m = Max(group.m, block_m[j]);
      }
      group_m[i] = group.m;
      group_sum[i] = group.sum;
    }
    __syncthreads();  // the groups' m and sum are there
    if (i < 32) {
      float before = total.m;
      for (int g = i; g < (num_groups + 31) / 32 * 32; g += 32) {
        // A group that is not full yet stays open.
        const bool full = g < num_groups && round + (g + 1) * kGroup <= end;
        const float m = full ? group_m[g] : kEmpty;
        group_scales[g] = ScalesOf(before, m, 32);
        float largest = m;
        for (int step = 16; step > 0; step /= 2) {
          largest = Max(largest, __shfl_xor_sync(~0u, largest, step));
        }
        before = Max(before, largest);
      }
      if (i == 0) total_m = before;
    }
    __syncthreads();  // the groups' scales are there

    for (int base = 0; base < num_groups; base += at_once) {
      const int g = base + turn;
      if (g < num_groups && turn < at_once) {
        float items[kGroup];
#pragma unroll
        for (int j = 0; j < kGroup; ++j) {
          const int b = round + g * kGroup + j;
          const int64_t from = start + (b >= first && b < end ? b : first);
          items[j] = PartialOf(p, from, w.head, row)[at];
        }
        // The open group's value is with the thread of turn 0, which has group 0.
        float x = round / kGroup + g == first_group ? open.value : 0.0f;
#pragma unroll
        for (int j = 0; j < kGroup; ++j) {
          x = FoldOne(x, items[j], block_scales[g * kGroup + j]);
        }
        groups[i] = x;
      }
      __syncthreads();  // these groups' values are there
      const int last = min(at_once, num_groups - base);
      if (turn == 0) {
#pragma unroll 8
        for (int t = 0; t < last; ++t) {
          const Scales scales = group_scales[base + t];
          total.value = FoldOne(total.value, groups[t * width + i], scales);
          total.sum = FoldOne(total.sum, group_sum[base + t], scales);
        }
        open.value = groups[(last - 1) * width + i];
      }
      __syncthreads();  // and are read
    }
    total.m = total_m;
    open.m = group_m[num_groups - 1];
    open.sum = group_sum[num_groups - 1];
    __syncthreads();  // the round is read
  }
  if (end > first && end % kGroup == 0) open = Running{};
  if (turn > 0 || h >= size) return;
  if (w.span.last) {
    const FoldScale fold = Folding(total.m, open.m);
    const Scales scales = {open.m == kEmpty ? -1.0f : fold.state, fold.item};
    const float sum = FoldOne(total.sum, open.sum, scales);
    const float value = FoldOne(total.value, open.value, scales);
    WriteOut(p, w, row, h, Div(value, sum), fits);
    return;
  }
  state[h] = open.value;
  state[size + 2 + h] = total.value;
  if (h == 0) {
    state[size] = open.m;
    state[size + 1] = open.sum;
    state[2 * size + 2] = total.m;
    state[2 * size + 3] = total.sum;
  }
}

// ------------------------------------------------------------------ fold as it goes

// Folds item (values by f, m, sum: one a row) into part 0 or 1 of shared.state.
template <int R, typename Value>
__device__ void FoldShared(const AttentionShape& s, float* state, int part,
                           const float* m, const float* sum, int stride,
                           const Value& value) {
  const int size = s.value_dim, row_floats = 2 * (size + 2);
  state += part * (size + 2);
  for (int i = threadIdx.x; i < R * size; i += kThreads) {
    const int r = i / size, h = i % size;
    if (m[r * stride] == kEmpty) continue;
    float* row = state + r * row_floats;
    row[h] = Folded(row[h], value(i), Folding(row[size], m[r * stride]));
  }
  __syncthreads();  // the state's m is read by all before it is written
  if (threadIdx.x < R && m[threadIdx.x * stride] != kEmpty) {
    float* row = state + threadIdx.x * row_floats;
    const FoldScale fold = Folding(row[size], m[threadIdx.x * stride]);
    row[size + 1] = Folded(row[size + 1], sum[threadIdx.x * stride], fold);
    row[size] = fold.largest;
  }
  __syncthreads();
}

template <int R>
__device__ void CloseGroup(const AttentionShape& s, float* state) {
  const int size = s.value_dim, row_floats = 2 * (size + 2);
  FoldShared<R>(s, state, 1, state + size, state + size + 1, row_floats,
                [&](int i) { return state[i / size * row_floats + i % size]; });
  for (int i = threadIdx.x; i < R * (size + 2); i += kThreads) {
    const int r = i / (size + 2), h = i % (size + 2);
    state[r * row_floats + h] = h == size ? kEmpty : 0.0f;
  }
  __syncthreads();
}

// One CTA a span and tile: [spans, K, tiles of R rows].
template <typename E, int VEC, int R>
__global__ void __launch_bounds__(kThreads, R > 4 ? 2 : 4)
    RunKernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) char memory[];
  const Shared<R> shared(memory, p.s, true);
  const AttentionShape& s = p.s;
  const Work w{SpanAt(p, blockIdx.x), int32_t(blockIdx.y), int32_t(blockIdx.z) * R};
  const int row_floats = 2 * (s.value_dim + 2);
  LoadQueries(p, w, shared);
  for (int i = threadIdx.x; i < R * row_floats; i += kThreads) {
    const int row = w.first_row + i / row_floats, j = i % row_floats;
    const bool is_m = j % (s.value_dim + 2) == s.value_dim;
    float x = is_m ? kEmpty : 0.0f;
    if (!w.span.first && row < s.rows()) x = StateOf(p, w.span.seq, w.head, row)[j];
    shared.state[i] = x;
  }
  __syncthreads();
  int last_place = -1;
  for (int r = 0; r < R; ++r) last_place = max(last_place, shared.place[r]);

  for (int i = 0; i < w.span.num_blocks; ++i) {
    const int block = w.span.first_block + i;
    const bool stored = w.span.end_cell > block * kBlock;
    if (last_place >= 0 && (stored || last_place >= block * kBlock)) {
      AttendBlock<E, VEC, R>(p, w, shared, block);
      FoldShared<R>(s, shared.state, 0, shared.m, shared.sum, 1,
                    [&](int j) { return BlockValue(s, shared, j); });
    }
    if (block % kGroup == kGroup - 1) CloseGroup<R>(s, shared.state);
  }

  if (w.span.last) {
    CloseGroup<R>(s, shared.state);
    const bool fits = Fits(p, w);
    for (int i = threadIdx.x; i < R * s.value_dim; i += kThreads) {
      const int r = i / s.value_dim, h = i % s.value_dim;
      if (w.first_row + r >= s.rows()) break;
      const float* total = shared.state + r * row_floats + s.value_dim + 2;
      WriteOut(p, w, w.first_row + r, h, Div(total[h], total[s.value_dim + 1]), fits);
    }
    return;
  }
  for (int i = threadIdx.x; i < R * row_floats; i += kThreads) {
    const int row = w.first_row + i / row_floats;
    if (row < s.rows()) {
      StateOf(p, w.span.seq, w.head, row)[i % row_floats] = shared.state[i];
    }
  }
}

// ------------------------------------------------------------------ launchers

using Kernel = void (*)(Params);

struct Choice {
  Kernel kernel;
  int rows;   // of a tile
  int bytes;  // of shared memory
};

template <typename E, int VEC, int R, bool run>
Choice Make(const AttentionShape& s) {
  const Kernel kernel = run ? RunKernel<E, VEC, kRunRows> : SplitKernel<E, VEC, R>;
  return {kernel, R, Shared<R>::Bytes(s, sizeof(E), run)};
}

template <typename E, int VEC>
Choice ChooseByRows(const AttentionShape& s, bool run) {
  if (run) return Make<E, VEC, kRunRows, true>(s);
  if (s.rows() == 1) return Make<E, VEC, 1, false>(s);
  if (s.rows() == 2) return Make<E, VEC, 2, false>(s);
  if (s.rows() <= 4) return Make<E, VEC, 4, false>(s);
  return Make<E, VEC, 8, false>(s);
}

template <typename E>
Choice ChooseByValues(const AttentionShape& s, bool run) {
  if (s.value_dim <= 64) return ChooseByRows<E, 2>(s, run);
  if (s.value_dim <= 128) return ChooseByRows<E, 4>(s, run);
  return ChooseByRows<E, 8>(s, run);
}

Choice Choose(const AttentionShape& s, bool run) {
  return s.cell_type == Type::kF32 ? ChooseByValues<float>(s, run)
                                   : ChooseByValues<uint16_t>(s, run);
}

Status Enqueue(cudaStream_t stream, const Params& p, int64_t num_blocks, int num_spans,
               bool carries) {
  const AttentionShape& s = p.s;
  const bool run = s.rows() > kMaxSplitRows;
  const Choice choice = Choose(s, run);
  const unsigned tiles = (s.rows() + choice.rows - 1) / choice.rows;
  const dim3 grid(unsigned(run ? num_spans : num_blocks), s.num_kv_heads, tiles);
  if (grid.x > 0) choice.kernel<<<grid, kThreads, choice.bytes, stream>>>(p);
  if (!run) {
    const int slices = carries ? 1 : (s.value_dim + kFoldSlice - 1) / kFoldSlice;
    const dim3 folds(s.rows() * slices, s.num_kv_heads, num_spans);
    FoldKernel<<<folds, kFoldThreads, 0, stream>>>(p, slices);
  }
  return KVJAX_CUDA(cudaGetLastError());
}

template <typename E, int VEC>
Status PrepareKernels() {
  const int most = 227 << 10;
  const Kernel kernels[] = {SplitKernel<E, VEC, 1>, SplitKernel<E, VEC, 2>,
                            SplitKernel<E, VEC, 4>, SplitKernel<E, VEC, 8>,
                            RunKernel<E, VEC, kRunRows>};
  for (Kernel kernel : kernels) {
    KVJAX_RETURN_IF_CUDA_ERROR(cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most));
  }
  return Status::Ok();
}

}  // namespace

int64_t WorkspaceFloats(const AttentionShape& s, int64_t num_blocks) {
  if (s.rows() > kMaxSplitRows) return 0;
  return num_blocks * s.num_kv_heads * s.rows() * (s.value_dim + 2);
}

Status LaunchSpans(cudaStream_t stream, const AttentionShape& shape,
                   const AttentionBuffers& buffers, const char* base,
                   const std::vector<Span>& spans, float* workspace) {
  if (spans.empty()) return Status::Ok();
  Params p{shape, buffers, base, workspace, {}};
  p.table.count = int32_t(spans.size());
  bool carries = false;
  for (size_t i = 0; i < spans.size(); ++i) {
    carries |= !spans[i].first || !spans[i].last;
    p.table.spans[i] = spans[i];
    p.table.start[i + 1] = p.table.start[i] + spans[i].num_blocks;
  }
  return Enqueue(stream, p, p.table.start[spans.size()], p.table.count, carries);
}

Status LaunchDevice(cudaStream_t stream, const AttentionShape& shape,
                    const AttentionBuffers& buffers, const char* cells,
                    float* workspace) {
  Params p{shape, buffers, cells, workspace, {}};
  p.b.state = nullptr;
  p.b.error = nullptr;
  const int64_t blocks = shape.capacity / kBlock;
  return Enqueue(stream, p, shape.num_seqs * blocks, shape.num_seqs, false);
}

Status PrepareAttention() {
  static std::mutex mutex;
  static std::set<int> ready;
  std::lock_guard<std::mutex> lock(mutex);
  int device = 0;
  KVJAX_RETURN_IF_CUDA_ERROR(cudaGetDevice(&device));
  if (!ready.insert(device).second) return Status::Ok();
  KVJAX_RETURN_IF_ERROR((PrepareKernels<float, 2>()));
  KVJAX_RETURN_IF_ERROR((PrepareKernels<float, 4>()));
  KVJAX_RETURN_IF_ERROR((PrepareKernels<float, 8>()));
  KVJAX_RETURN_IF_ERROR((PrepareKernels<uint16_t, 2>()));
  KVJAX_RETURN_IF_ERROR((PrepareKernels<uint16_t, 4>()));
  return PrepareKernels<uint16_t, 8>();
}

}  // namespace kvjax
