#include "registry.h"

#include <map>
#include <set>
#include <utility>

namespace kvjax {
namespace {

using Key = std::pair<int64_t, int64_t>;

struct Registry {
  std::mutex mutex;
  std::map<Key, std::shared_ptr<Ring>> rings;
  std::set<Key> open;
};

// Never destroyed: handlers may run while the interpreter exits.
Registry& registry() {
  static Registry* const instance = new Registry;
  return *instance;
}

}  // namespace

std::shared_ptr<Ring> FindRing(int64_t ring_id, int64_t device,
                               const TransportMaker& make) {
  Registry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  std::shared_ptr<Ring>& ring = all.rings[{ring_id, device}];
  if (ring == nullptr) ring = std::make_shared<Ring>(RingSettings{}, make(device));
  return ring;
}

bool OpenRing(int64_t ring_id, int64_t device, const RingSettings& settings,
              std::unique_ptr<Transport> transport) {
  auto ring = std::make_shared<Ring>(settings, std::move(transport));
  Registry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  if (!all.open.insert({ring_id, device}).second) return false;
  std::shared_ptr<Ring>& place = all.rings[{ring_id, device}];
  if (place != nullptr) {
    std::lock_guard<std::mutex> one_call(place->mutex());
    ring->Follow(*place);
  }
  place = std::move(ring);
  return true;
}

void CloseRing(int64_t ring_id, int64_t device) {
  std::shared_ptr<Ring> ring;
  {
    Registry& all = registry();
    std::lock_guard<std::mutex> lock(all.mutex);
    if (all.open.erase({ring_id, device}) == 0) return;
    ring = all.rings[{ring_id, device}];
  }
  ring->Close();  // outside the registry's lock: it waits for the device
}

std::shared_ptr<Ring> PeekRing(int64_t ring_id, int64_t device) {
  Registry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto found = all.rings.find({ring_id, device});
  return found == all.rings.end() ? nullptr : found->second;
}

}  // namespace kvjax
