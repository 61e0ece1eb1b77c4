#include "attention_gpu.h"

#include <algorithm>
#include <mutex>
#include <set>
#include <string>

#include "cuda_status.h"

namespace kvjax {
namespace {

constexpr int kThreads = 128;  // thread c scores cell c of a block; warp w is chain w
constexpr int kWarps = kThreads / 32;
constexpr int kRunRows = 8;  // query rows of a tile that folds as it goes
static_assert(kThreads == kBlock && kWarps == kChains, "threads are cells, warps chains");

// Keys and values of a block are staged together up to this size, so that the values'
// loads run behind the scores; larger ones one after the other.
constexpr int kTogetherBytes = 100 << 10;

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

__host__ __device__ inline int StagedRow(int dim, int element) {
  return dim * element + 16;  // 16 more: rows of one column fall on all banks
}

struct Staging {
  int keys, values;  // bytes
  bool together;
};
__host__ __device__ inline Staging StagingOf(const AttentionShape& s, int element) {
  const int keys = kBlock * StagedRow(s.head_dim, element);
  const int values = kBlock * StagedRow(s.value_dim, element);
  return {keys, values, keys + values <= kTogetherBytes};
}

// Shared memory of a CTA. Sums alias the keys, which are read by then.
template <int R>
struct Shared {
  float* q;         // [R, H]
  float* p;         // [kBlock, R]
  float* warp_max;  // [kWarps, R]
  float* warp_sum;  // [kWarps, R]
  float* m;         // [R]
  float* sum;       // [R]
  int32_t* place;   // [R]
  const char** source;  // [kBlock]
  int32_t* row_of;      // [kBlock]
  float* state;         // [R, 2, Hv + 2], run kernel only
  char* keys;
  char* values;
  float* sums;  // [kChains, R, Hv]

  __host__ __device__ static int Bytes(const AttentionShape& s, int element, bool run) {
    const Staging staging = StagingOf(s, element);
    const int staged = staging.together ? staging.keys + staging.values
                                        : max(staging.keys, staging.values);
    const int sums = kChains * R * s.value_dim * 4;
    return Fixed(s, run) + max(staged, sums);
  }
  __host__ __device__ static int Fixed(const AttentionShape& s, bool run) {
    const int floats = R * s.head_dim + kBlock * R + 2 * kWarps * R + 3 * R +
                       (run ? R * 2 * (s.value_dim + 2) : 0);
    return (floats * 4 + kBlock * 12 + 15) / 16 * 16;
  }

  __device__ Shared(char* memory, const AttentionShape& s, int element, bool run) {
    source = reinterpret_cast<const char**>(memory);
    p = reinterpret_cast<float*>(source + kBlock);
    q = p + kBlock * R;
    warp_max = q + R * s.head_dim;
    warp_sum = warp_max + kWarps * R;
    m = warp_sum + kWarps * R;
    sum = m + R;
    place = reinterpret_cast<int32_t*>(sum + R);
    row_of = place + R;
    state = reinterpret_cast<float*>(row_of + kBlock);
    keys = memory + Fixed(s, run);
    const Staging staging = StagingOf(s, element);
    values = staging.together ? keys + staging.keys : keys;
    sums = reinterpret_cast<float*>(keys);
  }
};

// ------------------------------------------------------------------ loads

__device__ inline void CopyAsync(char* target, const char* source) {
  const uint32_t address = uint32_t(__cvta_generic_to_shared(target));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(source));
}
__device__ inline void CommitCopies() { asm volatile("cp.async.commit_group;"); }
template <int N>
__device__ inline void AwaitCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Stages `bytes` of each record from `skip` on; zeros where a cell is masked.
__device__ void Stage(const char* const* source, int skip, int bytes, char* target) {
  const int pieces = bytes / 16, row = bytes + 16;
  int c = threadIdx.x / pieces, piece = threadIdx.x % pieces;
  while (c < kBlock) {
    char* to = target + c * row + piece * 16;
    if (source[c] != nullptr) {
      CopyAsync(to, source[c] + skip + piece * 16);
    } else {
      *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
    }
    piece += kThreads % pieces;
    c += kThreads / pieces;
    if (piece >= pieces) {
      piece -= pieces;
      c += 1;
    }
  }
  CommitCopies();
}

// N consecutive elements in shared memory, 4 bytes or a multiple of them.
template <typename E, int N>
struct Elements;
template <int N>
struct Elements<float, N> {
  static __device__ void Load(const char* memory, float (&x)[N]) {
    if constexpr (N % 4 == 0) {
#pragma unroll
      for (int i = 0; i < N / 4; ++i) {
        const float4 v = reinterpret_cast<const float4*>(memory)[i];
        x[4 * i] = v.x, x[4 * i + 1] = v.y, x[4 * i + 2] = v.z, x[4 * i + 3] = v.w;
      }
    } else {
      const float2 v = *reinterpret_cast<const float2*>(memory);
      x[0] = v.x, x[1] = v.y;
    }
  }
};
template <int N>
struct Elements<uint16_t, N> {
  static __device__ void Load(const char* memory, float (&x)[N]) {
    uint32_t words[N / 2];
    if constexpr (N == 8) {
      *reinterpret_cast<uint4*>(words) = *reinterpret_cast<const uint4*>(memory);
    } else if constexpr (N == 4) {
      *reinterpret_cast<uint2*>(words) = *reinterpret_cast<const uint2*>(memory);
    } else {
      words[0] = *reinterpret_cast<const uint32_t*>(memory);
    }
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      x[2 * i] = __uint_as_float(words[i] << 16);
      x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  }
};

template <int R>
__device__ void LoadRow(const float* memory, float (&x)[R]) {
  if constexpr (R % 4 == 0) {
    Elements<float, R>::Load(reinterpret_cast<const char*>(memory), x);
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
  for (int i = threadIdx.x; i < R * s.head_dim; i += kThreads) {
    const int row = w.first_row + i / s.head_dim, h = i % s.head_dim;
    float x = 0.0f;
    if (row < s.rows()) {
      const int t = row / s.group(), n = w.head * s.group() + row % s.group();
      const int64_t at =
          ((int64_t(w.span.seq) * s.num_new + t) * s.num_heads + n) * s.head_dim + h;
      x = s.query_type == Type::kF32
              ? static_cast<const float*>(p.b.q)[at]
              : FromBf16(static_cast<const uint16_t*>(p.b.q)[at]);
    }
    shared.q[i] = Mul(x, scale);
  }
  if (threadIdx.x < R) {
    const int row = w.first_row + threadIdx.x;
    shared.place[threadIdx.x] = row < s.rows() ? WhereOf(p, w)[row / s.group()] : -1;
  }
}

enum Kind { kNothing, kStored, kRow };

// Finds where thread c's cell of the block lies. Returns its kind.
template <int R>
__device__ Kind FindCell(const Params& p, const Work& w, const Shared<R>& shared,
                         int first_cell, int num_cells) {
  const AttentionShape& s = p.s;
  const int c = threadIdx.x;
  shared.row_of[c] = -1;
  __syncthreads();
  for (int t = c; t < s.num_new; t += kThreads) {
    const int place = WhereOf(p, w)[t] - first_cell;
    if (WhereOf(p, w)[t] >= 0 && place >= 0 && place < kBlock) shared.row_of[place] = t;
  }
  __syncthreads();
  const int64_t record = int64_t(s.record_size) * (s.cell_type == Type::kF32 ? 4 : 2);
  const int cell = first_cell + c;
  const char* source = nullptr;
  Kind kind = kNothing;
  if (c < num_cells && shared.row_of[c] >= 0) {
    const int64_t row = int64_t(w.span.seq) * s.num_new + shared.row_of[c];
    source = static_cast<const char*>(p.b.rows) + row * s.num_kv_heads * record;
    kind = kRow;
  } else if (cell >= w.span.first_cell && cell < w.span.end_cell) {
    const int64_t i = cell - w.span.first_cell;
    source = p.base + w.span.offset + i * s.num_kv_heads * record;
    kind = kStored;
  }
  shared.source[c] = source == nullptr ? nullptr : source + w.head * record;
  __syncthreads();
  return kind;
}

// Scores of thread c's cell for the R rows.
template <typename E, int R>
__device__ void Scores(const AttentionShape& s, const Shared<R>& shared, float (&x)[R]) {
  const char* key = shared.keys + threadIdx.x * StagedRow(s.head_dim, sizeof(E));
  float sums[R][kLanes] = {};
#pragma unroll 2
  for (int h = 0; h < s.head_dim; h += kLanes) {
    float k[kLanes];
    Elements<E, kLanes>::Load(key + h * sizeof(E), k);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      float q[kLanes];
      LoadRow<kLanes>(shared.q + r * s.head_dim + h, q);
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

// Each warp's chain over its cells; then shared.sums holds all four.
template <typename E, int VEC, int R>
__device__ void Values(const AttentionShape& s, const Shared<R>& shared, int num_cells) {
  const int warp = threadIdx.x / 32, h = threadIdx.x % 32 * VEC;
  const int row = StagedRow(s.value_dim, sizeof(E));
  float sums[R][VEC] = {};
  if (h < s.value_dim) {
    const char* value = shared.values + warp * row + h * sizeof(E);
#pragma unroll 4
    for (int c = warp; c < num_cells; c += kChains) {
      float v[VEC], p[R];
      Elements<E, VEC>::Load(value, v);
      LoadRow<R>(shared.p + c * R, p);
#pragma unroll
      for (int r = 0; r < R; ++r) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) sums[r][i] = Fma(p[r], v[i], sums[r][i]);
      }
      value += kChains * row;
    }
  }
  __syncthreads();  // values are read: sums may overwrite what is staged
  if (h < s.value_dim) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        shared.sums[(warp * R + r) * s.value_dim + h + i] = sums[r][i];
      }
    }
  }
  __syncthreads();
}

// Block `index` for a tile: shared.m, shared.sum, and the four chains in shared.sums.
template <typename E, int VEC, int R>
__device__ void AttendBlock(const Params& p, const Work& w, const Shared<R>& shared,
                            int index) {
  const AttentionShape& s = p.s;
  const int first_cell = index * kBlock;
  const int left = EndCell(s, w.span.length) - first_cell;
  const int num_cells = left < 0 ? 0 : (left > kBlock ? kBlock : left);
  const Kind kind = FindCell(p, w, shared, first_cell, num_cells);

  const bool together = StagingOf(s, sizeof(E)).together;
  const int key_bytes = s.head_dim * sizeof(E), value_bytes = s.value_dim * sizeof(E);
  Stage(shared.source, 0, key_bytes, shared.keys);
  if (together) {
    Stage(shared.source, key_bytes, value_bytes, shared.values);
    AwaitCopies<1>();
  } else {
    AwaitCopies<0>();
  }
  __syncthreads();  // every thread's copies of keys have landed
  float x[R];
  Scores<E, R>(s, shared, x);
  if (!together) {
    __syncthreads();  // keys are read: values may overwrite them
    Stage(shared.source, key_bytes, value_bytes, shared.values);
  }
  Weights<R>(s, shared, first_cell + int(threadIdx.x), kind, x);
  AwaitCopies<0>();
  __syncthreads();  // every thread's copies of values and weights have landed
  Values<E, VEC, R>(s, shared, num_cells);
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
__global__ void __launch_bounds__(kThreads) SplitKernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) char memory[];
  const Shared<R> shared(memory, p.s, sizeof(E), false);
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
  for (int j = threadIdx.x; j < R * p.s.value_dim; j += kThreads) {
    const int row = w.first_row + j / p.s.value_dim;
    if (row >= p.s.rows()) break;
    PartialOf(p, blockIdx.x, w.head, row)[j % p.s.value_dim] = BlockValue(p.s, shared, j);
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

  __device__ void Fold(float item_value, float item_m, float item_sum) {
    if (item_m == kEmpty) return;
    const FoldScale fold = Folding(m, item_m);
    value = Folded(value, item_value, fold);
    sum = Folded(sum, item_sum, fold);
    m = fold.largest;
  }
  __device__ void Fold(const Running& item) { Fold(item.value, item.m, item.sum); }
};

// Folds a span's blocks in order: [T * G, K, spans], thread h holds value h.
__global__ void __launch_bounds__(256) FoldKernel(const __grid_constant__ Params p) {
  const int row = blockIdx.x, h = threadIdx.x, size = p.s.value_dim;
  const Work w{SpanAt(p, blockIdx.z), int32_t(blockIdx.y), row};
  const int at = h < size ? h : 0;
  float* state = p.b.state == nullptr ? nullptr : StateOf(p, w.span.seq, w.head, row);
  Running group, total;
  if (!w.span.first) {
    group = {state[at], state[size], state[size + 1]};
    state += size + 2;
    total = {state[at], state[size], state[size + 1]};
    state -= size + 2;
  }
  const int64_t start = StartOf(p, blockIdx.z);
  int block = w.span.first_block;
  const int end = block + w.span.num_blocks;
  while (block < end) {
    const int stop = min(end, block / kGroup * kGroup + kGroup);
    Running items[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (block + i >= stop) break;
      const float* partial =
          PartialOf(p, start + block + i - w.span.first_block, w.head, row);
      items[i] = {partial[at], partial[size], partial[size + 1]};
    }
#pragma unroll
    for (int i = 0; i < kGroup; ++i) group.Fold(items[i]);
    if (stop % kGroup == 0) {
      total.Fold(group);
      group = Running{};
    }
    block = stop;
  }
  if (w.span.last) {
    const bool fits = Fits(p, w);
    total.Fold(group);
    if (h < size) WriteOut(p, w, row, h, Div(total.value, total.sum), fits);
    return;
  }
  __syncthreads();  // the state is read by all before it is written
  if (h < size) {
    state[h] = group.value;
    state[size + 2 + h] = total.value;
  }
  if (h == 0) {
    state[size] = group.m;
    state[size + 1] = group.sum;
    state[2 * size + 2] = total.m;
    state[2 * size + 3] = total.sum;
  }
}

// ------------------------------------------------------------------ fold as it goes

// Folds item (values by f, m, sum: one a row) into part 0 or 1 of shared.state.
template <int R, typename Value>
__device__ void FoldShared(const AttentionShape& s, float* state, int part, const float* m,
                           const float* sum, int stride, const Value& value) {
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
  FoldShared<R>(s, state, 1, state + size, state + size + 1, row_floats, [&](int i) {
    return state[i / size * row_floats + i % size];
  });
  for (int i = threadIdx.x; i < R * (size + 2); i += kThreads) {
    const int r = i / (size + 2), h = i % (size + 2);
    state[r * row_floats + h] = h == size ? kEmpty : 0.0f;
  }
  __syncthreads();
}

// One CTA a span and tile: [spans, K, tiles of R rows].
template <typename E, int VEC, int R>
__global__ void __launch_bounds__(kThreads) RunKernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) char memory[];
  const Shared<R> shared(memory, p.s, sizeof(E), true);
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

template <typename E, int VEC>
Choice ChooseByRows(const AttentionShape& s, bool run) {
  if (run) return {RunKernel<E, VEC, kRunRows>, kRunRows, Shared<kRunRows>::Bytes(s, sizeof(E), true)};
  const int rows = s.rows();
  if (rows == 1) return {SplitKernel<E, VEC, 1>, 1, Shared<1>::Bytes(s, sizeof(E), false)};
  if (rows == 2) return {SplitKernel<E, VEC, 2>, 2, Shared<2>::Bytes(s, sizeof(E), false)};
  if (rows <= 4) return {SplitKernel<E, VEC, 4>, 4, Shared<4>::Bytes(s, sizeof(E), false)};
  return {SplitKernel<E, VEC, 8>, 8, Shared<8>::Bytes(s, sizeof(E), false)};
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

Status Enqueue(cudaStream_t stream, const Params& p, int64_t num_blocks, int num_spans) {
  const AttentionShape& s = p.s;
  const bool run = s.rows() > kMaxSplitRows;
  const Choice choice = Choose(s, run);
  const unsigned tiles = (s.rows() + choice.rows - 1) / choice.rows;
  const dim3 grid(unsigned(run ? num_spans : num_blocks), s.num_kv_heads, tiles);
  if (grid.x > 0) choice.kernel<<<grid, kThreads, choice.bytes, stream>>>(p);
  if (!run) {
    const int threads = (s.value_dim + 31) / 32 * 32;
    FoldKernel<<<dim3(s.rows(), s.num_kv_heads, num_spans), threads, 0, stream>>>(p);
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
  for (size_t i = 0; i < spans.size(); ++i) {
    p.table.spans[i] = spans[i];
    p.table.start[i + 1] = p.table.start[i] + spans[i].num_blocks;
  }
  return Enqueue(stream, p, p.table.start[spans.size()], p.table.count);
}

Status LaunchDevice(cudaStream_t stream, const AttentionShape& shape,
                    const AttentionBuffers& buffers, const char* cells, float* workspace) {
  Params p{shape, buffers, cells, workspace, {}};
  p.b.state = nullptr;
  p.b.error = nullptr;
  const int64_t blocks = shape.capacity / kBlock;
  return Enqueue(stream, p, shape.num_seqs * blocks, shape.num_seqs);
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
