#include "cta.h"

#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>

namespace simt {
namespace {

constexpr size_t kStackBytes = 64 << 10;
constexpr int kLanes = 32;

[[noreturn]] void Fail(const char* what) {
  std::printf("simt: FAILED: %s\n", what);
  std::fflush(stdout);
  std::_Exit(1);
}

}  // namespace

// The inner one runs what a fiber of the outer one waits for.
struct Ctas {
  Cta outer, inner;
  bool nested = false;

  static Ctas& of_thread() {
    static thread_local Ctas ctas;
    return ctas;
  }
};

Cta* Cta::current() {
  Ctas& ctas = Ctas::of_thread();
  return ctas.nested ? &ctas.inner : &ctas.outer;
}

void Cta::Nested(const std::function<void()>& run) {
  Ctas& ctas = Ctas::of_thread();
  ctas.nested = true;
  run();
  ctas.nested = false;
}

void Cta::Open(char* shared, uint64_t seed, const std::string& left_out) {
  for (Cta* cta : {&Ctas::of_thread().outer, &Ctas::of_thread().inner}) {
    cta->shared_ = shared;
    cta->random_.seed(seed);
    cta->left_out_ = left_out;
  }
}

Cta::Cta() : stacks_(new char[kStackBytes * kMaxThreads]) {}
Cta::~Cta() = default;

void Cta::Run(int num_threads, std::function<void(int)> enter,
              std::function<void()> body) {
  enter_ = std::move(enter);
  body_ = std::move(body);
  std::memset(shared_, 0xff, kSharedBytes);  // NaN
  fibers_.assign(num_threads, Fiber{});
  order_.resize(num_threads);
  std::iota(order_.begin(), order_.end(), 0);
  Shuffle();
  for (int thread = Next(); thread >= 0; thread = Next()) Go(thread);
  for (const Fiber& fiber : fibers_) {
    if (fiber.state != kEnded) Fail("a barrier that some threads never come to");
  }
}

// Warps in any order, lanes in any order within theirs.
void Cta::Shuffle() {
  next_ = 0;
  std::vector<std::vector<int>> warps((fibers_.size() + kLanes - 1) / kLanes);
  for (size_t i = 0; i < fibers_.size(); ++i) warps[i / kLanes].push_back(int(i));
  std::shuffle(warps.begin(), warps.end(), random_);
  order_.clear();
  for (std::vector<int>& warp : warps) {
    std::shuffle(warp.begin(), warp.end(), random_);
    order_.insert(order_.end(), warp.begin(), warp.end());
  }
}

// The first in order that can go on; -1 = none. Who comes before `next_` waits at a
// barrier or has ended.
int Cta::Next() {
  for (;;) {
    for (; next_ < order_.size(); ++next_) {
      const int thread = order_[next_];
      if (fibers_[thread].state == kReady) return thread;
      if (fibers_[thread].state != kAtExchange) continue;
      const size_t begin = next_ / kLanes * kLanes;
      if (ReleaseWarp(thread / kLanes * kLanes)) next_ = begin - 1;
    }
    if (!ReleaseAll()) return -1;
  }
}

bool Cta::ReleaseWarp(int first) {
  const int end = std::min(first + kLanes, int(fibers_.size()));
  for (int i = first; i < end; ++i) {
    if (fibers_[i].state != kAtExchange) return false;
  }
  for (int i = first; i < end; ++i) fibers_[i].state = kReady;
  return true;
}

bool Cta::ReleaseAll() {
  const Fiber* first = nullptr;
  int sum = 0;
  for (const Fiber& fiber : fibers_) {
    if (fiber.state == kAtExchange) return false;
    if (fiber.state != kAtBarrier) continue;
    if (first == nullptr) first = &fiber;
    if (fiber.file != first->file || fiber.line != first->line) {
      Fail("threads that meet at two barriers");
    }
    sum += fiber.x;
  }
  if (first == nullptr) return false;
  sum_ = sum;
  for (Fiber& fiber : fibers_) {
    if (fiber.state == kAtBarrier) fiber.state = kReady;
  }
  Shuffle();
  return true;
}

// A context switch costs a system call, a jump none: the first makes each stack.
void Cta::Go(int thread) {
  running_ = thread;
  enter_(thread);
  Fiber& fiber = fibers_[thread];
  if (_setjmp(scheduler_) != 0) return;
  if (fiber.started) _longjmp(fiber.at, 1);
  fiber.started = true;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = stacks_.get() + kStackBytes * thread;
  context.uc_stack.ss_size = kStackBytes;
  context.uc_link = nullptr;
  makecontext(&context, &Cta::Start, 0);
  setcontext(&context);
}

void Cta::Start() {
  Cta* const cta = current();
  cta->body_();
  cta->fibers_[cta->running_].state = kEnded;
  _longjmp(cta->scheduler_, 1);
}

void Cta::Leave(State state) {
  Fiber& fiber = fibers_[running_];
  fiber.state = state;
  if (_setjmp(fiber.at) == 0) _longjmp(scheduler_, 1);
}

bool Cta::IsLeftOut(const char* file, int line) const {
  if (left_out_.empty()) return false;
  const std::string path = file;
  return path.substr(path.find_last_of('/') + 1) + ":" + std::to_string(line) ==
         left_out_;
}

int Cta::Sync(const char* file, int line, int x) {
  if (IsLeftOut(file, line)) return x;
  Fiber& fiber = fibers_[running_];
  fiber.x = x, fiber.file = file, fiber.line = line;
  Leave(kAtBarrier);
  return sum_;
}

void Cta::SyncWarp(const char* file, int line) {
  if (!IsLeftOut(file, line)) Exchange(0, 0);
}

// A lane that comes back for the next exchange finds this one's words untouched: two
// take turns.
uint64_t Cta::Exchange(uint64_t word, int from) {
  const int lane = running_;
  const int turn = fibers_[lane].exchanges++ % 2;
  fibers_[lane].word[turn] = word;
  Leave(kAtExchange);
  return fibers_[lane / kLanes * kLanes + from].word[turn];
}

void Cta::CopyLater(void* target, const void* source, size_t bytes) {
  const bool aligned = reinterpret_cast<uintptr_t>(target) % bytes == 0 &&
                       reinterpret_cast<uintptr_t>(source) % bytes == 0;
  if (!aligned) Fail("an asynchronous copy that isn't aligned");
  if (Draw(2) == 0) {
    std::memcpy(target, source, bytes);
    return;
  }
  auto& groups = fibers_[running_].groups;
  if (groups.empty()) groups.emplace_back();
  groups.back().push_back({target, source, bytes});
}

void Cta::CommitCopies() { fibers_[running_].groups.emplace_back(); }

void Cta::AwaitCopies(const char* file, int line, size_t groups_that_may_run) {
  if (IsLeftOut(file, line)) return;
  auto& groups = fibers_[running_].groups;
  const size_t kept = groups_that_may_run + 1;  // and the open one
  while (groups.size() > kept) {
    for (const Pending& copy : groups.front()) {
      std::memcpy(copy.target, copy.source, copy.bytes);
    }
    groups.erase(groups.begin());
  }
}

}  // namespace simt
