// A machine of emulated streams: everything is really done, late, and by threads.
#pragma once

#include <memory>

#include "machine.h"

namespace kvjax {

// Work on the compute stream is delayed by up to `delay_us` each. `is_inline`: the
// compute stream is kInlineStream, as on the cpu platform.
std::unique_ptr<Machine> MakeStreams(uint64_t seed, int64_t delay_us, bool is_inline);

}  // namespace kvjax
