// The ring without XLA and Python. Each mode prints a verdict and exits with 1 if it is
// bad.
//
//   fuzz       random steps on threads with random delays
//   recording  the same steps: what orders what, whatever the delays
//   virtual    makespans on a simulated clock
//   ranges     the cut of a layer's tail, as JSON
//
// Flags of the first two: --seeds, --first, --workers, and --go_on=1 to go on after a
// failure. Of ranges: --lengths=300,10, --slot_bytes, --even_end=1, and the
// fields of LayerShape.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "clocks.h"
#include "listing.h"
#include "makespan.h"
#include "play.h"
#include "streams.h"

namespace kvjax {
namespace {

// The value of --name=value.
std::string Flag(const std::vector<std::string>& args, const std::string& name,
                 const std::string& otherwise) {
  const std::string start = "--" + name + "=";
  for (const std::string& arg : args) {
    if (arg.rfind(start, 0) == 0) return arg.substr(start.size());
  }
  return otherwise;
}

int64_t Number(const std::vector<std::string>& args, const std::string& name,
               int64_t otherwise) {
  return std::stoll(Flag(args, name, std::to_string(otherwise)));
}

std::unique_ptr<Machine> MakeMachine(uint64_t seed, bool threads) {
  if (!threads) return MakeClocks();
  constexpr int64_t kDelays[] = {0, 0, 10, 50, 200};
  return MakeStreams(~seed, kDelays[seed / 7 % 5], /*is_inline=*/seed % 6 == 5);
}

// Plays seeds on some host threads until one fails, or all of them.
int PlayAll(const char* mode, const std::vector<std::string>& args, bool threads) {
  const int64_t first = Number(args, "first", 0), seeds = Number(args, "seeds", 1000);
  const bool go_on = Number(args, "go_on", 0) != 0;
  std::atomic<int64_t> next{first}, bad_seed{-1}, launches{0};
  std::mutex mutex;
  RingStats total;
  std::string failure;
  const auto work = [&] {
    for (int64_t seed = next++; seed < first + seeds && (bad_seed < 0 || go_on);
         seed = next++) {
      const auto machine = MakeMachine(uint64_t(seed), threads);
      const PlayResult result = Play(uint64_t(seed), machine.get(), threads).Run();
      std::lock_guard<std::mutex> lock(mutex);
      launches += result.launches;
      Add(result.stats, &total);
      if (result.failure.empty() || bad_seed >= 0) continue;
      bad_seed = seed;
      failure = result.failure;
    }
  };
  std::vector<std::thread> workers(Number(args, "workers", 1));
  for (std::thread& worker : workers) worker = std::thread(work);
  for (std::thread& worker : workers) worker.join();
  if (bad_seed >= 0) {
    std::printf("%s: FAILED at seed %lld: %s\n", mode, (long long)bad_seed.load(),
                failure.c_str());
    return 1;
  }
#define KVJAX_PRINT(name) std::printf(#name "=%lld ", (long long)total.name);
  KVJAX_RING_COUNTS(KVJAX_PRINT)
#undef KVJAX_PRINT
  std::printf("launches=%lld\n%s: ok, %lld seeds\n", (long long)launches.load(), mode,
              (long long)seeds);
  return 0;
}

// Copies of 8 MiB at 55 GB/s; kernels take as long, two fifths of them attention.
Load LoadOf(int64_t num_steps, int64_t num_layers, int64_t segments) {
  constexpr double kCopyUs = 150, kLaunchUs = 60;
  return {num_steps, num_layers, segments,
          kCopyUs,   kLaunchUs,  segments * (kCopyUs - kLaunchUs)};
}

// One makespan against what the busier of link and kernels needs; whether it is at most
// so many times that.
bool TryMakespan(const char* name, const Host& host, const Load& load,
                 int64_t num_slots, double most = 1.1) {
  const double bound = std::max(load.copies(), load.compute());
  const double us = Makespan(load, host, /*depth=*/1, num_slots);
  const bool hidden = us > 0 && us <= most * bound;
  std::printf("%s, %lld slots, %lld segments a layer: %.0f us, %.3f of the bound%s\n",
              name, (long long)num_slots, (long long)load.segments, us, us / bound,
              hidden ? "" : " (too long)");
  return hidden;
}

// What a trace says that work of one kind took, on a host that costs nothing.
void PrintMarks(const char* name, MarkKind kind, const Load& load, int64_t num_slots) {
  std::vector<Mark> marks;
  Makespan(load, {0, 0, false}, /*depth=*/num_slots > 0, num_slots, &marks);
  std::vector<double> us;
  for (const Mark& mark : marks) {
    if (mark.kind == kind) us.push_back((mark.end_s - mark.begin_s) * 1e6);
  }
  std::sort(us.begin(), us.end());
  if (us.empty()) us.push_back(-1);
  std::printf("%s: %zu marks of %.1f to %.1f us\n", name, us.size(), us.front(),
              us.back());
}

int PlayVirtual() {
  // A launch thread that runs ahead of a GPU, and wakes up late where it waits for one;
  // the cpu platform, where a kernel is done when its call returns.
  const Host gpu{2, 25, false}, cpu{0, 0, true};
  bool hidden = true;
  for (const auto& [segments, num_slots] :
       {std::pair<int64_t, int64_t>{3, kMarginSlots}, {3, 8}, {8, 8}}) {
    hidden &= TryMakespan("gpu host", gpu, LoadOf(1, 32, segments), num_slots);
    hidden &= TryMakespan("cpu host", cpu, LoadOf(1, 32, segments), num_slots);
  }
  // Steps so short that the first copy of each must be under way before it begins.
  hidden &= TryMakespan("short steps", gpu, LoadOf(16, 3, 3), 8);
  // Long layers through two slots, each layer a little more than some slotfuls.
  const Load uneven{1, 32, 65, 10, 60, 160, 16};
  hidden &= TryMakespan("two slots", gpu, uneven, 2, 1.03);
  const Load load = LoadOf(1, 32, 3);
  const double ordered = Makespan(load, gpu, /*depth=*/0, /*num_slots=*/0);
  const bool added = ordered > 1.9 * load.copies();
  std::printf("ordered: %.0f us, %.3f of the bound\n", ordered,
              ordered / load.copies());
  PrintMarks("copy", MarkKind::kCopy, load, 8);
  PrintMarks("launch", MarkKind::kLaunch, load, 8);
  PrintMarks("ordered copy", MarkKind::kOrderedCopy, load, 0);
  PrintMarks("ordered launch", MarkKind::kLaunch, load, 0);
  std::printf("virtual: %s\n", hidden && added ? "ok" : "FAILED: overlap is lost");
  return hidden && added ? 0 : 1;
}

// The launches of one attend over a tail, as JSON.
int PrintRanges(const std::vector<std::string>& args) {
  std::vector<int32_t> lengths;
  std::stringstream text(Flag(args, "lengths", ""));
  for (std::string length; std::getline(text, length, ',');) {
    lengths.push_back(std::stoi(length));
  }
  const LayerShape shape{
      int32_t(lengths.size()),         int32_t(Number(args, "num_new", 1)),
      Number(args, "device_cells", 0), Number(args, "tail_cells", 0),
      Number(args, "row_bytes", 16),   Number(args, "window", 0)};
  const auto segments = CutTail(shape, lengths.data(), Number(args, "slot_bytes", 0),
                                Number(args, "even_end", 0) != 0);
  std::puts(Listing(ResidentSpans(shape, lengths.data()), segments).c_str());
  return 0;
}

int Main(const std::string& mode, const std::vector<std::string>& args) {
  if (mode == "fuzz") return PlayAll("fuzz", args, true);
  if (mode == "recording") return PlayAll("recording", args, false);
  if (mode == "virtual") return PlayVirtual();
  if (mode == "ranges") return PrintRanges(args);
  std::fprintf(stderr, "driver: no mode %s\n", mode.c_str());
  return 2;
}

}  // namespace
}  // namespace kvjax

int main(int argc, char** argv) {
  return kvjax::Main(argc > 1 ? argv[1] : "", {argv + std::min(argc, 2), argv + argc});
}
