// The ring without XLA and Python. Each mode prints a verdict and exits with 1 if it is bad.
//
//   driver fuzz --seeds=1000 --first=0 --workers=8    real streams with random delays
//   driver recording --seeds=1000 --first=0           what orders what, whatever the delays
//   driver virtual                                    makespans on a simulated clock
//   driver ranges --lengths=300,10 ...                prints the cut of a layer's tail
#include <atomic>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "clocks.h"
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

PlayResult PlaySeed(uint64_t seed, bool threads) {
  constexpr int64_t kDelays[] = {0, 0, 10, 50, 200};
  const auto machine = threads ? MakeStreams(~seed, kDelays[seed / 7 % 5]) : MakeClocks();
  return Play(seed, machine.get(), threads).Run();
}

// Plays seeds on some host threads until one fails.
int PlayAll(const char* mode, const std::vector<std::string>& args, bool threads) {
  const int64_t first = Number(args, "first", 0), seeds = Number(args, "seeds", 1000);
  std::atomic<int64_t> next{first}, bad_seed{-1}, launches{0};
  std::mutex mutex;
  RingStats total;
  std::string failure;
  const auto work = [&] {
    for (int64_t seed = next++; seed < first + seeds && bad_seed < 0; seed = next++) {
      const PlayResult result = PlaySeed(uint64_t(seed), threads);
      std::lock_guard<std::mutex> lock(mutex);
      launches += result.launches;
#define KVJAX_SUM(name) total.name += result.stats.name;
      KVJAX_RING_COUNTS(KVJAX_SUM)
#undef KVJAX_SUM
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

int Main(const std::string& mode, const std::vector<std::string>& args) {
  if (mode == "fuzz") return PlayAll("fuzz", args, true);
  if (mode == "recording") return PlayAll("recording", args, false);
  std::fprintf(stderr, "driver: no mode %s\n", mode.c_str());
  return 2;
}

}  // namespace
}  // namespace kvjax

int main(int argc, char** argv) {
  return kvjax::Main(argc > 1 ? argv[1] : "", {argv + std::min(argc, 2), argv + argc});
}
