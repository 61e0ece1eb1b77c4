// A machine that does nothing and knows what orders what: it logs every copy, launch,
// record and wait with a vector clock and finds each access that another one may
// overtake, whatever the timing. Addresses are made up.
#pragma once

#include <memory>

#include "machine.h"

namespace kvjax {

std::unique_ptr<Machine> MakeClocks();

}  // namespace kvjax
