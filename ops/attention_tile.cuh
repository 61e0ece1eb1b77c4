// A block of cells against a tile of R query rows, by one CTA; on the way to that, the
// loads of the next block. The arithmetic and its order: block_math.h.
//
//   keys     to shared memory by asynchronous copies. Four threads score a cell: each
//            has two of its eight lane sums, for all rows.
//   weights  a thread has those of four cells, for one row (of eight rows for two).
//   values   to registers. Warp w sums chain w; lane i has VEC of each value.
//
// One block after another, all threads:
//
//   Find 0, Load | Score 0, Find 1, Load keys, Weigh 0, Sum 0 and load values | Score 1
#pragma once

#include <cuda_pipeline_primitives.h>

#include <climits>
#include <type_traits>

#include "attention_spans.cuh"

namespace kvjax {
namespace {

constexpr int kThreads = kBlock;
constexpr int kWarps = kThreads / 32;
static_assert(kWarps == kChains, "a warp for each chain");

constexpr int kPiece = 16;    // bytes of an asynchronous copy, and of a matrix's row
constexpr int kMatrices = 4;  // pieces of a key that are loaded at once, for 8 cells
constexpr int kCells = 8;     // of a matrix
constexpr int kMatrixGroups = kBlock / kWarps / kCells;  // of a warp's cells

// ------------------------------------------------------------------ layout on chip

// Bytes from one staged key to the next: an odd number of pieces, so that a piece of
// eight keys falls on all banks.
__host__ __device__ inline int StagedRow(const AttentionShape& s, int element) {
  return (s.head_dim * element / kPiece | 1) * kPiece;
}

// Of one load of matrices a thread multiplies `elements` by as many floats of each of a
// few rows. Four more, and the loads of four threads fall on different banks.
__host__ __device__ constexpr int StagedQuads(int rows, int elements) {
  return 4 * (rows * elements + 4);
}

// What lies in a cell of the block at hand.
enum Kind : int32_t { kNothing, kStored, kRow };

// Shared memory of a CTA.
template <int R>
struct Shared {
  const char** source;  // [2, kBlock], of this block and the next
  int64_t* query_at;    // [R] where each query lies; -1 = no such row
  float* p;             // [kBlock, R]
  float* q;             // [loads, rows / 4, StagedQuads]
  float* sums;          // [kChains, R, Hv]; of the run kernel in place of the keys
  float* warp_max;      // [kWarps, R]
  float* warp_sum;      // [kWarps, R]
  float* m;             // [R]
  float* sum;           // [R]
  int32_t* place;       // [R]
  int32_t* row_of;      // [kBlock]
  int32_t* kind;        // [kBlock]
  float* state;         // [R, 2, Hv + 2], run kernel only
  char* keys;           // [kBlock, StagedRow], then room for a matrix beyond

  static constexpr int kRowsAtOnce = R < 4 ? R : 4;  // whose lane sums a thread has

  __host__ __device__ static int QueryFloats(const AttentionShape& s, int element) {
    const int in_load = kMatrices * 4 / element;
    const int loads = (s.head_dim * element / kPiece + kMatrices - 1) / kMatrices;
    return loads * (R / kRowsAtOnce) * StagedQuads(kRowsAtOnce, in_load);
  }
  __host__ __device__ static int SumFloats(const AttentionShape& s) {
    return kChains * R * s.value_dim;
  }
  __host__ __device__ static int Bytes(const AttentionShape& s, int element, bool run) {
    const int keys = kBlock * StagedRow(s, element) + kMatrices * kPiece;
    return Fixed(s, element, run) + (run ? max(keys, SumFloats(s) * 4) : keys);
  }
  __host__ __device__ static int Fixed(const AttentionShape& s, int element, bool run) {
    const int floats = kBlock * R + QueryFloats(s, element) + 2 * kWarps * R + 3 * R +
                       2 * kBlock + (run ? R * 2 * (s.value_dim + 2) : SumFloats(s));
    return (8 * (2 * kBlock + R) + floats * 4 + kPiece - 1) / kPiece * kPiece;
  }

  __device__ Shared(char* memory, const AttentionShape& s, int element, bool run) {
    source = reinterpret_cast<const char**>(memory);
    p = reinterpret_cast<float*>(source + 2 * kBlock);
    q = p + kBlock * R;
    keys = memory + Fixed(s, element, run);
    float* const next = q + QueryFloats(s, element);
    sums = run ? reinterpret_cast<float*>(keys) : next;
    query_at = reinterpret_cast<int64_t*>(run ? next : next + SumFloats(s));
    warp_max = reinterpret_cast<float*>(query_at + R);
    warp_sum = warp_max + kWarps * R;
    m = warp_sum + kWarps * R;
    sum = m + R;
    place = reinterpret_cast<int32_t*>(sum + R);
    row_of = place + R;
    kind = row_of + kBlock;
    state = reinterpret_cast<float*>(kind + kBlock);
  }
};

// ------------------------------------------------------------------ loads

// Lane i gets word i % 4 of row i / 4 of each of four matrices of 8 rows of 16 bytes;
// lane 8 m + j gives where row j of matrix m lies.
__device__ void LoadMatrices(const char* row, uint32_t (&words)[kMatrices]) {
#if defined(__CUDA_ARCH__)
  const uint32_t at = uint32_t(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(at)
               : "memory");
#else  // the same, for hosts that play a GPU
  const int lane = threadIdx.x % 32;
  for (int m = 0; m < kMatrices; ++m) {
    const auto from = reinterpret_cast<uint64_t>(row);
    const uint64_t held = __shfl_sync(~0u, from, m * kCells + lane / 4);
    words[m] = reinterpret_cast<const uint32_t*>(held)[lane % 4];
  }
#endif
}

// The elements of a word as floats.
template <typename E>
struct Word {
  static constexpr int kElements = 4 / sizeof(E);
  static __device__ void Widen(uint32_t word, float* x) {
    if constexpr (kElements == 1) {
      x[0] = __uint_as_float(word);
    } else {
      x[0] = __uint_as_float(word << 16);
      x[1] = __uint_as_float(word & 0xffff0000u);
    }
  }
};

// N consecutive elements as they are stored: a register or a few.
template <typename E, int N>
struct Packed {
  static constexpr int kWords = N * sizeof(E) / 4;
  uint32_t words[kWords];

  using Load = std::conditional_t<kWords % 4 == 0, uint4,
                                  std::conditional_t<kWords == 2, uint2, uint32_t>>;
  static constexpr int kLoads = kWords * 4 / sizeof(Load);

  static __device__ Packed FromGlobal(const char* memory) {
    Packed x;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      reinterpret_cast<Load*>(x.words)[i] =
          __ldg(reinterpret_cast<const Load*>(memory) + i);
    }
    return x;
  }

  __device__ void Widen(float (&x)[N]) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      Word<E>::Widen(words[i], x + i * Word<E>::kElements);
    }
  }
};

// N floats from shared memory or to it, four at a time where that divides them.
template <int N>
__device__ void LoadFloats(const float* memory, float (&x)[N]) {
  if constexpr (N % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const float4 v = *reinterpret_cast<const float4*>(memory + i);
      x[i] = v.x, x[i + 1] = v.y, x[i + 2] = v.z, x[i + 3] = v.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = memory[i];
  }
}

template <int N>
__device__ void StoreFloats(const float (&x)[N], float* memory) {
  if constexpr (N % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      *reinterpret_cast<float4*>(memory + i) =
          make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) memory[i] = x[i];
  }
}

// Where a block's records of one head lie: evenly from `plain` on, or where it is null
// as source[c] says, null for a masked cell.
struct Cells {
  const char* plain;
  const char* const* source;
  int stride;      // bytes
  int first_cell;  // logical
  int num_cells;   // up to the sequence's end

  template <bool kPlain>
  __device__ const char* At(int c) const {
    return kPlain ? plain + c * stride : source[c];
  }
};

// ------------------------------------------------------------------ quads

// Thread t of four has its part of each of kRows rows, slot i that of row
// i ^ RowBits<kRows>(t): then what a pair's two threads keep and what they give each
// other is the same slots in both, and in the end slot 0 is the thread's own row.
template <int kRows>
__device__ int RowBits(int t) {
  return t * kRows / 4;
}

// Adds to x what the lane across `bit` has of the same row. Of several rows each of the
// two keeps half.
template <int kRows, int kValues>
__device__ void AddAcross(int bit, const float (&x)[kRows][kValues],
                          float (&y)[(kRows + 1) / 2][kValues]) {
  constexpr int kKept = (kRows + 1) / 2;
#pragma unroll
  for (int r = 0; r < kKept; ++r) {
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
      y[r][v] = Add(x[r][v], __shfl_xor_sync(~0u, x[kRows - kKept + r][v], bit));
    }
  }
}

// The LaneSum of the thread's row out of four threads' parts: thread t has lanes 2 t
// and 2 t + 1 (two elements a word) or t and t + 4 (one).
template <typename E, int kRows>
__device__ float QuadSum(const float (&parts)[kRows][2]) {
  constexpr int kHalf = (kRows + 1) / 2;
  if constexpr (Word<E>::kElements == 2) {
    float pairs[kHalf][2], quads[1][2];
    AddAcross(2, parts, pairs);
    AddAcross(1, pairs, quads);
    return Add(quads[0][0], quads[0][1]);
  } else {
    float own[kRows][1], pairs[kHalf][1], quads[1][1];
#pragma unroll
    for (int r = 0; r < kRows; ++r) own[r][0] = Add(parts[r][0], parts[r][1]);
    AddAcross(2, own, pairs);
    AddAcross(1, pairs, quads);
    return quads[0][0];
  }
}

// ------------------------------------------------------------------ a tile

template <typename E, int VEC, int R>
class Tile {
 public:
  const Shared<R> shared;

  // `head` of the kv heads, rows from `first_row` on.
  __device__ Tile(const Params& p, char* memory, bool run, int head, int first_row)
      : shared(memory, p.s, sizeof(E), run),
        p_(p),
        s_(p.s),
        head_(head),
        first_row_(first_row),
        value_at_((p.s.head_dim + lane() * VEC) * int(sizeof(E))),
        lane_holds_(lane() * VEC < p.s.value_dim) {}

  // A sequence's queries, scaled. A barrier comes before they are read.
  __device__ void LoadQueries(int seq);

  // Finds where the next block's cells lie. Its first barrier says that all threads
  // have scored the block at hand.
  __device__ void Find(const Span& span, int block);

  // Starts copying the keys of the block that was found.
  __device__ void LoadKeys();

  // The block that was found is at hand.
  __device__ void Advance() { now_ = next_; }

  // Starts loading the first values of the block at hand.
  __device__ void LoadValues();

  // Awaits the keys; scores of the block at hand.
  __device__ void Score();

  // Scores become weights in shared.p; shared.m and, behind Sum, shared.sum are the
  // block's. A barrier comes before.
  __device__ void Weigh();

  // The chains of the block at hand, in shared.sums; meanwhile starts loading the
  // values of the block that was found, if `more`.
  __device__ void Sum(bool more);

  // Value i of the tile [R, Hv], of the block at hand.
  __device__ float Value(int i) const {
    const int stride = R * s_.value_dim;
    const float* sums = shared.sums + i;
    return ChainSum(sums[0], sums[stride], sums[2 * stride], sums[3 * stride]);
  }

 private:
  static constexpr int kRowsAtOnce = Shared<R>::kRowsAtOnce;
  static constexpr int kHeld = R / kRowsAtOnce;  // rows of a thread's scores
  static constexpr int kPer = Word<E>::kElements * kMatrices;  // elements a load
  static constexpr int kQuads = StagedQuads(kRowsAtOnce, kPer);
  static constexpr int kChain = kBlock / kChains;
  static constexpr int kFit = 32 / Packed<E, VEC>::kWords;  // in 32 registers
  static constexpr int kAhead = kFit < kChain ? kFit : kChain;
  static constexpr int kStep = kAhead < 8 ? kAhead : 8;  // cells under one condition

  static __device__ int lane() { return threadIdx.x % 32; }
  static __device__ int warp() { return threadIdx.x / 32; }
  static __device__ int quad() { return threadIdx.x % 4; }

  // Scores: this thread's cell of group g of its warp, and its held row.
  static __device__ int CellOf(int g) {
    return warp() * (kBlock / kWarps) + g * kCells + lane() / 4;
  }
  static __device__ int RowOf(int held) {
    return held * kRowsAtOnce + RowBits<kRowsAtOnce>(quad());
  }
  // Of the threads with one row and cell the one that writes.
  static __device__ bool writes() { return quad() % (4 / kRowsAtOnce) == 0; }

  // Values: cell i of this warp's chain.
  static __device__ int ChainCell(int i) { return warp() + i * kChains; }

  template <bool kPlain>
  __device__ void CopyKeys();
  template <int kPieces>
  __device__ void Multiply(int load, int held,
                           float (&sums)[kMatrixGroups][kRowsAtOnce][2]) const;
  __device__ void Mask(int held, const float (&x)[kMatrixGroups]);
  __device__ void LoadStep(const Cells& cells, int first, int slot);
  __device__ void SumCell(int slot, int c, float (&sums)[R][VEC]) const;

  const Params& p_;
  const AttentionShape& s_;
  const int head_, first_row_;
  const int value_at_;  // bytes from a record to this lane's piece of its value
  const bool lane_holds_;
  Cells now_, next_;
  int turn_ = 0;  // of shared.source
  float x_[kMatrixGroups][kHeld];
  Packed<E, VEC> under_way_[kAhead] = {};
};

template <typename E, int VEC, int R>
__device__ void Tile<E, VEC, R>::LoadQueries(int seq) {
  const int32_t* const where = p_.b.where + int64_t(seq) * s_.num_new;
  const float scale = QueryScale(s_.scale, s_.soft_cap);
  if (threadIdx.x < R) {
    const int row = first_row_ + int(threadIdx.x);
    const int t = row / s_.group(), n = head_ * s_.group() + row % s_.group();
    const bool there = row < s_.rows();
    const int64_t token = int64_t(seq) * s_.num_new + t;
    shared.query_at[threadIdx.x] =
        there ? (token * s_.num_heads + n) * s_.head_dim : -1;
    shared.place[threadIdx.x] = there ? where[t] : -1;
  }
  __syncthreads();  // where the queries are
  constexpr int kElements = Word<E>::kElements, kInPiece = kPiece / int(sizeof(E));
  for (int h = threadIdx.x; h < s_.head_dim; h += kThreads) {
    const int piece = h / kInPiece, t = h % kInPiece / kElements;
    const int in_load = piece % kMatrices * kElements + h % kElements;
    float* to =
        shared.q + piece / kMatrices * kHeld * kQuads + t * (kQuads / 4) + in_load;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int64_t at = shared.query_at[r];
      float x = 0.0f;
      if (at >= 0) {
        x = s_.query_type == Type::kF32
                ? static_cast<const float*>(p_.b.q)[at + h]
                : FromBf16(static_cast<const uint16_t*>(p_.b.q)[at + h]);
      }
      const int slot = r % kRowsAtOnce ^ RowBits<kRowsAtOnce>(t);
      to[r / kRowsAtOnce * kQuads + slot * kPer] = Mul(x, scale);
    }
  }
}

template <typename E, int VEC, int R>
__device__ void Tile<E, VEC, R>::Find(const Span& span, int block) {
  const int32_t* const where = p_.b.where + int64_t(span.seq) * s_.num_new;
  const int c = threadIdx.x, first_cell = block * kBlock;
  const int left = EndCell(s_, span.length) - first_cell;
  const int record = s_.record_size * int(sizeof(E));
  turn_ ^= 1;
  next_.source = shared.source + turn_ * kBlock;
  next_.stride = s_.num_kv_heads * record;
  next_.first_cell = first_cell;
  next_.num_cells = min(max(left, 0), kBlock);
  // May lie before the block's own first cell; it is not read there.
  const char* const stored = p_.base + span.offset + int64_t(head_) * record +
                             int64_t(first_cell - span.first_cell) * next_.stride;
  bool has_rows = false;
  for (int t = c; t < s_.num_new; t += kThreads) {
    const int place = where[t];
    has_rows |= place >= first_cell && place < first_cell + kBlock;
  }
  has_rows = __syncthreads_or(has_rows);
  if (!has_rows && span.first_cell <= first_cell &&
      span.end_cell >= first_cell + kBlock) {
    next_.plain = stored;
    return;
  }
  next_.plain = nullptr;
  shared.row_of[c] = -1;
  __syncthreads();  // none of the rows is found
  for (int t = c; t < s_.num_new; t += kThreads) {
    const int place = where[t] - first_cell;
    if (where[t] >= 0 && place >= 0 && place < kBlock) shared.row_of[place] = t;
  }
  __syncthreads();  // all are
  const int cell = first_cell + c;
  const char* source = nullptr;
  Kind kind = kNothing;
  if (c < next_.num_cells && shared.row_of[c] >= 0) {
    const int64_t row = int64_t(span.seq) * s_.num_new + shared.row_of[c];
    source = static_cast<const char*>(p_.b.rows) + row * next_.stride + head_ * record;
    kind = kRow;
  } else if (cell >= span.first_cell && cell < span.end_cell) {
    source = stored + c * next_.stride;
    kind = kStored;
  }
  shared.source[turn_ * kBlock + c] = source;
  shared.kind[c] = kind;
  __syncthreads();  // all sources are there
}

template <typename E, int VEC, int R>
__device__ void Tile<E, VEC, R>::LoadKeys() {
  if (next_.plain != nullptr) {
    CopyKeys<true>();
  } else {
    CopyKeys<false>();
  }
  __pipeline_commit();
}

// A key's pieces to neighbouring threads; zeros where a cell is masked. (One bulk copy
// a key, Hopper's, is no faster: its engine takes about 60 cycles for each.)
template <typename E, int VEC, int R>
template <bool kPlain>
__device__ void Tile<E, VEC, R>::CopyKeys() {
  const int pieces = s_.head_dim * int(sizeof(E)) / kPiece,
            row = StagedRow(s_, sizeof(E));
  const int cells_on = kThreads / pieces, pieces_on = kThreads % pieces;
  int c = threadIdx.x / pieces, piece = threadIdx.x % pieces;
  char* to = shared.keys + c * row + piece * kPiece;
  if (kPlain && pieces_on == 0) {  // as below, in fewer instructions
    const char* from = next_.template At<true>(c) + piece * kPiece;
#pragma unroll 4
    for (; c < kBlock; c += cells_on) {
      __pipeline_memcpy_async(to, from, kPiece);
      from += int64_t(cells_on) * next_.stride;
      to += cells_on * row;
    }
    return;
  }
#pragma unroll 4
  while (c < kBlock) {
    const char* from = next_.template At<kPlain>(c);
    if (kPlain || from != nullptr) {
      __pipeline_memcpy_async(to, from + piece * kPiece, kPiece);
    } else {
      *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
    }
    const bool carry = piece + pieces_on >= pieces;
    piece += pieces_on - (carry ? pieces : 0);
    c += cells_on + carry;
    to = shared.keys + c * row + piece * kPiece;
  }
}

template <typename E, int VEC, int R>
__device__ void Tile<E, VEC, R>::LoadValues() {
#pragma unroll
  for (int first = 0; first < kAhead; first += kStep) LoadStep(now_, first, first);
}

// Loads values first .. first + kStep - 1 of a block's chain.
template <typename E, int VEC, int R>
__device__ void Tile<E, VEC, R>::LoadStep(const Cells& cells, int first, int slot) {
  if (!lane_holds_) return;
  if (cells.plain != nullptr) {
    const char* source = cells.At<true>(ChainCell(first)) + value_at_;
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
      under_way_[slot + i] = Packed<E, VEC>::FromGlobal(source);
      source += int64_t(kChains) * cells.stride;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kStep; ++i) {
    const char* source = cells.At<false>(ChainCell(first + i));
    under_way_[slot + i] = {};
    if (source != nullptr) {
      under_way_[slot + i] = Packed<E, VEC>::FromGlobal(source + value_at_);
    }
  }
}

// Adds the products of the first kPieces pieces of one load of each of the warp's keys.
template <typename E, int VEC, int R>
template <int kPieces>
__device__ void Tile<E, VEC, R>::Multiply(
    int load, int held, float (&sums)[kMatrixGroups][kRowsAtOnce][2]) const {
  constexpr int kElements = Word<E>::kElements;
  const int row = StagedRow(s_, sizeof(E));
  const char* key = shared.keys + (warp() * (kBlock / kWarps) + lane() % kCells) * row +
                    (load * kMatrices + lane() / kCells) * kPiece;
  const float* queries =
      shared.q + (load * kHeld + held) * kQuads + quad() * (kQuads / 4);
  float q[kRowsAtOnce][kPer];
#pragma unroll
  for (int r = 0; r < kRowsAtOnce; ++r) LoadFloats<kPer>(queries + r * kPer, q[r]);
#pragma unroll
  for (int g = 0; g < kMatrixGroups; ++g) {
    uint32_t words[kMatrices];
    LoadMatrices(key + g * kCells * row, words);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      float k[kElements];
      Word<E>::Widen(words[i], k);
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) {
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
          float& sum = sums[g][r][kElements == 2 ? e : i % 2];
          sum = Fma(k[e], q[r][i * kElements + e], sum);
        }
      }
    }
  }
}

template <typename E, int VEC, int R>
__device__ void Tile<E, VEC, R>::Score() {
  __pipeline_wait_prior(0);
  __syncthreads();  // all threads' pieces of the keys are there, and the queries
  const int pieces = s_.head_dim * int(sizeof(E)) / kPiece;
#pragma unroll
  for (int held = 0; held < kHeld; ++held) {
    float sums[kMatrixGroups][kRowsAtOnce][2] = {};
    int load = 0;
    for (; load < pieces / kMatrices; ++load) Multiply<kMatrices>(load, held, sums);
    switch (pieces % kMatrices) {
      case 1: Multiply<1>(load, held, sums); break;
      case 2: Multiply<2>(load, held, sums); break;
      case 3: Multiply<3>(load, held, sums);
    }
    float x[kMatrixGroups];
#pragma unroll
    for (int g = 0; g < kMatrixGroups; ++g) x[g] = QuadSum<E, kRowsAtOnce>(sums[g]);
    if (s_.soft_cap > 0.0f) {
#pragma unroll
      for (int g = 0; g < kMatrixGroups; ++g) x[g] = kvjax::Score(x[g], s_.soft_cap);
    }
    Mask(held, x);
  }
}

// Keeps the scores of cells that the row's query sees, and the warp's largest.
template <typename E, int VEC, int R>
__device__ void Tile<E, VEC, R>::Mask(int held, const float (&x)[kMatrixGroups]) {
  const int row = RowOf(held), place = shared.place[row];
  const int low = place < 0 ? INT_MAX : (s_.window > 0 ? place - s_.window : -1);
  float m = kEmpty;
#pragma unroll
  for (int g = 0; g < kMatrixGroups; ++g) {
    const int c = CellOf(g), cell = now_.first_cell + c;
    bool seen = cell > low;
    if (now_.plain == nullptr) {
      const int kind = shared.kind[c];
      seen &= kind == kStored || (kind == kRow && cell <= place);
    }
    x_[g][held] = seen ? x[g] : kEmpty;
    m = Max(x_[g][held], m);
  }
  for (int step = 4; step < 32; step *= 2) m = Max(m, __shfl_xor_sync(~0u, m, step));
  if (lane() < 4 && writes()) shared.warp_max[warp() * R + row] = m;
}

template <typename E, int VEC, int R>
__device__ void Tile<E, VEC, R>::Weigh() {
#pragma unroll
  for (int held = 0; held < kHeld; ++held) {
    const int r = RowOf(held);
    float m = kEmpty;
    for (int w = 0; w < kWarps; ++w) m = Max(shared.warp_max[w * R + r], m);
    float weights[kMatrixGroups];
#pragma unroll
    for (int g = 0; g < kMatrixGroups; ++g) {
      weights[g] = m == kEmpty ? 0.0f : Exp2(Add(x_[g][held], -m));
      if (writes()) shared.p[CellOf(g) * R + r] = weights[g];
    }
    // A cell of a warp is 8 g + lane / 4: the tree's first two levels are this
    // thread's.
    float sum = Add(Add(weights[0], weights[2]), Add(weights[1], weights[3]));
    for (int step = 16; step >= 4; step /= 2) {
      sum = Add(sum, __shfl_xor_sync(~0u, sum, step));
    }
    if (lane() < 4 && writes()) {
      shared.warp_sum[warp() * R + r] = sum;
      if (warp() == 0) shared.m[r] = m;
    }
  }
}

template <typename E, int VEC, int R>
__device__ void Tile<E, VEC, R>::SumCell(int slot, int c, float (&sums)[R][VEC]) const {
  float v[VEC], p[R];
  under_way_[slot].Widen(v);
  LoadFloats<R>(shared.p + c * R, p);
#pragma unroll
  for (int r = 0; r < R; ++r) {
#pragma unroll
    for (int e = 0; e < VEC; ++e) sums[r][e] = Fma(p[r], v[e], sums[r][e]);
  }
}

template <typename E, int VEC, int R>
__device__ void Tile<E, VEC, R>::Sum(bool more) {
  __syncthreads();  // all weights are there
  if (threadIdx.x < R) {
    const float* sums = shared.warp_sum + threadIdx.x;
    shared.sum[threadIdx.x] = ChainSum(sums[0], sums[R], sums[2 * R], sums[3 * R]);
  }
  float sums[R][VEC] = {};
#pragma unroll
  for (int first = 0; first < kChain; first += kStep) {
    const int slot = first % kAhead;
    if (ChainCell(first + kStep - 1) < now_.num_cells) {
#pragma unroll
      for (int i = 0; i < kStep; ++i) SumCell(slot + i, ChainCell(first + i), sums);
    } else {
#pragma unroll
      for (int i = 0; i < kStep; ++i) {
        const int c = ChainCell(first + i);
        if (c < now_.num_cells) SumCell(slot + i, c, sums);
      }
    }
    const int then = first + kAhead;
    if (then < kChain) {
      LoadStep(now_, then, slot);
    } else if (more) {
      LoadStep(next_, then - kChain, slot);
    }
  }
  if (lane_holds_) {
    float* to = shared.sums + warp() * R * s_.value_dim + lane() * VEC;
#pragma unroll
    for (int r = 0; r < R; ++r) StoreFloats<VEC>(sums[r], to + r * s_.value_dim);
  }
  __syncthreads();  // all chains are there
}

}  // namespace
}  // namespace kvjax
