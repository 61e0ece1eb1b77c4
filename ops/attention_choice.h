// Which kernel attends over a launch; those of each cell type are a file of their own.
#pragma once

#include "attention_spans.cuh"

namespace kvjax {

constexpr int kThreads = kBlock;  // of a CTA of these kernels

using Kernel = void (*)(Params);

struct Choice {
  Kernel kernel;
  int rows;   // of a tile
  int bytes;  // of shared memory
  int ctas;   // of a multiprocessor, by their registers
};

// The kernels of float32 and of bfloat16 cells. `run`: one that folds as it goes.
Choice ChooseF32(const AttentionShape& shape, bool run);
Choice ChooseBf16(const AttentionShape& shape, bool run);

// Loads them all on the current device and sets their attributes.
Status PrepareF32();
Status PrepareBf16();

}  // namespace kvjax
