// The GPU's attention on a host: kernels of ops/attention*.cu over random cells and
// steps, compared bit by bit with AttendSpans (ops/attention_cpu.cc).
//
//   simt --first=0 --seeds=200        prints a verdict, exits with 1 if one is bad
//
// --without=attention_tile.cuh:12 leaves out the wait that stands there.
// Cells that no query may see hold NaN.
#include <algorithm>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "attention.cu"
#include "attention_bf16.cu"
#include "attention_f32.cu"

namespace kvjax {
namespace {

// What a CTA's `extern __shared__` array names.
alignas(128) thread_local char memory[simt::kSharedBytes];

using Random = std::mt19937_64;

int Draw(Random& random, int low, int high) {
  return std::uniform_int_distribution<int>(low, high)(random);
}
template <typename T>
T Pick(Random& random, std::initializer_list<T> all) {
  return all.begin()[Draw(random, 0, int(all.size()) - 1)];
}

// Numbers as a model's, in either type.
std::vector<char> Numbers(Random& random, Type type, int64_t count) {
  std::normal_distribution<float> draw;
  std::vector<char> bytes(count * SizeOf(type));
  for (int64_t i = 0; i < count; ++i) {
    const float x = draw(random);
    const uint16_t cut = ToBf16(x);
    if (type == Type::kF32) std::memcpy(&bytes[i * 4], &x, 4);
    if (type == Type::kBf16) std::memcpy(&bytes[i * 2], &cut, 2);
  }
  return bytes;
}

// A layer's cells, a step's rows and queries, and what each platform makes of them.
class Case {
 public:
  explicit Case(uint64_t seed) : random_(seed) {
    DrawShape();
    if (seed % 60 == 7) Lengthen(seed % 120 == 7 ? 1030 : 300);
    layer_ = {s_.num_seqs,         s_.num_new,
              on_device_ * kBlock, s_.capacity - on_device_ * kBlock,
              RowBytes(),          s_.window};
    DrawStep();
    rows_ =
        Numbers(random_, s_.cell_type, int64_t(s_.num_seqs) * s_.num_new * RowSize());
    q_ = Numbers(random_, s_.query_type,
                 int64_t(s_.num_seqs) * s_.num_new * s_.num_heads * s_.head_dim);
    device_ = Cells(layer_.device_cells, 0);
    tail_ = Cells(layer_.tail_cells, layer_.device_cells);
  }

  std::string Run() {
    const std::vector<char> wanted = Attend(false), found = Attend(true);
    if (int64_t(wanted.size()) != int64_t(found.size())) return "sizes differ";
    const auto at = std::mismatch(wanted.begin(), wanted.end(), found.begin());
    if (at.first == wanted.end()) return "";
    const int64_t element = (at.first - wanted.begin()) / SizeOf(s_.query_type);
    return Name() + ": element " + std::to_string(element) + " differs";
  }

  std::string Name() const {
    const auto number = [](int64_t x) { return std::to_string(x); };
    return "B " + number(s_.num_seqs) + ", T " + number(s_.num_new) + ", N " +
           number(s_.num_heads) + ", K " + number(s_.num_kv_heads) + ", H " +
           number(s_.head_dim) + ", Hv " + number(s_.value_dim) + ", R " +
           number(s_.record_size) + ", cells " + number(layer_.device_cells) + " + " +
           number(layer_.tail_cells) + ", window " + number(s_.window) +
           (s_.cell_type == Type::kF32 ? ", float32" : ", bfloat16");
  }

 private:
  int64_t RowSize() const { return int64_t(s_.num_kv_heads) * s_.record_size; }
  int64_t RowBytes() const { return RowSize() * SizeOf(s_.cell_type); }

  void DrawShape() {
    s_.cell_type = Pick(random_, {Type::kF32, Type::kBf16});
    s_.query_type = Pick(random_, {Type::kF32, Type::kBf16});
    s_.num_kv_heads = Draw(random_, 1, 3);
    s_.num_heads = s_.num_kv_heads * Pick(random_, {1, 2, 3, 4, 5, 8});
    s_.head_dim = Pick(random_, {64, 64, 80, 96, 128, 128, 256, 8, 24, 72, 160});
    s_.value_dim = Draw(random_, 0, 3) > 0
                       ? s_.head_dim
                       : Pick(random_, {64, 80, 96, 128, 256, 8, 40});
    const int align = 16 / int(SizeOf(s_.cell_type));
    s_.record_size = (s_.head_dim + s_.value_dim + align - 1) / align * align +
                     align * Draw(random_, 0, 1);
    s_.num_new = Pick(random_, {1, 1, 1, 2, 3, 9, 40, 40});
    s_.num_seqs = Draw(random_, 1, s_.num_new > 3 ? 2 : 5);
    s_.window = Pick(random_, {0, 0, 1, 100, 130, 700});
    s_.scale = 0.125f;
    s_.soft_cap = Pick(random_, {0.0f, 0.0f, 3.0f});
    const int blocks = Pick(random_, {1, 2, 3, 9, 17, 20});
    on_device_ = Pick(random_, {0, blocks, Draw(random_, 0, blocks)});
    s_.capacity = blocks * kBlock;
  }

  // Many small blocks: more groups, or more rounds, than a fold takes at once.
  void Lengthen(int blocks) {
    s_.num_seqs = s_.num_new = s_.num_kv_heads = s_.num_heads = 1;
    s_.head_dim = s_.value_dim = 8;
    s_.record_size = 16;
    s_.window = 0;
    s_.capacity = blocks * kBlock;
    on_device_ = blocks;
  }

  void DrawStep() {
    const bool stale = Draw(random_, 0, 9) == 0;
    for (int b = 0; b < s_.num_seqs; ++b) {
      int length = Draw(random_, 0, s_.capacity);
      if (s_.capacity > 100 * kBlock) length = s_.capacity - 1;
      if (Draw(random_, 0, 2) == 0) length = length / kBlock * kBlock;
      const int real = Draw(random_, 0, s_.num_new);
      planned_.push_back(length);
      lengths_.push_back(length + (stale && b == 0 ? 1 : 0));
      // Now and then rows replace stored cells.
      const int start = Draw(random_, 0, 3) > 0 ? length : Draw(random_, 0, length);
      for (int t = 0; t < s_.num_new; ++t) {
        const bool dropped = t >= real || start + t >= s_.capacity;
        where_.push_back(dropped ? -1 : start + t);
      }
      // Beyond what the launches hold.
      if (Draw(random_, 0, 9) == 0) where_.back() = length + s_.num_new;
    }
  }

  // [B, cells, K, R]: NaN from each length on.
  std::vector<char> Cells(int64_t num_cells, int64_t first) {
    std::vector<char> cells =
        Numbers(random_, s_.cell_type, s_.num_seqs * num_cells * RowSize());
    for (int64_t b = 0; b < s_.num_seqs; ++b) {
      const int64_t live = std::clamp<int64_t>(planned_[b] - first, 0, num_cells);
      std::fill(cells.begin() + (b * num_cells + live) * RowBytes(),
                cells.begin() + (b + 1) * num_cells * RowBytes(), char(0xff));
    }
    return cells;
  }

  // The output of both parts, in the launches that a step makes; then the error word.
  std::vector<char> Attend(bool on_gpu) {
    const int64_t count =
        int64_t(s_.num_seqs) * s_.num_new * s_.num_heads * s_.value_dim;
    std::vector<char> out(count * SizeOf(s_.query_type) + 4, 0);
    const int64_t states = int64_t(s_.num_seqs) * s_.num_kv_heads * s_.rows();
    std::vector<float> state(states * StateFloats(s_.value_dim), NAN);
    int32_t error = 0;
    const AttentionBuffers buffers{q_.data(),     rows_.data(), lengths_.data(),
                                   where_.data(), out.data(),   state.data(),
                                   &error};
    const bool no_ring = layer_.tail_cells == 0 && planned_ == lengths_;
    if (on_gpu && no_ring) {
      AttendDevice(buffers);
    } else {
      AttendParts(buffers, on_gpu);
    }
    if (no_ring) error = 0;  // such a launch has nobody to tell
    std::memcpy(&out[out.size() - 4], &error, 4);
    return out;
  }

  void AttendDevice(const AttentionBuffers& buffers) {
    const int64_t blocks = int64_t(s_.num_seqs) * s_.capacity / kBlock;
    std::vector<float> workspace(WorkspaceFloats(s_, blocks), NAN);
    Check(LaunchDevice(nullptr, s_, buffers, device_.data(), workspace.data()));
    simt::Finish();
  }

  void AttendParts(const AttentionBuffers& buffers, bool on_gpu) {
    Launch(buffers, device_.data(), ResidentSpans(layer_, planned_.data()), on_gpu);
    Random random(s_.capacity);
    const int64_t slot = kBlock * RowBytes() * Draw(random, 1, 5);
    for (const Segment& segment : CutTail(layer_, planned_.data(), slot)) {
      std::vector<char> memory(slot, char(0xff));
      for (const Copy& copy : segment.copies) {
        for (int64_t i = 0; i < copy.height; ++i) {
          std::memcpy(&memory[copy.target + i * copy.target_pitch],
                      &tail_[copy.source + i * copy.source_pitch], copy.width);
        }
      }
      Launch(buffers, memory.data(), segment.spans, on_gpu);
    }
  }

  void Launch(const AttentionBuffers& buffers, const char* base,
              const std::vector<Span>& spans, bool on_gpu) {
    if (!on_gpu) {
      return AttendSpans(s_, buffers, base, spans,
                         [](int64_t n, const std::function<void(int64_t)>& f) {
                           for (int64_t i = 0; i < n; ++i) f(i);
                         });
    }
    int64_t blocks = 0;
    for (const Span& span : spans) blocks += span.num_blocks;
    std::vector<float> workspace(WorkspaceFloats(s_, blocks), NAN);
    Check(LaunchSpans(nullptr, s_, buffers, base, spans, workspace.data()));
    simt::Finish();
  }

  void Check(const Status& status) {
    if (status.ok()) return;
    std::printf("simt: FAILED: %s: %s\n", Name().c_str(), status.message.c_str());
    std::exit(1);
  }

  Random random_;
  AttentionShape s_;
  LayerShape layer_;
  int on_device_ = 0;  // blocks
  std::vector<int32_t> planned_, lengths_, where_;
  std::vector<char> rows_, q_, device_, tail_;
};

std::string Flag(int argc, char** argv, const std::string& name,
                 const std::string& otherwise) {
  const std::string start = "--" + name + "=";
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg.rfind(start, 0) == 0) return arg.substr(start.size());
  }
  return otherwise;
}

}  // namespace
}  // namespace kvjax

int main(int argc, char** argv) {
  const int64_t first = std::stoll(kvjax::Flag(argc, argv, "first", "0"));
  const int64_t seeds = std::stoll(kvjax::Flag(argc, argv, "seeds", "100"));
  const std::string left_out = kvjax::Flag(argc, argv, "without", "");
  for (int64_t seed = first; seed < first + seeds; ++seed) {
    simt::Cta::Open(kvjax::memory, uint64_t(seed), left_out);
    const std::string failure = kvjax::Case(uint64_t(seed)).Run();
    if (failure.empty()) continue;
    std::printf("simt: FAILED at seed %lld: %s\n", (long long)seed, failure.c_str());
    return 1;
  }
  std::printf("simt: ok, %lld seeds\n", (long long)seeds);
  return 0;
}
