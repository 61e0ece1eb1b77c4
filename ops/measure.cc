// Copies of several devices at once, and the C symbols of measure.h: true, or false and
// a reason, cut to `size` bytes.
#include "measure.h"

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "handlers.h"

namespace kvjax {
namespace {

// What the threads of one measurement wait for.
class Meeting {
 public:
  explicit Meeting(int64_t threads) : opening_(threads), timing_(threads) {}

  void Opened(bool ok) {
    const std::lock_guard lock(mutex_);
    failed_ = failed_ || !ok;
    if (--opening_ == 0) changed_.notify_all();
  }
  void AwaitOpened() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return opening_ == 0; });
  }
  void Start() {
    const std::lock_guard lock(mutex_);
    started_ = true;
    changed_.notify_all();
  }
  // Whether all threads could open.
  bool AwaitStart() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return started_; });
    return !failed_;
  }
  void Timed() {
    const std::lock_guard lock(mutex_);
    --timing_;
  }
  bool AllTimed() {
    const std::lock_guard lock(mutex_);
    return timing_ == 0;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int64_t opening_, timing_;
  bool failed_ = false, started_ = false;
};

Status Time(Link* link, int64_t passes, double* seconds) {
  for (int64_t i = 0; i < passes; ++i) {
    KVJAX_RETURN_IF_ERROR(link->Copy(&seconds[i]));
  }
  return Status::Ok();
}

// One device's thread.
Status Take(int64_t device, int64_t piece_bytes, int64_t pieces, int64_t passes,
            Meeting* meeting, double* seconds) {
  std::unique_ptr<Link> link;
  double untimed = 0;
  Status status = Link::Open(device, piece_bytes, pieces, &link);
  if (status.ok()) status = link->Copy(&untimed);
  meeting->Opened(status.ok());
  if (!meeting->AwaitStart()) return status;
  status = Time(link.get(), passes, seconds);
  meeting->Timed();
  while (status.ok() && !meeting->AllTimed()) status = link->Copy(&untimed);
  return status;
}

}  // namespace

Status MeasureCopies(const int64_t* devices, int64_t count, int64_t piece_bytes,
                     int64_t pieces, int64_t passes, void (*start)(), double* seconds) {
  Meeting meeting(count);
  std::vector<Status> found(count, Status::Ok());
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      found[i] =
          Take(devices[i], piece_bytes, pieces, passes, &meeting, seconds + i * passes);
    });
  }
  meeting.AwaitOpened();
  if (start != nullptr) start();
  meeting.Start();
  for (std::thread& thread : threads) thread.join();
  for (const Status& status : found) KVJAX_RETURN_IF_ERROR(status);
  return Status::Ok();
}

}  // namespace kvjax

KVJAX_EXPORT bool kvjax_measure_copies(const int64_t* devices, int64_t count,
                                       int64_t piece_bytes, int64_t pieces,
                                       int64_t passes, void (*start)(), double* seconds,
                                       char* reason, int64_t size) {
  return kvjax::Told(
      kvjax::MeasureCopies(devices, count, piece_bytes, pieces, passes, start, seconds),
      reason, size);
}

KVJAX_EXPORT bool kvjax_measure_read(int64_t device, int64_t bytes, int64_t passes,
                                     double* seconds, char* reason, int64_t size) {
  return kvjax::Told(kvjax::MeasureRead(device, bytes, passes, seconds), reason, size);
}

KVJAX_EXPORT bool kvjax_device_memory(int64_t device, int64_t* free_bytes,
                                      int64_t* total_bytes, char* reason,
                                      int64_t size) {
  return kvjax::Told(kvjax::DeviceMemory(device, free_bytes, total_bytes), reason,
                     size);
}
