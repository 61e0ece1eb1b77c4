// One CTA's threads as fibers of a host thread. Which of them runs is drawn anew at
// each barrier: one warp runs as far as it can before the next, in any order of its
// lanes. So what is read must have been ordered behind its write by a barrier, not by
// luck.
#pragma once

#include <csetjmp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace simt {

constexpr size_t kSharedBytes = 227 << 10;
constexpr unsigned kMaxThreads = 1024;
constexpr int kProcessors = 3;  // few, so that CTAs take turns

class Cta {
 public:
  // The one that runs on this host thread.
  static Cta* current();
  Cta();
  ~Cta();

  // For this host thread. `shared` is a CTA's dynamic shared memory: noise when it
  // starts. The wait that stands at FILE:LINE is left out; "" = none is.
  static void Open(char* shared, uint64_t seed, const std::string& left_out);

  // Runs a kernel's body once a thread; `enter(i)` comes before thread i goes on.
  void Run(int num_threads, std::function<void(int)> enter, std::function<void()> body);

  bool IsLeftOut(const char* file, int line) const;

  // Called by a fiber: CTAs that `run` runs are others. One of the two has no dynamic
  // shared memory, they would share it.
  static void Nested(const std::function<void()>& run);

  // What fibers call.
  // A barrier of all threads that haven't ended: the sum of their x.
  int Sync(const char* file, int line, int x);
  // A barrier of a warp's threads.
  void SyncWarp(const char* file, int line);
  // Gives `word` and gets that of lane `from` of the same warp.
  uint64_t Exchange(uint64_t word, int from);
  void CopyLater(void* target, const void* source, size_t bytes);
  void CommitCopies();
  void AwaitCopies(const char* file, int line, size_t groups_that_may_run);

 private:
  enum State { kReady, kAtBarrier, kAtExchange, kEnded };
  struct Pending {
    void* target;
    const void* source;
    size_t bytes;
  };
  struct Fiber {
    State state;
    int x;             // at a barrier
    const char* file;  // of that
    int line;
    uint64_t word[2];  // its words of this exchange and the one before
    int exchanges;
    std::vector<std::vector<Pending>> groups;  // of copies; the last is open
    std::jmp_buf at;
    bool started;
  };

  static void Start();
  void Go(int thread);
  void Leave(State state);
  int Next();
  bool ReleaseWarp(int warp);
  bool ReleaseAll();
  void Shuffle();
  uint32_t Draw(uint32_t below) { return random_() % below; }

  char* shared_ = nullptr;
  std::mt19937 random_;
  std::vector<Fiber> fibers_;
  std::vector<int> order_;  // of threads, warp after warp: who runs first
  size_t next_ = 0;
  std::unique_ptr<char[]> stacks_;
  std::function<void(int)> enter_;
  std::function<void()> body_;
  std::jmp_buf scheduler_;
  int running_ = 0;
  int sum_ = 0;  // of the last barrier
  std::string left_out_;
};

}  // namespace simt
