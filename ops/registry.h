// The rings of this process, by (ring id, device). Rings outlive executables and are
// shared by them, so handlers look them up at every call.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "ring.h"

namespace kvjax {

using TransportMaker = std::function<std::unique_ptr<Transport>(int64_t device)>;

// The ring, or an ordered one (depth 0, no memory) if none was opened. Thread-safe.
std::shared_ptr<Ring> FindRing(int64_t ring_id, int64_t device,
                               const TransportMaker& make);

// Opens a ring in place of an ordered one. False if one is open already.
bool OpenRing(int64_t ring_id, int64_t device, const RingSettings& settings,
              std::unique_ptr<Transport> transport);

// Closes a ring and leaves an ordered one in its place, with its counts. Waits for the
// device. Nothing to do if there is none.
void CloseRing(int64_t ring_id, int64_t device);

// The ring, or null.
std::shared_ptr<Ring> PeekRing(int64_t ring_id, int64_t device);

}  // namespace kvjax
