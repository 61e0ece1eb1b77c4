// FFI handlers of the cpu platform: the same ring and plan as on a GPU over the
// emulated transport. A handler's work is done when it returns.
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <vector>

#include "handlers.h"
#include "transport_emulated.h"

namespace kvjax {
namespace {

std::unique_ptr<Transport> MakeTransport(int64_t) {
  return std::make_unique<EmulatedTransport>(Emulation{});
}

std::shared_ptr<Ring> RingOf(int64_t ring_id, int32_t device) {
  return FindRing(ring_id, device, MakeTransport);
}

// Work of one ParallelFor: whoever comes takes the next index.
struct SharedWork {
  SharedWork(int64_t n, const std::function<void(int64_t)>& work) : size(n), f(work) {}

  const int64_t size;
  const std::function<void(int64_t)>& f;  // the caller's; not used once all is done
  std::atomic<int64_t> next{0};
  std::mutex mutex;
  std::condition_variable changed;
  int64_t done = 0;

  void Run() {
    for (int64_t i = next++; i < size; i = next++) {
      f(i);
      std::lock_guard<std::mutex> lock(mutex);
      if (++done == size) changed.notify_all();
    }
  }
};

// On XLA's intra-op threads and the calling one. The caller may be one of those
// threads, so it does not rely on another ever coming: it waits only for work that was
// taken.
ParallelFor OnPool(ffi::ThreadPool& pool) {
  return [&pool](int64_t n, const std::function<void(int64_t)>& f) {
    const auto work = std::make_shared<SharedWork>(n, f);
    for (int64_t i = 1; i < std::min<int64_t>(n, pool.num_threads()); ++i) {
      pool.Schedule([work] { work->Run(); });
    }
    work->Run();
    std::unique_lock<std::mutex> lock(work->mutex);
    work->changed.wait(lock, [&] { return work->done == n; });
  };
}

ffi::Error Begin(int32_t device, ffi::AnyBuffer tokens, ffi::Buffer<ffi::S32> lengths,
                 ffi::Buffer<ffi::U32> stamp, ffi::AnyBuffer tail,
                 ffi::Result<ffi::AnyBuffer> tokens_out,
                 ffi::Result<ffi::Buffer<ffi::S32>> ticket,
                 ffi::Result<ffi::Buffer<ffi::U32>> stamp_out, int64_t ring_id,
                 int64_t num_cells, ffi::Span<const int64_t> tail_layers,
                 ffi::Span<const int64_t> first_cells,
                 ffi::Span<const int64_t> attend_layers,
                 ffi::Span<const int64_t> attend_windows) {
  StepPlan plan;
  const BeginAttrs attrs{ring_id,     num_cells,     tail_layers,
                         first_cells, attend_layers, attend_windows};
  const Status made = MakePlan(attrs, tokens, lengths, stamp, tail, &plan);
  if (!made.ok()) return ToError(made);
  plan.lengths.assign(lengths.typed_data(),
                      lengths.typed_data() + lengths.element_count());
  if (tokens_out->untyped_data() != tokens.untyped_data()) {
    std::memcpy(tokens_out->untyped_data(), tokens.untyped_data(), tokens.size_bytes());
  }
  *ticket->typed_data() = 0;
  std::memcpy(&plan.stamp_before, stamp.typed_data(), sizeof plan.stamp_before);
  plan.stamp = NextStamp();
  std::memcpy(stamp_out->typed_data(), &plan.stamp, sizeof plan.stamp);

  const auto ring = RingOf(ring_id, device);
  std::lock_guard<std::mutex> lock(ring->mutex());
  ring->NoteWork(kInlineStream, MarkKind::kXla);
  ring->Prepare();
  return ToError(ring->Begin(kInlineStream, std::move(plan)));
}

Status Append(const ffi::AnyBuffer& part, const Extent& extent,
              const ffi::AnyBuffer& rows, const ffi::Buffer<ffi::S32>& where,
              ffi::AnyBuffer& out) {
  KVJAX_RETURN_IF_ERROR(CheckAppend(part, extent, rows, where));
  if (out.untyped_data() != part.untyped_data()) {
    std::memcpy(out.untyped_data(), part.untyped_data(), part.size_bytes());
  }
  const auto dims = rows.dimensions();
  const int64_t row_bytes =
      dims[2] * dims[3] * int64_t(ffi::ByteWidth(rows.element_type()));
  char* target = extent.In(out);
  const char* source = static_cast<const char*>(rows.untyped_data());
  for (int64_t i = 0; i < dims[0] * dims[1]; ++i) {
    const int64_t cell = where.typed_data()[i];
    if (cell < 0 || cell >= extent.num_cells) continue;
    const int64_t at = i / dims[1] * extent.num_cells + cell;
    std::memcpy(target + at * row_bytes, source + i * row_bytes, row_bytes);
  }
  return Status::Ok();
}

ffi::Error AppendDevice(ffi::AnyBuffer part, ffi::AnyBuffer rows,
                        ffi::Buffer<ffi::S32> where, ffi::Buffer<ffi::S32>,
                        ffi::Result<ffi::AnyBuffer> out, int64_t first,
                        int64_t num_cells) {
  return ToError(Append(part, {first, num_cells}, rows, where, *out));
}

ffi::Error AppendRing(int32_t device, ffi::AnyBuffer part, ffi::AnyBuffer rows,
                      ffi::Buffer<ffi::S32> where, ffi::Buffer<ffi::S32>,
                      ffi::Result<ffi::AnyBuffer> out, int64_t first, int64_t num_cells,
                      int64_t ring_id) {
  const Extent extent{first, num_cells};
  const Status status = Append(part, extent, rows, where, *out);
  const auto ring = RingOf(ring_id, device);
  if (!status.ok()) return AbortStep(*ring, kInlineStream, status);
  std::lock_guard<std::mutex> lock(ring->mutex());
  ring->NoteAppend(extent.In(*out));
  return ffi::Error::Success();
}

ffi::Error AttendRing(int32_t device, ffi::ThreadPool pool, ffi::AnyBuffer q,
                      ffi::AnyBuffer rows, ffi::Buffer<ffi::S32> lengths,
                      ffi::Buffer<ffi::S32> where, ffi::Buffer<ffi::S32> ticket,
                      ffi::RemainingArgs parts, ffi::Result<ffi::AnyBuffer> out,
                      ffi::Result<ffi::Buffer<ffi::S32>> ticket_out, float scale,
                      float soft_cap, int64_t window, int64_t value_dim,
                      int64_t device_first, int64_t device_cells, int64_t tail_first,
                      int64_t tail_cells, int64_t ring_id, int64_t layer) {
  const Extent on_device{device_first, device_cells}, in_tail{tail_first, tail_cells};
  const AttendOperands operands{q, rows, lengths, where, parts, on_device, in_tail};
  AttentionShape shape;
  Status status = MakeShape(operands, {scale, soft_cap, window, value_dim}, &shape);
  const auto ring = RingOf(ring_id, device);
  if (!status.ok()) return AbortStep(*ring, kInlineStream, status);
  const AttendCall call = MakeCall(operands, shape, {layer, window});

  std::vector<float> state(int64_t(shape.num_seqs) * shape.num_kv_heads * shape.rows() *
                           StateFloats(shape.value_dim));
  int32_t error = 0;
  const AttentionBuffers buffers{q.untyped_data(),
                                 rows.untyped_data(),
                                 lengths.typed_data(),
                                 where.typed_data(),
                                 out->untyped_data(),
                                 state.data(),
                                 &error};
  const ParallelFor parallel = OnPool(pool);
  const Launch launch = [&](const char* base, const std::vector<Span>& spans) {
    AttendSpans(shape, buffers, base, spans, parallel);
    return Status::Ok();
  };
  std::vector<char> memory;
  const Scratch scratch = [&](int64_t bytes, char** slot) {
    memory.resize(bytes);
    *slot = memory.data();
    return Status::Ok();
  };

  std::lock_guard<std::mutex> lock(ring->mutex());
  status = Attend(*ring, kInlineStream, call, launch, scratch);
  if (error != 0) ring->NoteLengthError();
  *ticket_out->typed_data() = *ticket.typed_data();
  return ToError(status);
}

ffi::Error AttendDevice(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer rows,
                        ffi::Buffer<ffi::S32> lengths, ffi::Buffer<ffi::S32> where,
                        ffi::Buffer<ffi::S32> ticket, ffi::RemainingArgs parts,
                        ffi::Result<ffi::AnyBuffer> out,
                        ffi::Result<ffi::Buffer<ffi::S32>> ticket_out,
                        ffi::Result<ffi::Buffer<ffi::F32>>, float scale, float soft_cap,
                        int64_t window, int64_t value_dim, int64_t first,
                        int64_t num_cells) {
  AttentionShape shape;
  const AttendOperands operands{q, rows, lengths, where, parts, {first, num_cells}, {}};
  const Status status =
      MakeShape(operands, {scale, soft_cap, window, value_dim}, &shape);
  if (!status.ok()) return ToError(status);

  std::vector<float> state(int64_t(shape.num_seqs) * shape.num_kv_heads * shape.rows() *
                           StateFloats(shape.value_dim));
  int32_t error = 0;  // nobody asks: the sequence's NaN tells
  const AttentionBuffers buffers{q.untyped_data(),
                                 rows.untyped_data(),
                                 lengths.typed_data(),
                                 where.typed_data(),
                                 out->untyped_data(),
                                 state.data(),
                                 &error};
  const int64_t row_bytes =
      int64_t(shape.num_kv_heads) * shape.record_size * SizeOf(shape.cell_type);
  const LayerShape layer{shape.num_seqs, shape.num_new, shape.capacity, 0,
                         row_bytes,      window};
  AttendSpans(shape, buffers, operands.device.In(*parts.get<ffi::AnyBuffer>(0)),
              ResidentSpans(layer, lengths.typed_data()), OnPool(pool));
  *ticket_out->typed_data() = *ticket.typed_data();
  return ffi::Error::Success();
}

}  // namespace
}  // namespace kvjax

using kvjax::ffi::AnyBuffer;
using kvjax::ffi::Buffer;
using kvjax::ffi::DeviceOrdinal;
using kvjax::ffi::F32;
using kvjax::ffi::Ffi;
using kvjax::ffi::S32;
using kvjax::ffi::Span;
using kvjax::ffi::ThreadPool;
using kvjax::ffi::U32;

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(kvjax_begin, kvjax::Begin,
                              Ffi::Bind()
                                  .Ctx<DeviceOrdinal>()
                                  .Arg<AnyBuffer>()    // tokens
                                  .Arg<Buffer<S32>>()  // lengths
                                  .Arg<Buffer<U32>>()  // stamp
                                  .Arg<AnyBuffer>()    // tail
                                  .Ret<AnyBuffer>()    // tokens
                                  .Ret<Buffer<S32>>()  // ticket
                                  .Ret<Buffer<U32>>()  // stamp
                                  .Attr<int64_t>("ring_id")
                                  .Attr<int64_t>("num_cells")
                                  .Attr<Span<const int64_t>>("tail_layers")
                                  .Attr<Span<const int64_t>>("first_cells")
                                  .Attr<Span<const int64_t>>("attend_layers")
                                  .Attr<Span<const int64_t>>("attend_windows"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(kvjax_append_device, kvjax::AppendDevice,
                              Ffi::Bind()
                                  .Arg<AnyBuffer>()    // part
                                  .Arg<AnyBuffer>()    // rows
                                  .Arg<Buffer<S32>>()  // where
                                  .Arg<Buffer<S32>>()  // ticket
                                  .Ret<AnyBuffer>()    // part
                                  .Attr<int64_t>("first")
                                  .Attr<int64_t>("num_cells"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(kvjax_append_ring, kvjax::AppendRing,
                              Ffi::Bind()
                                  .Ctx<DeviceOrdinal>()
                                  .Arg<AnyBuffer>()    // part
                                  .Arg<AnyBuffer>()    // rows
                                  .Arg<Buffer<S32>>()  // where
                                  .Arg<Buffer<S32>>()  // ticket
                                  .Ret<AnyBuffer>()    // part
                                  .Attr<int64_t>("first")
                                  .Attr<int64_t>("num_cells")
                                  .Attr<int64_t>("ring_id"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(kvjax_attend_ring, kvjax::AttendRing,
                              Ffi::Bind()
                                  .Ctx<DeviceOrdinal>()
                                  .Ctx<ThreadPool>()
                                  .Arg<AnyBuffer>()    // q
                                  .Arg<AnyBuffer>()    // rows
                                  .Arg<Buffer<S32>>()  // lengths
                                  .Arg<Buffer<S32>>()  // where
                                  .Arg<Buffer<S32>>()  // ticket
                                  .RemainingArgs()     // device part, tail
                                  .Ret<AnyBuffer>()    // out
                                  .Ret<Buffer<S32>>()  // ticket
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("value_dim")
                                  .Attr<int64_t>("device_first")
                                  .Attr<int64_t>("device_num_cells")
                                  .Attr<int64_t>("tail_first")
                                  .Attr<int64_t>("tail_num_cells")
                                  .Attr<int64_t>("ring_id")
                                  .Attr<int64_t>("layer"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(kvjax_attend_device, kvjax::AttendDevice,
                              Ffi::Bind()
                                  .Ctx<ThreadPool>()
                                  .Arg<AnyBuffer>()    // q
                                  .Arg<AnyBuffer>()    // rows
                                  .Arg<Buffer<S32>>()  // lengths
                                  .Arg<Buffer<S32>>()  // where
                                  .Arg<Buffer<S32>>()  // ticket
                                  .RemainingArgs()     // device part
                                  .Ret<AnyBuffer>()    // out
                                  .Ret<Buffer<S32>>()  // ticket
                                  .Ret<Buffer<F32>>()  // workspace
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("value_dim")
                                  .Attr<int64_t>("device_first")
                                  .Attr<int64_t>("device_num_cells"));

#pragma GCC visibility pop

// Opens the ring of one emulated device; see RingSettings and Emulation. False if open.
KVJAX_EXPORT bool kvjax_ring_open(int64_t ring_id, int64_t device, int64_t depth,
                                  int64_t slot_bytes, int64_t num_slots,
                                  int64_t headroom_bytes, const char* decline,
                                  uint64_t seed, int64_t max_delay_us,
                                  int64_t free_bytes, bool fail_allocation) {
  const kvjax::RingSettings settings{depth, slot_bytes, num_slots, headroom_bytes,
                                     decline};
  const kvjax::Emulation emulation{seed, max_delay_us, free_bytes, fail_allocation};
  return kvjax::OpenRing(ring_id, device, settings,
                         std::make_unique<kvjax::EmulatedTransport>(emulation));
}
