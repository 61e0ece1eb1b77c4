#include "clocks.h"

#include <algorithm>
#include <list>
#include <map>
#include <unordered_map>

namespace kvjax {
namespace {

// How much of each stream's work is known to be done.
class Clock {
 public:
  int64_t operator[](size_t stream) const {
    return stream < done_.size() ? done_[stream] : 0;
  }
  void Set(size_t stream, int64_t done) {
    if (stream >= done_.size()) done_.resize(stream + 1);
    done_[stream] = std::max(done_[stream], done);
  }
  void Join(const Clock& other) {
    for (size_t i = 0; i < other.done_.size(); ++i) Set(i, other.done_[i]);
  }
  bool Covers(const Clock& other) const {
    for (size_t i = 0; i < other.done_.size(); ++i) {
      if ((*this)[i] < other.done_[i]) return false;
    }
    return true;
  }

 private:
  std::vector<int64_t> done_;
};

// One piece of work, and all that is done before it starts.
struct Work {
  size_t stream = 0;
  int64_t index = 0;
  Clock before;

  // Whether `other` is done when this starts.
  bool After(const Work& other) const { return before[other.stream] >= other.index; }
};

struct LoggedStream {
  size_t index;
  Clock clock;  // of the work enqueued so far
  Clock last_copy;
};

struct LoggedEvent {
  bool recorded = false;
  Clock clock;
  int64_t time = 0;  // work enqueued before it, on any stream
};

// Bytes that a copy put into a slot or scratch.
struct Piece {
  int64_t bytes;
  const char* source;
  Work work;
};

struct Reader {
  Range range;
  Work work;
};

class Clocks : public Machine {
 public:
  Clocks() : compute_{0, {}, {}} {}

  Stream compute() override { return &compute_; }
  std::unique_ptr<Transport> MakeTransport(const Emulation& emulation) override;

  Range Allocate(int64_t bytes) override {
    if (bytes == 0) return {};
    char* data = reinterpret_cast<char*>(next_);
    next_ += (bytes + 4095) / 4096 * 4096 + 4096;
    blocks_[data] = {bytes, false, {}};
    return {data, bytes};
  }

  void Store(std::vector<CellWrite> cells, int64_t) override {
    const auto work = std::make_shared<const Work>(Next(compute_));
    for (const CellWrite& cell : cells) written_[cell.at] = work;
  }

  void Launch(std::vector<CellRead> cells, int64_t row_bytes, Range poison) override {
    const Work work = Next(compute_);
    for (const CellRead& cell : cells) {
      if (cell.at != cell.home) Read(work, cell, row_bytes);
    }
    if (poison.bytes == 0) return;
    Erase(poison, nullptr);
    readers_[poison.data] = {poison, work};  // behind the one before, on one stream
    Touch(poison.data, work);
  }

  void Duplicate(Range, Range target) override {
    // A new buffer: the copy counts as the write of every cell.
    filled_[target.data] = std::make_shared<const Work>(Next(compute_));
  }

  void Free(Range range, bool late_reads) override {
    const Work work = Next(compute_);
    Block* block = Find(range.data);
    if (!late_reads && !work.before.Covers(block->touched)) {
      Fail("a tail is freed while a copy may read it");
    }
    block->freed = true;
  }
  void Finish() override { host_.Join(compute_.clock); }

  // What a transport does.
  void Copied(LoggedStream& stream, const Copy& copy, const char* source,
              char* target) {
    NoteCopy(copy, target);
    const Work work = Next(stream);
    stream.last_copy = stream.clock;
    for (int64_t i = 0; i < copy.height; ++i) {
      const char* from = source + copy.source + i * copy.source_pitch;
      char* to = target + copy.target + i * copy.target_pitch;
      Touch(from, work);
      Touch(to, work);
      const Range range{to, copy.width};
      Overwrite(work, range);
      Erase(range, &work);
      pieces_[to] = {copy.width, from, work};
    }
  }

  LoggedStream* MakeStream() {
    streams_.push_back({streams_.size() + 1, {}, {}});
    return &streams_.back();
  }
  void FreeStream(const LoggedStream& stream) {
    if (!host_.Covers(stream.last_copy)) Fail("a stream is freed while a copy may run");
  }
  void FreeMemory(char* memory) {
    Block* block = Find(memory);
    if (!host_.Covers(block->touched)) {
      Fail("the ring's memory is freed while it may be in use");
    }
    block->freed = true;
  }

  void Record(LoggedEvent& event, LoggedStream& stream) {
    Next(stream);
    event = {true, stream.clock, num_enqueued_};
  }
  bool Wait(LoggedStream& stream, const LoggedEvent& event) {
    Next(stream);
    stream.clock.Join(event.clock);
    return event.recorded;
  }
  void Synchronize(const LoggedEvent& event) { host_.Join(event.clock); }

 private:
  struct Block {
    int64_t bytes;
    bool freed;
    Clock touched;
  };

  Work Next(LoggedStream& stream) {
    num_enqueued_ += 1;
    stream.clock.Join(host_);
    const Clock before = stream.clock;
    const int64_t index = before[stream.index] + 1;
    stream.clock.Set(stream.index, index);
    return {stream.index, index, before};
  }

  Block* Find(const char* at) {
    auto after = blocks_.upper_bound(at);
    if (after == blocks_.begin()) return nullptr;
    auto& [data, block] = *std::prev(after);
    return at < data + block.bytes ? &block : nullptr;
  }

  void Touch(const char* at, const Work& work) {
    Block* block = Find(at);
    if (block == nullptr || block->freed) return Fail("an access to nobody's memory");
    block->touched.Set(work.stream, work.index);
  }

  // A launch reads one cell: from the copy that brought it, which saw its last write.
  void Read(const Work& work, const CellRead& cell, int64_t row_bytes) {
    auto after = pieces_.upper_bound(cell.at);
    if (after == pieces_.begin()) return Fail("a launch reads what no copy brought");
    const auto& [start, piece] = *std::prev(after);
    const int64_t skip = cell.at - start;
    if (skip + row_bytes > piece.bytes)
      return Fail("a launch reads what no copy brought");
    if (piece.source + skip != cell.home) return Fail("a launch reads another cell");
    if (!work.After(piece.work)) Fail("a launch may read before its copy is done");
    const auto write = LastWrite(cell.home);
    if (write != nullptr && !piece.work.After(*write)) {
      Fail("a copy may read a cell before it is written");
    }
  }

  std::shared_ptr<const Work> LastWrite(const char* home) {
    auto write = written_.find(home);
    if (write != written_.end()) return write->second;
    auto after = filled_.upper_bound(home);
    if (after == filled_.begin()) return nullptr;
    const auto& [data, work] = *std::prev(after);
    return home < data + Find(data)->bytes ? work : nullptr;
  }

  void Overwrite(const Work& work, Range range) {
    for (const auto& [data, reader] : readers_) {
      const bool apart =
          data + reader.range.bytes <= range.data || range.data + range.bytes <= data;
      if (apart || work.After(reader.work)) continue;
      Fail("a copy may overwrite a slot under a launch");
    }
  }

  // Forgets what pieces brought to a range; `work`, if any, must come after them.
  void Erase(Range range, const Work* work) {
    auto piece = pieces_.lower_bound(range.data);
    if (piece != pieces_.begin()) {
      auto before = std::prev(piece);
      if (before->first + before->second.bytes > range.data) piece = before;
    }
    while (piece != pieces_.end() && piece->first < range.data + range.bytes) {
      if (work != nullptr && !work->After(piece->second.work)) {
        Fail("a copy may overtake another one into its slot");
      }
      piece = pieces_.erase(piece);
    }
  }

  LoggedStream compute_;
  Clock host_;
  int64_t num_enqueued_ = 0;
  std::list<LoggedStream> streams_;  // stay where they are
  uintptr_t next_ = uintptr_t(1) << 40;
  std::map<const char*, Block> blocks_;
  std::map<const char*, Piece> pieces_;
  std::map<const char*, Reader> readers_;  // the last one of each slot
  std::unordered_map<const char*, std::shared_ptr<const Work>> written_;  // by cell
  std::map<const char*, std::shared_ptr<const Work>> filled_;             // by buffer
};

LoggedStream& StreamOf(Stream stream) { return *static_cast<LoggedStream*>(stream); }
LoggedEvent& EventOf(Event event) { return *static_cast<LoggedEvent*>(event); }

class LoggedTransport : public Transport {
 public:
  LoggedTransport(const Emulation& emulation, Clocks* clocks)
      : emulation_(emulation), clocks_(clocks) {}

  Status Allocate(int64_t bytes, char** memory) override {
    if (emulation_.fail_allocation) return Status::Exhausted("failed, as asked");
    *memory = clocks_->Allocate(bytes).data;
    return Status::Ok();
  }
  void Free(char* memory) override { clocks_->FreeMemory(memory); }
  Status FreeBytes(int64_t* bytes) override {
    *bytes = emulation_.free_bytes;
    return Status::Ok();
  }
  Status MakeStream(Stream* stream) override {
    *stream = clocks_->MakeStream();
    return Status::Ok();
  }
  void FreeStream(Stream stream) override { clocks_->FreeStream(StreamOf(stream)); }
  Status MakeEvent(Event* event) override {
    *event = new LoggedEvent;
    return Status::Ok();
  }
  void FreeEvent(Event event) override { delete &EventOf(event); }
  Status MakeTimedEvent(Event* event) override {
    clocks_->timed_events += 1;
    return MakeEvent(event);
  }
  Status Elapsed(Event from, Event to, double* seconds) override {
    *seconds = double(EventOf(to).time - EventOf(from).time);
    return Status::Ok();
  }
  Status Enqueue(Stream stream, const std::vector<Copy>& copies, const char* source,
                 char* target) override {
    for (const Copy& copy : copies) {
      clocks_->Copied(StreamOf(stream), copy, source, target);
    }
    return Status::Ok();
  }
  Status Record(Event event, Stream stream) override {
    clocks_->Record(EventOf(event), StreamOf(stream));
    return Status::Ok();
  }
  Status Wait(Stream stream, Event event) override {
    if (clocks_->Wait(StreamOf(stream), EventOf(event))) return Status::Ok();
    return Status::Internal("a wait on an event that was never recorded");
  }
  bool SourcesStayMapped() const override { return emulation_.sources_stay_mapped; }
  Status Synchronize(Event event) override {
    clocks_->Synchronize(EventOf(event));
    return Status::Ok();
  }

 private:
  const Emulation emulation_;
  Clocks* const clocks_;
};

std::unique_ptr<Transport> Clocks::MakeTransport(const Emulation& emulation) {
  return std::make_unique<LoggedTransport>(emulation, this);
}

}  // namespace

std::unique_ptr<Machine> MakeClocks() { return std::make_unique<Clocks>(); }

}  // namespace kvjax
