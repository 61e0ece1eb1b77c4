#include "transport_emulated.h"

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <new>
#include <random>
#include <thread>

namespace kvjax {
namespace {

using Clock = std::chrono::steady_clock;

class EmulatedEvent {
 public:
  explicit EmulatedEvent(bool timed) : timed_(timed) {}

  int64_t Record() {
    std::lock_guard<std::mutex> lock(mutex_);
    return ++recorded_;
  }
  int64_t latest() {
    std::lock_guard<std::mutex> lock(mutex_);
    return recorded_;
  }
  void Pass(int64_t record) {
    std::lock_guard<std::mutex> lock(mutex_);
    passed_ = record > passed_ ? record : passed_;
    if (timed_) at_ = Clock::now();
    changed_.notify_all();
  }
  void Await(int64_t record) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return passed_ >= record; });
  }
  // When it was passed, if it is timed and was.
  bool At(Clock::time_point* at) {
    std::lock_guard<std::mutex> lock(mutex_);
    *at = at_;
    return timed_ && passed_ > 0;
  }

 private:
  const bool timed_;
  std::mutex mutex_;
  std::condition_variable changed_;
  Clock::time_point at_;
  int64_t recorded_ = 0, passed_ = 0;
};

// A thread that does its queue's work in order, each piece after a random delay.
class EmulatedStream {
 public:
  EmulatedStream(uint64_t seed, int64_t max_delay_us)
      : random_(seed), max_delay_us_(max_delay_us), thread_([this] { Run(); }) {}

  ~EmulatedStream() {
    Push(nullptr);
    thread_.join();
  }

  void Push(std::function<void()> work) {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(work));
    changed_.notify_one();
  }

 private:
  void Run() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return !queue_.empty(); });
      const std::function<void()> work = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      if (!work) return;
      Delay();
      work();
    }
  }

  void Delay() {
    if (max_delay_us_ == 0) return;
    std::uniform_int_distribution<int64_t> delay(0, max_delay_us_);
    std::this_thread::sleep_for(std::chrono::microseconds(delay(random_)));
  }

  std::mt19937_64 random_;
  const int64_t max_delay_us_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  std::thread thread_;  // last: it runs as soon as it is made
};

// Shared with the work that refers to it: as with CUDA an event may be freed before
// that work is done.
using SharedEvent = std::shared_ptr<EmulatedEvent>;
SharedEvent AsEvent(Event event) { return *static_cast<SharedEvent*>(event); }

void CopyRows(const Copy& copy, const char* source, char* target) {
  for (int64_t i = 0; i < copy.height; ++i) {
    std::memcpy(target + copy.target + i * copy.target_pitch,
                source + copy.source + i * copy.source_pitch, copy.width);
  }
}

}  // namespace

void EnqueueWork(Stream stream, std::function<void()> work) {
  if (stream == kInlineStream) return work();
  static_cast<EmulatedStream*>(stream)->Push(std::move(work));
}

EmulatedTransport::EmulatedTransport(const Emulation& emulation)
    : emulation_(emulation) {}
EmulatedTransport::~EmulatedTransport() = default;

Status EmulatedTransport::Allocate(int64_t bytes, char** memory) {
  *memory = nullptr;
  if (!emulation_.fail_allocation) *memory = new (std::nothrow) char[bytes];
  if (*memory != nullptr) return Status::Ok();
  return Status::Exhausted("allocating " + std::to_string(bytes) + " bytes failed");
}

void EmulatedTransport::Free(char* memory) { delete[] memory; }

Status EmulatedTransport::FreeBytes(int64_t* bytes) {
  *bytes = emulation_.free_bytes;
  return Status::Ok();
}

Status EmulatedTransport::MakeStream(Stream* stream) {
  *stream =
      new EmulatedStream(emulation_.seed + streams_made_++, emulation_.max_delay_us);
  return Status::Ok();
}

void EmulatedTransport::FreeStream(Stream stream) {
  delete static_cast<EmulatedStream*>(stream);
}

Status EmulatedTransport::MakeEvent(Event* event) {
  *event = new SharedEvent(std::make_shared<EmulatedEvent>(/*timed=*/false));
  return Status::Ok();
}

void EmulatedTransport::FreeEvent(Event event) {
  delete static_cast<SharedEvent*>(event);
}

Status EmulatedTransport::MakeTimedEvent(Event* event) {
  *event = new SharedEvent(std::make_shared<EmulatedEvent>(/*timed=*/true));
  return Status::Ok();
}

Status EmulatedTransport::Elapsed(Event from, Event to, double* seconds) {
  Clock::time_point start, end;
  if (!AsEvent(from)->At(&start) || !AsEvent(to)->At(&end)) {
    return Status::Internal("the time of an event that is not timed or not passed");
  }
  *seconds = std::chrono::duration<double>(end - start).count();
  return Status::Ok();
}

Status EmulatedTransport::Enqueue(Stream stream, const std::vector<Copy>& copies,
                                  const char* source, char* target) {
  EnqueueWork(stream, [=] {
    for (const Copy& copy : copies) CopyRows(copy, source, target);
  });
  return Status::Ok();
}

Status EmulatedTransport::Record(Event event, Stream stream) {
  const SharedEvent shared = AsEvent(event);
  const int64_t record = shared->Record();
  EnqueueWork(stream, [=] { shared->Pass(record); });
  return Status::Ok();
}

Status EmulatedTransport::Wait(Stream stream, Event event) {
  const SharedEvent shared = AsEvent(event);
  const int64_t record = shared->latest();
  if (record == 0)
    return Status::Internal("a wait on an event that was never recorded");
  EnqueueWork(stream, [=] { shared->Await(record); });
  return Status::Ok();
}

Status EmulatedTransport::Synchronize(Event event) {
  const SharedEvent shared = AsEvent(event);
  shared->Await(shared->latest());
  return Status::Ok();
}

}  // namespace kvjax
