#include "play.h"

#include <algorithm>
#include <chrono>

#include "block_math.h"

namespace kvjax {

void Add(const RingStats& stats, RingStats* sum) {
#define KVJAX_ADD(name) sum->name += stats.name;
  KVJAX_RING_COUNTS(KVJAX_ADD)
#undef KVJAX_ADD
}

Play::Play(uint64_t seed, Machine* machine, bool threads)
    : random_(seed),
      machine_(*machine),
      threads_(threads),
      cache_(&random_, machine),
      ring_id_(int64_t(seed)),
      seed_(seed) {
  if (!random_.Chance(0.02)) {
    Open();
    return;
  }
  // No ring is opened yet: an ordered one, until Reopen.
  ring_ = FindRing(ring_id_, 0, [&](int64_t) { return machine_.MakeTransport({}); });
  settings_ = ring_->settings();
  machine_.scratch = machine_.Allocate(settings_.slot_bytes);
}

Play::~Play() {
  if (closer_.joinable()) closer_.join();
}

void Play::Open() {
  const int64_t num_slots = random_.Pick<int64_t>({1, 2, 3, 3, 4, 5, 8});
  settings_.depth = random_.Between(0, 4);
  settings_.num_slots = settings_.depth == 0 ? 0 : num_slots;
  int64_t largest = 0;
  for (const TestLayer& layer : cache_.layers()) {
    largest = std::max(largest, layer.row_bytes);
  }
  // Now and then a slot holds no block of some layers.
  const int64_t row_bytes =
      random_.Chance(0.9) ? largest : cache_.layers()[0].row_bytes;
  settings_.slot_bytes = kBlock * row_bytes * random_.Between(1, 4) +
                         (random_.Chance(0.3) ? 16 * random_.Between(0, 300) : 0);
  settings_.decline = "depth is 0";
  machine_.slot_bytes = settings_.slot_bytes;
  machine_.scratch =
      machine_.Allocate(std::max(settings_.slot_bytes, kBlock * largest));

  Emulation emulation;
  emulation.seed = seed_;
  emulation.max_delay_us = random_.Pick<int64_t>({0, 0, 10, 50, 200});
  emulation.fail_allocation = random_.Chance(0.03);
  emulation.sources_stay_mapped = random_.Chance(0.5);
  sources_stay_mapped_ = emulation.sources_stay_mapped;
  if (random_.Chance(0.03)) emulation.free_bytes = settings_.ring_bytes() - 1;
  Expect(OpenRing(ring_id_, 0, settings_, machine_.MakeTransport(emulation)),
         "a new ring is open already");
  ring_ = PeekRing(ring_id_, 0);
  Trace();
}

// Traces some seeds' rings, and some of those for a few marks only.
void Play::Trace() {
  max_marks_ = seed_ % 3 != 1 ? 0 : seed_ % 2 == 0 ? 50 : 5000;
  if (max_marks_ == 0) return;
  std::lock_guard<std::mutex> lock(ring_->mutex());
  const Status started = ring_->StartTrace(max_marks_);
  Expect(started.ok(), "trace: " + started.message);
}

// Every byte that was copied is in a mark, and no mark ends before it begins.
void Play::CheckTrace() {
  Expect((machine_.timed_events > 0) == (max_marks_ > 0),
         "timed events without a trace, or none for one");
  if (max_marks_ == 0) return;
  std::lock_guard<std::mutex> lock(ring_->mutex());
  std::vector<Mark> marks;
  int64_t missed = 0, copied = 0;
  const Status stopped = ring_->StopTrace(&marks, &missed);
  Expect(stopped.ok(), "trace: " + stopped.message);
  for (const Mark& mark : marks) {
    copied += mark.bytes;
    Expect(mark.begin_s <= mark.end_s, "a mark ends before it begins");
  }
  Expect(missed == 0 || int64_t(marks.size()) == max_marks_, "a trace missed too soon");
  Expect(missed > 0 || copied == machine_.copied_bytes() - copied_before_,
         "the bytes of a trace are not those that were copied");
}

// Closes the ring and opens another one in its place, now, be a step under way or not.
void Play::Reopen() {
  if (closer_.joinable()) closer_.join();
  CloseRing(ring_id_, 0);
  clean_ = false;
  CheckCounts();
  CheckTrace();
  Add(ring_->stats(), &closed_);
  copied_before_ = machine_.copied_bytes();
  delivered_segments_ = delivered_bytes_ = 0;
  ledger_ = {};
  clean_ = true;
  Open();
}

PlayResult Play::Run() {
  const int64_t num_steps = random_.Between(2, 5);
  for (int64_t i = 0; i < num_steps && !failed(); ++i) {
    Step();
    if (random_.Chance(0.03)) PlayIdle();
    if (random_.Chance(0.04)) CloseSoon();
    if (random_.Chance(0.03)) Reopen();
  }
  End();
  Add(ring_->stats(), &closed_);
  return {machine_.failure(), closed_, launches_};
}

void Play::Step() {
  cache_.DrawStep();
  const std::vector<AttendKey> attends = DrawAttends();
  const uint64_t stamp_before = Change();
  if (!ledger_.open() && random_.Chance(0.5)) FreeOld(sources_stay_mapped_);
  Begin(attends, stamp_before);
  FreeOld(false);
  for (AttendKey key : DrawCalls(attends)) {
    if (failed() || !AttendOnce(key)) break;
    if (random_.Chance(0.02)) CloseSoon();
    if (random_.Chance(0.01)) Reopen();
  }
  if (!ledger_.open()) FreeOld(sources_stay_mapped_);
  cache_.Advance();
  CheckCounts();
}

// What may happen to the cache between two steps; the stamp that it then bears.
uint64_t Play::Change() {
  const int64_t kind = random_.Between(0, 99);
  if (kind < 10) {  // another cache where this one was, or this one restored
    cache_.Rewrite();
    return stamp_ > 1 && random_.Chance(0.5) ? stamp_ - 1 : 0;
  }
  if (kind < 30) {  // a copy, whose stamp tells of it or, not donated, doesn't
    for (const Tail& tail : cache_.Tails()) {
      old_tails_.push_back(cache_.Move(tail.layer));
    }
    return random_.Chance(0.3) ? stamp_ : 0;
  }
  return stamp_;
}

// Steps that need no tail, until the ring gives its memory back.
void Play::PlayIdle() {
  if (closer_.joinable()) return;
  const std::vector<int32_t> lengths = cache_.lengths();
  const std::vector<AttendKey> attends =
      random_.Chance(0.5) ? DrawAttends() : std::vector<AttendKey>();
  cache_.SetLengths(std::vector<int32_t>(lengths.size(), 0));
  Begin(attends, stamp_);
  ledger_.counts().given_back += ring_->stats().ring_bytes > 0;
  for (int64_t i = 0; i < kIdleSteps; ++i) Begin(attends, stamp_);
  Expect(ring_->stats().ring_bytes == 0, "an idle ring keeps its memory");
  cache_.SetLengths(lengths);
}

// Closes the ring: now, or at any time from now on.
void Play::CloseSoon() {
  if (closer_.joinable()) return;
  clean_ = false;
  const bool now = random_.Chance(0.3);
  const int64_t wait = random_.Between(0, 3000);
  if (now || !threads_) return CloseRing(ring_id_, 0);
  closer_ = std::thread([id = ring_id_, wait] {
    std::this_thread::sleep_for(std::chrono::microseconds(wait));
    CloseRing(id, 0);
  });
}

void Play::End() {
  if (closer_.joinable()) closer_.join();
  CloseRing(ring_id_, 0);
  Expect(ring_->stats().ring_bytes == 0, "a closed ring keeps its memory");
  for (const Tail& tail : cache_.Tails()) {
    old_tails_.push_back(cache_.layers()[tail.layer].tail);
  }
  FreeOld(false);
  machine_.Finish();
  CheckCounts();
  CheckTrace();
}

// All layers that have a tail, in order; now and then one comes twice.
std::vector<AttendKey> Play::DrawAttends() {
  std::vector<AttendKey> attends;
  for (const Tail& tail : cache_.Tails()) {
    const bool windowed = random_.Chance(0.3);
    const auto window = random_.Pick<int64_t>({1, 2, 100, 128, 129, 300, 5000});
    attends.push_back({tail.layer, windowed ? window : 0});
    if (random_.Chance(0.05)) attends.push_back({tail.layer, 0});
    if (random_.Chance(0.05)) attends.push_back(attends.front());
  }
  return attends;
}

// The attends as they come: as planned, or some skipped, repeated, swapped or never.
std::vector<AttendKey> Play::DrawCalls(const std::vector<AttendKey>& attends) {
  std::vector<AttendKey> calls = attends;
  if (random_.Chance(0.6)) return calls;
  clean_ = false;
  for (int64_t i = random_.Between(1, 3); i > 0 && !calls.empty(); --i) {
    const int64_t last = int64_t(calls.size()) - 1;
    const auto at = calls.begin() + random_.Between(0, last);
    switch (random_.Between(0, 4)) {
      case 0: calls.erase(at); break;
      case 1: calls.insert(at, AttendKey(*at)); break;
      case 2: std::swap(*at, calls[random_.Between(0, last)]); break;
      case 3: calls.erase(at, calls.end()); break;
      default: calls.insert(at, AttendKey{at->layer, 77}); break;
    }
  }
  return calls;
}

// Attends of layers whose blocks fit a slot: others are not for the ring.
std::vector<AttendKey> Play::FittingSlots(std::vector<AttendKey> attends) const {
  const auto is_large = [&](AttendKey key) {
    return kBlock * cache_.layers()[key.layer].row_bytes > settings_.slot_bytes;
  };
  attends.erase(std::remove_if(attends.begin(), attends.end(), is_large),
                attends.end());
  return attends;
}

void Play::Begin(const std::vector<AttendKey>& attends, uint64_t stamp_before) {
  ledger_.Begin(FittingSlots(attends));
  appended_.assign(cache_.layers().size(), false);
  StepPlan plan{cache_.lengths(), cache_.num_new(), cache_.Tails(),
                attends,          stamp_before,     stamp_ + 1};
  begun_.resize(cache_.layers().size());
  for (const Tail& tail : plan.tails) {
    const bool moved =
        stamp_before > 0 && stamp_before == stamp_ && begun_[tail.layer] != tail.data;
    ledger_.counts().moved_tails += moved;
    begun_[tail.layer] = tail.data;
  }
  stamp_ += 1;
  std::lock_guard<std::mutex> lock(ring_->mutex());
  ring_->Prepare();
  const Status begun = ring_->Begin(machine_.compute(), std::move(plan));
  Expect(begun.ok(), "begin: " + begun.message);
}

// The append before an attend, if one comes; whether one did. Not donated, it writes a
// copy of the tail. A layer that is attended twice may be appended to twice.
bool Play::Append(int64_t layer) {
  if (random_.Chance(0.03)) old_tails_.push_back(cache_.Move(layer));
  const bool appends = random_.Chance(appended_[layer] ? 0.2 : 0.95);
  if (appends) cache_.Append(layer);
  appended_[layer] = true;
  return appends;
}

// False: the step dies here.
bool Play::AttendOnce(AttendKey key) {
  const bool appends = Append(key.layer);
  const int64_t fail_at = random_.Chance(0.02) ? random_.Between(0, 5) : -1;

  const TestLayer& layer = cache_.layers()[key.layer];
  const LayerShape shape = cache_.ShapeOf(key);
  const AttendCall call{key,
                        shape.num_seqs,
                        shape.num_new,
                        shape.row_bytes,
                        shape.device_cells,
                        shape.tail_cells,
                        layer.device.data,
                        layer.tail.data};
  Coverage coverage(shape, cache_.lengths());

  std::lock_guard<std::mutex> lock(ring_->mutex());

  const RingStats before = ring_->stats();
  const bool moved = call.tail != begun_[key.layer];
  clean_ &= !moved && fail_at < 0;
  if (appends) ring_->NoteAppend(call.tail);
  ledger_.counts().moved_tails += appends && moved;
  const bool delivers = ledger_.Attend(key, moved, before.ring_bytes > 0);
  const Status status = AttendWatched(call, fail_at, &coverage);
  if (status.message == "as asked") {
    ledger_.Abort();
    return false;
  }
  Expect(status.ok(), "attend: " + status.message);
  if (delivers) ledger_.EndDelivered();
  CheckAttend(coverage, delivers, ring_->stats().ordered_bytes - before.ordered_bytes);
  return true;
}

// Attends with launches that check what they get. Launch `fail_at` fails, if there is
// one.
Status Play::AttendWatched(const AttendCall& call, int64_t fail_at,
                           Coverage* coverage) {
  int64_t num_launches = 0;
  slot_launches_ = scratch_launches_ = 0;
  const Launch launch = [&](const char* base, const std::vector<Span>& spans) {
    if (num_launches++ == fail_at) return Status::Internal("as asked");
    const bool resident = base == call.device, ordered = base == machine_.scratch.data;
    scratch_launches_ += ordered;
    slot_launches_ += !resident && !ordered;
    Range used = machine_.scratch;
    if (!ordered) used = {const_cast<char*>(base), settings_.slot_bytes};
    if (resident) used = {};
    const std::string wrong = coverage->Add(spans, used.bytes);
    Expect(wrong.empty(), wrong);
    std::vector<CellRead> reads;
    for (const Span& span : spans) cache_.Reads(call.key.layer, span, base, &reads);
    machine_.Launch(std::move(reads), call.row_bytes, used);
    return Status::Ok();
  };
  const Scratch scratch = [&](int64_t bytes, char** memory) {
    Expect(bytes <= machine_.scratch.bytes, "an ordered attend wants too much scratch");
    *memory = machine_.scratch.data;
    return Status::Ok();
  };
  const Status status = Attend(*ring_, machine_.compute(), call, launch, scratch);
  launches_ += num_launches;
  return status;
}

void Play::CheckAttend(const Coverage& coverage, bool delivers, int64_t ordered_bytes) {
  const std::string wrong = coverage.Complete();
  Expect(wrong.empty(), wrong);
  const int64_t live = coverage.LiveBytes();
  const int64_t expected = delivers ? slot_launches_ : scratch_launches_;
  Expect(slot_launches_ + scratch_launches_ == expected,
         "an attend took the wrong path");
  Expect((expected > 0) == (live > 0),
         "launches of the tail without live cells, or none");
  Expect(ordered_bytes == (delivers ? 0 : live), "ordered bytes are not the live ones");
  if (!delivers) return;
  delivered_segments_ += slot_launches_;
  delivered_bytes_ += live;
}

void Play::CheckCounts() {
  std::lock_guard<std::mutex> lock(ring_->mutex());
  const RingStats stats = ring_->stats();
  const std::string wrong = ledger_.Compare(stats);
  Expect(wrong.empty(), wrong);
  const int64_t copied = machine_.copied_bytes() - copied_before_;
  const int64_t counted = stats.early_bytes + stats.ordered_bytes + stats.gap_bytes;
  // What was sent ahead and isn't used, or not yet, is not counted.
  const bool ahead = settings_.num_slots > 0;
  Expect(ahead ? counted <= copied : counted == copied,
         "bytes early, ordered and in gaps are not those that were copied");
  Expect(stats.gap_bytes == 0 || cache_.lengths().size() > 1, "a gap at one sequence");
  Expect(stats.early_bytes >= delivered_bytes_,
         "more bytes were attended than delivered");
  if (!clean_) return;
  Expect(stats.early_bytes == delivered_bytes_, "bytes were delivered for nothing");
  Expect(stats.deliveries == delivered_segments_,
         "segments were delivered for nothing");
}

void Play::FreeOld(bool late_reads) {
  for (const Range& tail : old_tails_) machine_.Free(tail, late_reads);
  old_tails_.clear();
}

}  // namespace kvjax
