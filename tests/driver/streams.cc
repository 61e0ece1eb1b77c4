#include "streams.h"

#include <algorithm>
#include <atomic>
#include <map>

#if defined(__SANITIZE_THREAD__)
#define KVJAX_UNCHECKED __attribute__((no_sanitize("thread"), noinline))
#else
#define KVJAX_UNCHECKED
#endif

namespace kvjax {
namespace {

// Unchecked by ThreadSanitizer: writes under copies that may read, and never use, what
// is written. Those are cells in gaps between sequences, cells that the step replaces,
// and tails that are free but mapped. What is used is compared.
KVJAX_UNCHECKED void WriteCell(const CellWrite& cell, int64_t num_words) {
  volatile uint32_t* words = reinterpret_cast<uint32_t*>(cell.at);
  for (int64_t i = 0; i < num_words; ++i) words[i] = Word(cell.content, i);
}

KVJAX_UNCHECKED void PoisonUnchecked(char* data, int64_t bytes) {
  volatile uint32_t* words = reinterpret_cast<uint32_t*>(data);
  for (int64_t i = 0; i < bytes / 4; ++i) words[i] = kPoison;
}

// An allocation. Kept until the machine ends, so that a late access shows as poison.
struct Block {
  explicit Block(int64_t size) : bytes(size), memory(new char[size]) {}

  void Free(bool late_reads) {
    if (late_reads) return PoisonUnchecked(memory.get(), bytes);
    freed = true;
    std::fill_n(memory.get(), bytes, char(0xff));
  }

  const int64_t bytes;
  const std::unique_ptr<char[]> memory;
  std::atomic<bool> freed{false};
};

// Blocks by address.
class Blocks {
 public:
  char* Add(int64_t bytes) {
    auto block = std::make_shared<Block>(bytes);
    std::lock_guard<std::mutex> lock(mutex_);
    char* data = block->memory.get();
    blocks_[data] = std::move(block);
    return data;
  }
  std::shared_ptr<Block> Find(const char* at) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto after = blocks_.upper_bound(at);
    if (after == blocks_.begin()) return nullptr;
    const auto& [data, block] = *std::prev(after);
    return at < data + block->bytes ? block : nullptr;
  }

 private:
  std::mutex mutex_;
  std::map<const char*, std::shared_ptr<Block>> blocks_;
};

// The emulated transport out of the machine's blocks; each copy looks whether it
// touched memory that is free.
class CheckedTransport : public EmulatedTransport {
 public:
  CheckedTransport(const Emulation& emulation, Blocks* blocks, Machine* machine)
      : EmulatedTransport(emulation),
        fails_(emulation.fail_allocation),
        blocks_(blocks),
        machine_(machine) {}

  Status Allocate(int64_t bytes, char** memory) override {
    *memory = nullptr;
    if (fails_) return Status::Exhausted("allocation failed, as asked");
    *memory = blocks_->Add(bytes);
    return Status::Ok();
  }
  void Free(char* memory) override { blocks_->Find(memory)->Free(false); }
  Status MakeTimedEvent(Event* event) override {
    machine_->timed_events += 1;
    return EmulatedTransport::MakeTimedEvent(event);
  }

  Status Enqueue(Stream stream, const std::vector<Copy>& copies, const char* source,
                 char* target) override {
    for (const Copy& copy : copies) machine_->NoteCopy(copy, target);
    const auto from = blocks_->Find(source), to = blocks_->Find(target);
    if (from == nullptr || to == nullptr) {
      return Status::Internal("a copy from or to nobody's memory");
    }
    KVJAX_RETURN_IF_ERROR(EmulatedTransport::Enqueue(stream, copies, source, target));
    EnqueueWork(stream, [=, machine = machine_] {
      if (from->freed) machine->Fail("a copy read a tail after it was freed");
      if (to->freed) machine->Fail("a copy wrote memory after it was freed");
    });
    return Status::Ok();
  }

 private:
  const bool fails_;
  Blocks* const blocks_;
  Machine* const machine_;
};

int64_t FirstDifference(const CellRead& cell, int64_t num_words) {
  const uint32_t* words = reinterpret_cast<const uint32_t*>(cell.at);
  for (int64_t i = 0; i < num_words; ++i) {
    if (words[i] != Word(cell.content, i)) return i;
  }
  return num_words;
}

class Streams : public Machine {
 public:
  Streams(uint64_t seed, int64_t delay_us, bool is_inline)
      : transport_({seed, delay_us}) {
    if (!is_inline) (void)transport_.MakeStream(&compute_);
  }
  ~Streams() override { Finish(); }

  Stream compute() override { return compute_; }

  std::unique_ptr<Transport> MakeTransport(const Emulation& emulation) override {
    return std::make_unique<CheckedTransport>(emulation, &blocks_, this);
  }

  Range Allocate(int64_t bytes) override {
    return {bytes > 0 ? blocks_.Add(bytes) : nullptr, bytes};
  }

  void Store(std::vector<CellWrite> cells, int64_t row_bytes) override {
    EnqueueWork(compute_, [cells = std::move(cells), row_bytes] {
      for (const CellWrite& cell : cells) WriteCell(cell, row_bytes / 4);
    });
  }

  void Launch(std::vector<CellRead> cells, int64_t row_bytes, Range poison) override {
    EnqueueWork(compute_, [this, cells = std::move(cells), row_bytes, poison] {
      for (const CellRead& cell : cells) Compare(cell, row_bytes / 4);
      std::fill_n(poison.data, poison.bytes, char(0xff));
    });
  }

  void Duplicate(Range source, Range target) override {
    EnqueueWork(compute_, [=] { std::copy_n(source.data, source.bytes, target.data); });
  }

  void Free(Range range, bool late_reads) override {
    EnqueueWork(compute_,
                [=, block = blocks_.Find(range.data)] { block->Free(late_reads); });
  }

  void Finish() override {
    if (compute_ != kInlineStream) transport_.FreeStream(compute_);
    compute_ = kInlineStream;
  }

 private:
  void Compare(const CellRead& cell, int64_t num_words) {
    const int64_t i = FirstDifference(cell, num_words);
    if (i == num_words) return;
    const uint32_t word = reinterpret_cast<const uint32_t*>(cell.at)[i];
    Fail(word == kPoison ? "a launch read poison" : "a launch read the wrong bytes");
  }

  EmulatedTransport transport_;
  Stream compute_ = kInlineStream;
  Blocks blocks_;
};

}  // namespace

std::unique_ptr<Machine> MakeStreams(uint64_t seed, int64_t delay_us, bool is_inline) {
  return std::make_unique<Streams>(seed, delay_us, is_inline);
}

}  // namespace kvjax
