#include "makespan.h"

#include <algorithm>
#include <list>
#include <memory>

#include "attend.h"
#include "block_math.h"

namespace kvjax {
namespace {

constexpr int64_t kRowBytes = 16;
constexpr int64_t kSegmentBytes = kBlock * kRowBytes;  // a block, which fills a slot

// Streams and events are the times at which their work is done.
class Simulation {
 public:
  explicit Simulation(const Host& host) : host_(host) {}

  void Enqueue(double& stream, double cost_us) {
    now_ += host_.call_us;
    stream = std::max(stream, now_) + cost_us;
  }
  // As Enqueue, of work that the host does itself if it is an inline one.
  void Compute(double& stream, double cost_us) {
    Enqueue(stream, cost_us);
    if (host_.is_inline) now_ = stream;
  }
  void Await(double event) {
    if (event > now_) now_ = event + host_.synchronize_us;
  }

 private:
  const Host host_;
  double now_ = 0;
};

double& TimeOf(void* handle) { return *static_cast<double*>(handle); }

class SimulatedTransport : public Transport {
 public:
  SimulatedTransport(Simulation* simulation, double copy_us)
      : simulation_(*simulation), copy_us_(copy_us) {}

  Status Allocate(int64_t bytes, char** memory) override {
    *memory = new char[bytes];
    return Status::Ok();
  }
  void Free(char* memory) override { delete[] memory; }
  Status FreeBytes(int64_t* bytes) override {
    *bytes = int64_t(1) << 40;
    return Status::Ok();
  }
  Status MakeStream(Stream* stream) override {
    *stream = new double(0);
    return Status::Ok();
  }
  void FreeStream(Stream stream) override { delete &TimeOf(stream); }
  Status MakeEvent(Event* event) override {
    *event = new double(-1);
    return Status::Ok();
  }
  void FreeEvent(Event event) override { delete &TimeOf(event); }
  Status MakeTimedEvent(Event* event) override { return MakeEvent(event); }
  Status Elapsed(Event from, Event to, double* seconds) override {
    *seconds = (TimeOf(to) - TimeOf(from)) / 1e6;
    return Status::Ok();
  }

  Status Enqueue(Stream stream, const std::vector<Copy>& copies, const char*,
                 char*) override {
    int64_t bytes = 0;
    for (const Copy& copy : copies) bytes += copy.width * copy.height;
    simulation_.Enqueue(TimeOf(stream), copy_us_ * double(bytes) / kSegmentBytes);
    return Status::Ok();
  }
  Status Record(Event event, Stream stream) override {
    simulation_.Enqueue(TimeOf(stream), 0);
    TimeOf(event) = TimeOf(stream);
    return Status::Ok();
  }
  Status Wait(Stream stream, Event event) override {
    if (TimeOf(event) < 0) return Status::Internal("a wait on what was never recorded");
    TimeOf(stream) = std::max(TimeOf(stream), TimeOf(event));
    simulation_.Enqueue(TimeOf(stream), 0);
    return Status::Ok();
  }
  bool SourcesStayMapped() const override { return true; }
  Status Synchronize(Event event) override {
    simulation_.Await(TimeOf(event));
    return Status::Ok();
  }

 private:
  Simulation& simulation_;
  const double copy_us_;
};

StepPlan PlanOf(const Load& load, uint64_t step) {
  StepPlan plan;
  plan.stamp_before = step;
  plan.stamp = step + 1;
  const int64_t cells = load.segments * kBlock;
  plan.lengths = {int32_t(cells)};
  plan.num_new = 1;
  for (int64_t layer = 0; layer < load.num_layers; ++layer) {
    plan.tails.push_back({layer, nullptr, 0, cells, kRowBytes});
    plan.attends.push_back({layer, 0});
  }
  return plan;
}

}  // namespace

double Makespan(const Load& load, const Host& host, int64_t depth, int64_t num_slots,
                std::vector<Mark>* marks) {
  Simulation simulation(host);
  double compute = 0;
  RingSettings settings;
  settings.depth = depth;
  settings.slot_bytes = load.in_slot * kSegmentBytes;
  settings.num_slots = num_slots;
  Ring ring(settings, std::make_unique<SimulatedTransport>(&simulation, load.copy_us));

  char scratch_memory[kSegmentBytes];
  const Launch launch = [&](const char*, const std::vector<Span>&) {
    simulation.Compute(compute, load.launch_us);
    return Status::Ok();
  };
  const Scratch scratch = [&](int64_t, char** memory) {
    *memory = scratch_memory;
    return Status::Ok();
  };
  Status status;
  if (marks != nullptr) status = ring.StartTrace(1 << 16);
  for (int64_t step = 0; step < load.num_steps && status.ok(); ++step) {
    simulation.Await(compute);
    ring.Prepare();
    status = ring.Begin(&compute, PlanOf(load, uint64_t(step)));
    for (int64_t layer = 0; layer < load.num_layers && status.ok(); ++layer) {
      const AttendCall call{{layer, 0}, 1,      1, kRowBytes, 0, load.segments * kBlock,
                            nullptr,    nullptr};
      status = Attend(ring, &compute, call, launch, scratch);
      simulation.Compute(compute, load.mlp_us);
    }
  }
  ring.Close();
  int64_t missed = 0;
  if (marks != nullptr && status.ok()) status = ring.StopTrace(marks, &missed);
  return status.ok() ? compute : -1;
}

}  // namespace kvjax
