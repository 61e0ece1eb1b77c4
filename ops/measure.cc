// The C symbols of measure.h: true, or false and a reason, cut to `size` bytes.
#include "measure.h"

#include "handlers.h"

KVJAX_EXPORT bool kvjax_measure_copy(int64_t device, int64_t piece_bytes,
                                     int64_t pieces, int64_t passes, double* seconds,
                                     char* reason, int64_t size) {
  return kvjax::Told(kvjax::MeasureCopy(device, piece_bytes, pieces, passes, seconds),
                     reason, size);
}

KVJAX_EXPORT bool kvjax_measure_read(int64_t device, int64_t bytes, int64_t passes,
                                     double* seconds, char* reason, int64_t size) {
  return kvjax::Told(kvjax::MeasureRead(device, bytes, passes, seconds), reason, size);
}

KVJAX_EXPORT bool kvjax_device_memory(int64_t device, int64_t* free_bytes,
                                      int64_t* total_bytes, char* reason,
                                      int64_t size) {
  return kvjax::Told(kvjax::DeviceMemory(device, free_bytes, total_bytes), reason,
                     size);
}
