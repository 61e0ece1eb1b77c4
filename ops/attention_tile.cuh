// A block of cells against a tile of R query rows, by one CTA; on the way to that, the
// loads of the next block. The arithmetic and its order: block_math.h.
//
//   keys     to shared memory by asynchronous copies. Four threads score a cell: each
//            has two of its eight lane sums, for all rows.
//   weights  a thread has those of four cells, for one row (of eight rows for two).
//   values   to registers, and some to shared memory by asynchronous copies: registers
//            for all would leave room for fewer warps. Warp w sums chain w; lane i has
//            VEC of each value.
//
// One block after another, all threads; copies of keys and of values take turns:
//
//   Find 0, Load | Score 0, Find 1, Load keys, Weigh 0, Sum 0 and load values | Score 1
#pragma once

#include <cuda_pipeline_primitives.h>

#include <climits>
#include <type_traits>

#include "attention_choice.h"

namespace kvjax {
namespace {

constexpr int kWarps = kThreads / 32;
static_assert(kWarps == kChains, "a warp for each chain");

constexpr int kPiece = 16;    // bytes of an asynchronous copy, and of a matrix's row
constexpr int kMatrices = 4;  // pieces of a key that are loaded at once, for 8 cells
constexpr int kCells = 8;     // of a matrix
constexpr int kMatrixGroups = kBlock / kWarps / kCells;  // of a warp's cells
constexpr int kValueBytes = 16 << 10;                    // of values in shared memory

// ------------------------------------------------------------------ layout on chip

// Bytes from one staged key to the next: an odd number of pieces, so that a piece of
// eight keys falls on all banks.
__host__ __device__ constexpr int StagedRow(int head_dim, int element) {
  return (head_dim * element / kPiece | 1) * kPiece;
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
  float* p;             // [kBlock, R]
  float* q;             // [loads, rows / 4, StagedQuads]
  float* sums;          // [kChains, R, Hv]; of the run kernel in place of the keys
  float* warp_max;      // [kWarps, R]
  float* warp_sum;      // [kWarps, R]
  float* m;             // [R]
  int32_t* place;       // [R]
  int32_t* row_of;      // [kBlock]
  int32_t* kind;        // [kBlock]
  float* state;         // [R, 2, Hv + 2], run kernel only
  char* keys;           // [kBlock, StagedRow], then room for a matrix beyond
  char* values;         // kValueBytes

  static constexpr int kRowsAtOnce = R < 4 ? R : 4;  // whose lane sums a thread has

  __host__ __device__ static int QueryFloats(const AttentionShape& s, int element) {
    const int in_load = kMatrices * 4 / element;
    const int loads = (s.head_dim * element / kPiece + kMatrices - 1) / kMatrices;
    return loads * (R / kRowsAtOnce) * StagedQuads(kRowsAtOnce, in_load);
  }
  __host__ __device__ static int SumFloats(const AttentionShape& s) {
    return kChains * R * s.value_dim;
  }
  // Of the keys, or the sums in their place.
  __host__ __device__ static int KeyBytes(const AttentionShape& s, int element,
                                          bool run) {
    const int keys = kBlock * StagedRow(s.head_dim, element) + kMatrices * kPiece;
    return run ? max(keys, SumFloats(s) * 4) : keys;
  }
  __host__ __device__ static int Bytes(const AttentionShape& s, int element, bool run) {
    return Fixed(s, element, run) + KeyBytes(s, element, run) + kValueBytes;
  }
  __host__ __device__ static int Fixed(const AttentionShape& s, int element, bool run) {
    const int floats = kBlock * R + QueryFloats(s, element) + 2 * kWarps * R + 2 * R +
                       2 * kBlock + (run ? R * 2 * (s.value_dim + 2) : SumFloats(s));
    return (8 * 2 * kBlock + floats * 4 + kPiece - 1) / kPiece * kPiece;
  }

  __device__ Shared(char* memory, const AttentionShape& s, int element, bool run) {
    source = reinterpret_cast<const char**>(memory);
    p = reinterpret_cast<float*>(source + 2 * kBlock);
    q = p + kBlock * R;
    keys = memory + Fixed(s, element, run);
    values = keys + KeyBytes(s, element, run);
    float* const next = q + QueryFloats(s, element);
    sums = run ? reinterpret_cast<float*>(keys) : next;
    warp_max = run ? next : next + SumFloats(s);
    warp_sum = warp_max + kWarps * R;
    m = warp_sum + kWarps * R;
    place = reinterpret_cast<int32_t*>(m + R);
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
  static constexpr int kBytes = N * sizeof(E), kWords = kBytes / 4;
  uint32_t words[kWords];

  using Load = std::conditional_t<kWords % 4 == 0, uint4,
                                  std::conditional_t<kWords == 2, uint2, uint32_t>>;
  static constexpr int kLoads = kBytes / sizeof(Load);

  static __device__ Packed FromGlobal(const char* memory) {
    Packed x;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      reinterpret_cast<Load*>(x.words)[i] =
          __ldg(reinterpret_cast<const Load*>(memory) + i);
    }
    return x;
  }

  static __device__ Packed FromShared(const char* memory) {
    Packed x;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      reinterpret_cast<Load*>(x.words)[i] = reinterpret_cast<const Load*>(memory)[i];
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

// Asynchronous copies of kPiece bytes, each a step further on. Many at once: a copy
// holds its addresses until it is on its way, and few registers for them would be
// waited for.
struct EvenCopies {
  const char* from;
  char* to;
  int from_on, to_on;

  // Starts n of them.
  __device__ void Start(int n) {
#pragma unroll 1
    for (; n >= 16; n -= 16) Some<16>();
    if (n & 8) Some<8>();
#pragma unroll 1
    for (n &= 7; n > 0; --n) Some<1>();
  }

  template <int kSome>
  __device__ void Some() {
#pragma unroll
    for (int i = 0; i < kSome; ++i) {
      __pipeline_memcpy_async(to, from, kPiece);
      from += from_on;
      to += to_on;
    }
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

// `whole`: heads of 32 VEC elements and records of a key and a value of those alone.
// The compiler then knows all sizes.
template <typename E, int VEC, int R, bool whole = false>
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
        pieces_(head_dim() * int(sizeof(E)) / kPiece),
        cells_on_(kThreads / pieces_),
        first_cell_(threadIdx.x / pieces_),
        first_piece_(threadIdx.x % pieces_),
        record_((whole ? 2 * kSize : p.s.record_size) * int(sizeof(E))),
        value_at_((head_dim() + lane() * VEC) * int(sizeof(E))),
        lane_holds_(lane() * VEC < value_dim()) {
    const int pieces = value_dim() * int(sizeof(E)) / kPiece;
    values_on_ = 32 / pieces;
    staged_copies_ = 32 % pieces == 0 ? kStaged * pieces / 32 : 0;
    const int cell = lane() / pieces, piece = lane() % pieces * kPiece;
    staged_from_ = cell * kChains * p.s.num_kv_heads * record_ +
                   head_dim() * int(sizeof(E)) + piece;
    staged_to_ = (cell * kThreads + warp() * 32) * Piece::kBytes + piece;
  }

  static __host__ __device__ bool IsWhole(const AttentionShape& s) {
    return s.head_dim == kSize && s.value_dim == kSize && s.record_size == 2 * kSize;
  }
  __device__ int head_dim() const { return whole ? kSize : s_.head_dim; }
  __device__ int value_dim() const { return whole ? kSize : s_.value_dim; }

  // A sequence's queries, scaled. A barrier comes before they are read.
  __device__ void LoadQueries(int seq);

  // What all blocks of a span have in common, for Find.
  __device__ void Enter(const Span& span);

  // Finds where the next block's cells lie: a block of the span that was entered. Its
  // first barrier says that all threads have scored the block at hand.
  __device__ void Find(const Span& span, int block);

  // Starts copying the keys of the block that was found, if there is one.
  __device__ void LoadKeys(bool more);

  // The block that was found is at hand; starts copying its staged values.
  __device__ void Advance() {
    now_ = next_;
    StageValues();
  }

  // Starts loading the first values of the block at hand.
  __device__ void LoadValues();

  // Awaits the keys; scores of the block at hand.
  __device__ void Score();

  // Scores become weights in shared.p; shared.m and, behind Sum, WeightSum are the
  // block's. A barrier comes before.
  __device__ void Weigh();

  // The chains of the block at hand, in shared.sums; meanwhile starts loading the
  // values of the block that was found, if `more`.
  __device__ void Sum(bool more);

  // Of row r of the block at hand.
  __device__ float WeightSum(int r) const {
    const float* sums = shared.warp_sum + r;
    return ChainSum(sums[0], sums[R], sums[2 * R], sums[3 * R]);
  }

  // Value i of the tile [R, Hv], of the block at hand.
  __device__ float Value(int i) const {
    const int stride = R * value_dim();
    const float* sums = shared.sums + i;
    return ChainSum(sums[0], sums[stride], sums[2 * stride], sums[3 * stride]);
  }

 private:
  static constexpr int kSize = 32 * VEC;  // of a whole head
  static constexpr int kRowsAtOnce = Shared<R>::kRowsAtOnce;
  static constexpr int kHeld = R / kRowsAtOnce;  // rows of a thread's scores
  static constexpr int kPer = Word<E>::kElements * kMatrices;  // elements a load
  static constexpr int kQuads = StagedQuads(kRowsAtOnce, kPer);
  static constexpr int kChain = kBlock / kChains;
  using Piece = Packed<E, VEC>;
  static constexpr int kFit = 32 / Piece::kWords;  // in 32 registers
  // Of a chain's cells the first kAhead are on their way to registers when its block's
  // turn comes, the next kStaged to shared memory; the rest follow in the registers.
  static constexpr int kAhead = kFit < kChain ? kFit : kChain;
  static constexpr int kRoom = kValueBytes / (kThreads * Piece::kBytes);
  static constexpr int kStaged = kRoom < kChain - kAhead ? kRoom : kChain - kAhead;
  static constexpr int kStep = kAhead < 8 ? kAhead : 8;  // cells under one condition
  static_assert(kStaged % kStep == 0 && (kChain - kStaged) % kAhead == 0);

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
  __device__ void SumWeights();
  __device__ void StageValues();
  static __device__ void CopyValue(const char* source, char* target) {
    constexpr int kBytes = Piece::kBytes < kPiece ? Piece::kBytes : kPiece;
#pragma unroll
    for (int i = 0; i < Piece::kBytes; i += kBytes) {
      __pipeline_memcpy_async(target + i, source + i, kBytes);
    }
  }
  // This lane's piece of the chain's staged value i.
  __device__ char* Staged(int i) const {
    return shared.values + (i * kThreads + int(threadIdx.x)) * Piece::kBytes;
  }
  __device__ void SumCell(const Piece& value, int c, float (&sums)[R][VEC]) const;
  template <typename Values>
  __device__ void SumStep(int first, const Values& value, float (&sums)[R][VEC]) const;
  __device__ void SumAhead(int first, int then, bool more, float (&sums)[R][VEC]);

  const Params& p_;
  const AttentionShape& s_;
  const int head_, first_row_;
  const int pieces_, cells_on_;         // of a key; keys that all threads copy at once
  const int first_cell_, first_piece_;  // that this thread copies
  const int record_;                    // bytes
  const int value_at_;  // bytes from a record to this lane's piece of its value
  const bool lane_holds_;
  int values_on_;                // values that a warp stages at once
  int staged_copies_;            // of a thread; 0 = it stages its own pieces alone
  int staged_from_, staged_to_;  // bytes from the first value to this thread's piece
  Cells now_, next_;
  const char* stored_;      // logical cell 0 of the span that was entered
  int low_row_, high_row_;  // where its sequence's rows go, between
  int turn_ = 0;            // of shared.source
  float x_[kMatrixGroups][kHeld];
  float weight_[kHeld];  // of the thread's cells
  Piece under_way_[kAhead] = {};
};

template <typename E, int VEC, int R, bool whole>
__device__ void Tile<E, VEC, R, whole>::LoadQueries(int seq) {
  const float scale = QueryScale(s_.scale, s_.soft_cap);
  const int group = s_.group();
  const int64_t first = int64_t(seq) * s_.num_new * s_.num_heads * head_dim();
  if (threadIdx.x < R) {
    const int row = first_row_ + int(threadIdx.x);
    const int32_t* const where = p_.b.where + int64_t(seq) * s_.num_new;
    shared.place[threadIdx.x] = row < p_.num_rows ? where[row / group] : -1;
  }
  constexpr int kElements = Word<E>::kElements, kInPiece = kPiece / int(sizeof(E));
  for (int h = threadIdx.x; h < head_dim(); h += kThreads) {
    const int piece = h / kInPiece, t = h % kInPiece / kElements;
    const int in_load = piece % kMatrices * kElements + h % kElements;
    float* to =
        shared.q + piece / kMatrices * kHeld * kQuads + t * (kQuads / 4) + in_load;
    float x[R] = {};
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int row = first_row_ + r, token = row / group;
      const int n = head_ * group + row - token * group;
      const int64_t at = first + int64_t(token * s_.num_heads + n) * head_dim() + h;
      if (row >= p_.num_rows) continue;
      x[r] = s_.query_type == Type::kF32
                 ? static_cast<const float*>(p_.b.q)[at]
                 : FromBf16(static_cast<const uint16_t*>(p_.b.q)[at]);
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int slot = r % kRowsAtOnce ^ RowBits<kRowsAtOnce>(t);
      to[r / kRowsAtOnce * kQuads + slot * kPer] = Mul(x[r], scale);
    }
  }
}

template <typename E, int VEC, int R, bool whole>
__device__ void Tile<E, VEC, R, whole>::Enter(const Span& span) {
  const int32_t* const where = p_.b.where + int64_t(span.seq) * s_.num_new;
  next_.stride = s_.num_kv_heads * record_;
  // May lie before all memory; it is not read before the span's first cell.
  stored_ = p_.base + span.offset + int64_t(head_) * record_ -
            int64_t(span.first_cell) * next_.stride;
  low_row_ = INT_MAX, high_row_ = -1;
  for (int t = lane(); t < s_.num_new; t += 32) {
    const int place = where[t];
    if (place >= 0) low_row_ = min(low_row_, place);
    high_row_ = max(high_row_, place);
  }
  for (int step = 1; step < 32; step *= 2) {  // all lanes must agree
    low_row_ = min(low_row_, __shfl_xor_sync(~0u, low_row_, step));
    high_row_ = max(high_row_, __shfl_xor_sync(~0u, high_row_, step));
  }
}

template <typename E, int VEC, int R, bool whole>
__device__ void Tile<E, VEC, R, whole>::Find(const Span& span, int block) {
  const int c = threadIdx.x, first_cell = block * kBlock;
  const int left = EndCell(s_, span.length) - first_cell;
  turn_ ^= 1;
  next_.source = shared.source + turn_ * kBlock;
  next_.first_cell = first_cell;
  next_.num_cells = min(max(left, 0), kBlock);
  const char* const stored = stored_ + int64_t(first_cell) * next_.stride;
  const bool has_rows = low_row_ < first_cell + kBlock && high_row_ >= first_cell;
  __syncthreads();  // all have scored
  if (!has_rows && span.first_cell <= first_cell &&
      span.end_cell >= first_cell + kBlock) {
    next_.plain = stored;
    return;
  }
  const int32_t* const where = p_.b.where + int64_t(span.seq) * s_.num_new;
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
    source = static_cast<const char*>(p_.b.rows) + row * next_.stride + head_ * record_;
    kind = kRow;
  } else if (cell >= span.first_cell && cell < span.end_cell) {
    source = stored + c * next_.stride;
    kind = kStored;
  }
  shared.source[turn_ * kBlock + c] = source;
  shared.kind[c] = kind;
  __syncthreads();  // all sources are there
}

template <typename E, int VEC, int R, bool whole>
__device__ void Tile<E, VEC, R, whole>::LoadKeys(bool more) {
  if (more && next_.plain != nullptr) CopyKeys<true>();
  if (more && next_.plain == nullptr) CopyKeys<false>();
  __pipeline_commit();
}

// A key's pieces to neighbouring threads; zeros where a cell is masked. (One bulk copy
// a key, Hopper's, is no faster: its engine takes about 60 cycles for each.)
template <typename E, int VEC, int R, bool whole>
template <bool kPlain>
__device__ void Tile<E, VEC, R, whole>::CopyKeys() {
  const int row = StagedRow(head_dim(), sizeof(E));
  const int pieces_on = kThreads - cells_on_ * pieces_;
  int c = first_cell_, piece = first_piece_;
  char* to = shared.keys + c * row + piece * kPiece;
  if (kPlain && pieces_on == 0) {  // as below, in fewer instructions
    const char* from = next_.template At<true>(c) + piece * kPiece;
    EvenCopies{from, to, cells_on_ * next_.stride, cells_on_ * row}.Start(pieces_);
    return;
  }
#pragma unroll 1
  while (c < kBlock) {
    const char* from = next_.template At<kPlain>(c);
    if (kPlain || from != nullptr) {
      __pipeline_memcpy_async(to, from + piece * kPiece, kPiece);
    } else {
      *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
    }
    const bool carry = piece + pieces_on >= pieces_;
    piece += pieces_on - (carry ? pieces_ : 0);
    c += cells_on_ + carry;
    to = shared.keys + c * row + piece * kPiece;
  }
}

template <typename E, int VEC, int R, bool whole>
__device__ void Tile<E, VEC, R, whole>::LoadValues() {
#pragma unroll
  for (int first = 0; first < kAhead; first += kStep) LoadStep(now_, first, first);
}

// Starts copying the staged values of the block at hand, a warp its own chain's; what
// was there is summed.
template <typename E, int VEC, int R, bool whole>
__device__ void Tile<E, VEC, R, whole>::StageValues() {
  if (now_.plain != nullptr && staged_copies_ > 0) {
    const char* from = now_.template At<true>(ChainCell(kAhead)) + staged_from_;
    EvenCopies{from, shared.values + staged_to_, values_on_ * kChains * now_.stride,
               values_on_ * kThreads * Piece::kBytes}
        .Start(staged_copies_);
  } else if (lane_holds_) {
#pragma unroll 1
    for (int i = 0; i < kStaged; ++i) {
      const char* source = now_.plain != nullptr
                               ? now_.template At<true>(ChainCell(kAhead + i))
                               : now_.template At<false>(ChainCell(kAhead + i));
      if (source != nullptr) {
        CopyValue(source + value_at_, Staged(i));
      } else {
        *reinterpret_cast<Piece*>(Staged(i)) = Piece{};
      }
    }
  }
  __pipeline_commit();
}

// Loads values first .. first + kStep - 1 of a block's chain.
template <typename E, int VEC, int R, bool whole>
__device__ void Tile<E, VEC, R, whole>::LoadStep(const Cells& cells, int first,
                                                 int slot) {
  if (!lane_holds_) return;
  if (cells.plain != nullptr) {
    const char* source = cells.At<true>(ChainCell(first)) + value_at_;
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
      under_way_[slot + i] = Piece::FromGlobal(source);
      source += int64_t(kChains) * cells.stride;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kStep; ++i) {
    const char* source = cells.At<false>(ChainCell(first + i));
    under_way_[slot + i] = {};
    if (source != nullptr) {
      under_way_[slot + i] = Piece::FromGlobal(source + value_at_);
    }
  }
}

// Adds the products of the first kPieces pieces of one load of each of the warp's keys.
template <typename E, int VEC, int R, bool whole>
template <int kPieces>
__device__ void Tile<E, VEC, R, whole>::Multiply(
    int load, int held, float (&sums)[kMatrixGroups][kRowsAtOnce][2]) const {
  constexpr int kElements = Word<E>::kElements;
  const int row = StagedRow(head_dim(), sizeof(E));
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

template <typename E, int VEC, int R, bool whole>
__device__ void Tile<E, VEC, R, whole>::Score() {
  __pipeline_wait_prior(1);  // values may be under way yet
  __syncthreads();  // all threads' pieces of the keys are there, and the queries
#pragma unroll
  for (int held = 0; held < kHeld; ++held) {
    float sums[kMatrixGroups][kRowsAtOnce][2] = {};
    int load = 0;
#pragma unroll(whole ? 4 : 1)
    for (; load < pieces_ / kMatrices; ++load) Multiply<kMatrices>(load, held, sums);
    switch (pieces_ % kMatrices) {
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
template <typename E, int VEC, int R, bool whole>
__device__ void Tile<E, VEC, R, whole>::Mask(int held,
                                             const float (&x)[kMatrixGroups]) {
  const int row = RowOf(held), place = shared.place[row];
  const int low = place < 0 ? INT_MAX : (s_.window > 0 ? place - s_.window : -1);
  const bool sees_all = now_.plain != nullptr && now_.first_cell > low;
  float m = kEmpty;
#pragma unroll
  for (int g = 0; g < kMatrixGroups; ++g) {
    bool seen = sees_all;
    if (!sees_all) {
      const int c = CellOf(g), cell = now_.first_cell + c;
      const int kind = now_.plain != nullptr ? kStored : shared.kind[c];
      seen = cell > low && (kind == kStored || (kind == kRow && cell <= place));
    }
    x_[g][held] = seen ? x[g] : kEmpty;
    m = Max(x_[g][held], m);
  }
  for (int step = 4; step < 32; step *= 2) m = Max(m, __shfl_xor_sync(~0u, m, step));
  if (lane() < 4 && writes()) shared.warp_max[warp() * R + row] = m;
}

template <typename E, int VEC, int R, bool whole>
__device__ void Tile<E, VEC, R, whole>::Weigh() {
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
    weight_[held] = Add(Add(weights[0], weights[2]), Add(weights[1], weights[3]));
    if (warp() == 0 && lane() < 4 && writes()) shared.m[r] = m;
  }
}

// The rest of the tree.
template <typename E, int VEC, int R, bool whole>
__device__ void Tile<E, VEC, R, whole>::SumWeights() {
#pragma unroll
  for (int held = 0; held < kHeld; ++held) {
    float sum = weight_[held];
    for (int step = 16; step >= 4; step /= 2) {
      sum = Add(sum, __shfl_xor_sync(~0u, sum, step));
    }
    if (lane() < 4 && writes()) shared.warp_sum[warp() * R + RowOf(held)] = sum;
  }
}

template <typename E, int VEC, int R, bool whole>
__device__ void Tile<E, VEC, R, whole>::SumCell(const Piece& value, int c,
                                                float (&sums)[R][VEC]) const {
  float v[VEC], p[R];
  value.Widen(v);
  LoadFloats<R>(shared.p + c * R, p);
#pragma unroll
  for (int r = 0; r < R; ++r) {
#pragma unroll
    for (int e = 0; e < VEC; ++e) sums[r][e] = Fma(p[r], v[e], sums[r][e]);
  }
}

// Cells first .. first + kStep - 1 of the chain, whose values are value(0) to
// value(kStep - 1).
template <typename E, int VEC, int R, bool whole>
template <typename Values>
__device__ void Tile<E, VEC, R, whole>::SumStep(int first, const Values& value,
                                                float (&sums)[R][VEC]) const {
  if (ChainCell(first + kStep - 1) < now_.num_cells) {
#pragma unroll
    for (int i = 0; i < kStep; ++i) SumCell(value(i), ChainCell(first + i), sums);
    return;
  }
#pragma unroll
  for (int i = 0; i < kStep; ++i) {
    const int c = ChainCell(first + i);
    if (c < now_.num_cells) SumCell(value(i), c, sums);
  }
}

// The chain's part that is in registers, from cell `first` on; then what comes into
// them next.
template <typename E, int VEC, int R, bool whole>
__device__ void Tile<E, VEC, R, whole>::SumAhead(int first, int then, bool more,
                                                 float (&sums)[R][VEC]) {
#pragma unroll
  for (int i = 0; i < kAhead; i += kStep) {
    SumStep(first + i, [&](int j) { return under_way_[i + j]; }, sums);
    if (then < kChain) {
      LoadStep(now_, then + i, i);
    } else if (more) {
      LoadStep(next_, i, i);
    }
  }
}

template <typename E, int VEC, int R, bool whole>
__device__ void Tile<E, VEC, R, whole>::Sum(bool more) {
  __syncthreads();  // all weights are there
  SumWeights();
  float sums[R][VEC] = {};
  SumAhead(0, kAhead + kStaged, more, sums);
  __pipeline_wait_prior(1);  // this thread's copies of staged values are there
  __syncwarp();              // the other threads' copies, too
#pragma unroll
  for (int i = 0; i < kStaged; i += kStep) {
    const auto value = [&](int j) { return Piece::FromShared(Staged(i + j)); };
    SumStep(kAhead + i, value, sums);
  }
#pragma unroll
  for (int first = kAhead + kStaged; first < kChain; first += kAhead) {
    SumAhead(first, first + kAhead, more, sums);
  }
  if (lane_holds_) {
    float* to = shared.sums + warp() * R * value_dim() + lane() * VEC;
#pragma unroll
    for (int r = 0; r < R; ++r) StoreFloats<VEC>(sums[r], to + r * value_dim());
  }
  __syncthreads();  // all chains are there
}

}  // namespace
}  // namespace kvjax
