// Plays one seed: a random cache and ring, some steps with jumps and mishaps, all on
// one machine. Everything random is drawn in the order of the host's calls, so a seed
// is the same play on each machine, however its threads run.
#pragma once

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "attend.h"
#include "cache.h"
#include "coverage.h"
#include "ledger.h"
#include "machine.h"
#include "registry.h"

namespace kvjax {

struct PlayResult {
  std::string failure;  // "" = none
  RingStats stats;
  int64_t launches = 0;
};

void Add(const RingStats& stats, RingStats* sum);

class Play {
 public:
  // `threads`: the machine has them, so the ring may also be closed by another one.
  Play(uint64_t seed, Machine* machine, bool threads);
  ~Play();

  PlayResult Run();

 private:
  void Open();
  void Reopen();
  void Trace();
  void CheckTrace();
  void Step();
  uint64_t Change();
  void PlayIdle();
  void CloseSoon();
  void End();

  std::vector<AttendKey> DrawAttends();
  std::vector<AttendKey> DrawCalls(const std::vector<AttendKey>& attends);
  std::vector<AttendKey> FittingSlots(std::vector<AttendKey> attends) const;
  void Begin(const std::vector<AttendKey>& attends, uint64_t stamp_before);
  bool Append(int64_t layer);
  bool AttendOnce(AttendKey key);
  Status AttendWatched(const AttendCall& call, int64_t fail_at, Coverage* coverage);
  void FreeOld(bool late_reads);
  void CheckAttend(const Coverage& coverage, bool delivers, int64_t ordered_bytes);
  void CheckCounts();
  void Expect(bool fact, const std::string& text) {
    if (!fact) machine_.Fail(text);
  }
  bool failed() { return !machine_.failure().empty(); }

  Random random_;
  Machine& machine_;
  const bool threads_;
  TestCache cache_;
  const int64_t ring_id_;
  const uint64_t seed_;
  RingSettings settings_;
  std::shared_ptr<Ring> ring_;
  bool sources_stay_mapped_ = false;

  std::thread closer_;

  Ledger ledger_;
  uint64_t stamp_ = 0;              // of the last step
  std::vector<bool> appended_;      // [L] in this step
  std::vector<const char*> begun_;  // [L] tails as begin saw them
  std::vector<Range> old_tails_;    // to be freed once the step is over

  bool clean_ = true;             // no jump or mishap so far
  int64_t slot_launches_ = 0;     // of this attend
  int64_t scratch_launches_ = 0;  // of this attend
  int64_t copied_before_ = 0;     // bytes, when this ring was opened
  int64_t max_marks_ = 0;         // of this ring's trace; 0: none
  RingStats closed_;              // counts of the rings before this one
  int64_t launches_ = 0;
  int64_t delivered_segments_ = 0;
  int64_t delivered_bytes_ = 0;
};

}  // namespace kvjax
