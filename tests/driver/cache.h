// A cache of random geometry whose every cell's content is known: the cells of its
// layers, the steps that write them, and what a launch must read.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "machine.h"
#include "ring.h"

namespace kvjax {

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}

  int64_t Between(int64_t low, int64_t high) {  // both allowed
    return std::uniform_int_distribution<int64_t>(low, high)(engine_);
  }
  bool Chance(double share) {
    return std::uniform_real_distribution<double>(0, 1)(engine_) < share;
  }
  template <typename T>
  T Pick(std::initializer_list<T> values) {
    return values.begin()[Between(0, int64_t(values.size()) - 1)];
  }

 private:
  std::mt19937_64 engine_;
};

struct TestLayer {
  int64_t device_cells, tail_cells, row_bytes;
  Range device, tail;
  std::vector<uint64_t> versions;  // [B, num_cells] writes so far, in program order
};

class TestCache {
 public:
  TestCache(Random* random, Machine* machine);

  const std::vector<TestLayer>& layers() const { return layers_; }
  const std::vector<int32_t>& lengths() const { return lengths_; }
  int64_t num_cells() const { return num_cells_; }
  int32_t num_new() const { return num_new_; }

  LayerShape ShapeOf(AttendKey key) const;

  // Draws a step: T, and for each sequence which cells it writes.
  void DrawStep();
  // The step is over: what it appended counts.
  void Advance();
  void SetLengths(std::vector<int32_t> lengths) { lengths_ = std::move(lengths); }

  std::vector<Tail> Tails() const;
  // Enqueues the step's writes to a layer.
  void Append(int64_t layer);
  // Enqueues new contents of all stored cells, in place: another cache in the same
  // memory.
  void Rewrite();
  // Puts a layer's tail elsewhere, as an append does that was not donated. The old one.
  Range Move(int64_t layer);

  // What a launch reads of a span: all but cells that the step replaces.
  void Reads(int64_t layer, const Span& span, const char* base,
             std::vector<CellRead>* reads) const;

 private:
  void DrawLayers();
  void DrawLengths();
  void Fill(int64_t layer);
  char* Home(const TestLayer& layer, int64_t seq, int64_t cell) const;
  uint64_t Content(int64_t layer, int64_t seq, int64_t cell) const;
  bool Replaced(int64_t seq, int64_t cell) const;

  Random& random_;
  Machine& machine_;
  int32_t num_seqs_ = 0, num_new_ = 1;
  int64_t num_cells_ = 0;
  std::vector<TestLayer> layers_;
  std::vector<int32_t> lengths_;
  std::vector<std::vector<int64_t>> where_;  // [B] cells that the step writes
  std::vector<int32_t> appended_;            // [B] of them, those behind the length
};

}  // namespace kvjax
