// FFI handlers of a GPU. Only begin waits for the device; only append_device and
// attend_device may be captured in a CUDA graph, since they keep no books on the host.
#include <cuda_runtime.h>

#include <cstring>

#include "append.h"
#include "attention_gpu.h"
#include "cuda_status.h"
#include "handlers.h"
#include "transport_cuda.h"

namespace kvjax {
namespace {

std::unique_ptr<Transport> MakeTransport(int64_t device) {
  return std::make_unique<CudaTransport>(int(device));
}

std::shared_ptr<Ring> RingOf(int64_t ring_id, int32_t device) {
  return FindRing(ring_id, device, MakeTransport);
}

// Every ring that this library opens has this transport.
CudaTransport& TransportOf(Ring& ring) {
  return static_cast<CudaTransport&>(ring.transport());
}

// The stage before a program runs, which XLA fences: all that may allocate or load.
ffi::Error BeginInitialize(int32_t device, ffi::AnyBuffer,
                           ffi::Buffer<ffi::S32> lengths, ffi::Buffer<ffi::U32>,
                           ffi::AnyBuffer, ffi::Result<ffi::AnyBuffer>,
                           ffi::Result<ffi::Buffer<ffi::S32>>,
                           ffi::Result<ffi::Buffer<ffi::U32>>, int64_t ring_id, int64_t,
                           ffi::Span<const int64_t>, ffi::Span<const int64_t>,
                           ffi::Span<const int64_t>, ffi::Span<const int64_t>) {
  Status status = PrepareAttention(device);
  if (!status.ok()) return ToError(status);
  const auto ring = RingOf(ring_id, device);
  std::lock_guard<std::mutex> lock(ring->mutex());
  status =
      TransportOf(*ring).PrepareWords(kLengthsWord + int64_t(lengths.element_count()));
  ring->Prepare();
  return ToError(status);
}

ffi::Error Begin(cudaStream_t stream, int32_t device, ffi::AnyBuffer tokens,
                 ffi::Buffer<ffi::S32> lengths, ffi::Buffer<ffi::U32> stamp,
                 ffi::AnyBuffer tail, ffi::Result<ffi::AnyBuffer> tokens_out,
                 ffi::Result<ffi::Buffer<ffi::S32>> ticket,
                 ffi::Result<ffi::Buffer<ffi::U32>> stamp_out, int64_t ring_id,
                 int64_t num_cells, ffi::Span<const int64_t> tail_layers,
                 ffi::Span<const int64_t> first_cells,
                 ffi::Span<const int64_t> attend_layers,
                 ffi::Span<const int64_t> attend_windows) {
  StepPlan plan;
  const BeginAttrs attrs{ring_id,     num_cells,     tail_layers,
                         first_cells, attend_layers, attend_windows};
  Status status = MakePlan(attrs, tokens, lengths, stamp, tail, &plan);
  if (!status.ok()) return ToError(status);
  const auto ring = RingOf(ring_id, device);
  int32_t* words = TransportOf(*ring).words();
  const int64_t num_seqs = int64_t(lengths.element_count());
  plan.stamp = NextStamp();
  {
    std::lock_guard<std::mutex> lock(ring->mutex());
    ring->NoteWork(stream, MarkKind::kXla);
  }
  status =
      LaunchBegin(stream, lengths.typed_data(), num_seqs, stamp.typed_data(),
                  plan.stamp, words, stamp_out->typed_data(), ticket->typed_data());
  if (!status.ok()) return ToError(status);
  if (tokens_out->untyped_data() != tokens.untyped_data()) {
    status = KVJAX_CUDA(cudaMemcpyAsync(tokens_out->untyped_data(),
                                        tokens.untyped_data(), tokens.size_bytes(),
                                        cudaMemcpyDeviceToDevice, stream));
    if (!status.ok()) return ToError(status);
  }
  // The plan needs the lengths on the host; without this it is made of the step
  // before's.
  status = KVJAX_CUDA(cudaStreamSynchronize(stream));
  if (!status.ok()) return ToError(status);

  std::lock_guard<std::mutex> lock(ring->mutex());
  if (words[kErrorWord] != 0) ring->NoteLengthError();
  words[kErrorWord] = 0;
  plan.lengths.assign(words + kLengthsWord, words + kLengthsWord + num_seqs);
  std::memcpy(&plan.stamp_before, words + kStampWord, sizeof plan.stamp_before);
  return ToError(ring->Begin(stream, std::move(plan)));
}

Status Append(cudaStream_t stream, const ffi::AnyBuffer& part, const Extent& extent,
              const ffi::AnyBuffer& rows, const ffi::Buffer<ffi::S32>& where,
              ffi::AnyBuffer& out) {
  KVJAX_RETURN_IF_ERROR(CheckAppend(part, extent, rows, where));
  if (out.untyped_data() != part.untyped_data()) {
    KVJAX_RETURN_IF_ERROR(
        KVJAX_CUDA(cudaMemcpyAsync(out.untyped_data(), part.untyped_data(),
                                   part.size_bytes(), cudaMemcpyDefault, stream)));
  }
  const auto dims = rows.dimensions();
  const int64_t row_bytes =
      dims[2] * dims[3] * int64_t(ffi::ByteWidth(rows.element_type()));
  return LaunchAppend(stream, static_cast<const char*>(rows.untyped_data()),
                      where.typed_data(), dims[0], dims[1], extent.num_cells, row_bytes,
                      extent.In(out));
}

ffi::Error AppendDevice(cudaStream_t stream, ffi::AnyBuffer part, ffi::AnyBuffer rows,
                        ffi::Buffer<ffi::S32> where, ffi::Buffer<ffi::S32>,
                        ffi::Result<ffi::AnyBuffer> out, int64_t first,
                        int64_t num_cells) {
  return ToError(Append(stream, part, {first, num_cells}, rows, where, *out));
}

ffi::Error AppendRing(cudaStream_t stream, int32_t device, ffi::AnyBuffer part,
                      ffi::AnyBuffer rows, ffi::Buffer<ffi::S32> where,
                      ffi::Buffer<ffi::S32>, ffi::Result<ffi::AnyBuffer> out,
                      int64_t first, int64_t num_cells, int64_t ring_id) {
  const Extent extent{first, num_cells};
  const Status status = Append(stream, part, extent, rows, where, *out);
  const auto ring = RingOf(ring_id, device);
  if (!status.ok()) return AbortStep(*ring, stream, status);
  std::lock_guard<std::mutex> lock(ring->mutex());
  ring->NoteAppend(extent.In(*out));
  return ffi::Error::Success();
}

template <typename T>
Status Take(ffi::ScratchAllocator& scratch, int64_t count, T** memory) {
  const auto taken = scratch.Allocate(size_t(count) * sizeof(T), 16);
  if (!taken.has_value()) {
    return Status::Exhausted("no device memory for " +
                             std::to_string(count * sizeof(T)) + " bytes of scratch");
  }
  *memory = static_cast<T*>(*taken);
  return Status::Ok();
}

ffi::Error AttendRing(cudaStream_t stream, int32_t device,
                      ffi::ScratchAllocator allocator, ffi::AnyBuffer q,
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
  if (!status.ok()) return AbortStep(*ring, stream, status);
  const AttendCall call = MakeCall(operands, shape, {layer, window});

  float* state = nullptr;
  const int64_t states = int64_t(shape.num_seqs) * shape.num_kv_heads * shape.rows();
  status = Take(allocator, states * StateFloats(shape.value_dim), &state);
  if (!status.ok()) return AbortStep(*ring, stream, status);
  const AttentionBuffers buffers{q.untyped_data(),
                                 rows.untyped_data(),
                                 lengths.typed_data(),
                                 where.typed_data(),
                                 out->untyped_data(),
                                 state,
                                 TransportOf(*ring).words() + kErrorWord};
  float* workspace = nullptr;
  int64_t workspace_floats = 0;
  const Launch launch = [&](const char* base, const std::vector<Span>& spans) {
    int64_t num_blocks = 0;
    for (const Span& span : spans) num_blocks += span.num_blocks;
    const int64_t floats = WorkspaceFloats(shape, num_blocks);
    if (floats > workspace_floats) {
      KVJAX_RETURN_IF_ERROR(Take(allocator, floats, &workspace));
      workspace_floats = floats;
    }
    return LaunchSpans(stream, shape, buffers, base, spans, workspace);
  };
  const Scratch scratch = [&](int64_t bytes, char** slot) {
    return Take(allocator, bytes, slot);
  };

  std::lock_guard<std::mutex> lock(ring->mutex());
  status = Attend(*ring, stream, call, launch, scratch);
  if (status.ok() && ticket_out->untyped_data() != ticket.untyped_data()) {
    status =
        KVJAX_CUDA(cudaMemcpyAsync(ticket_out->untyped_data(), ticket.untyped_data(), 4,
                                   cudaMemcpyDeviceToDevice, stream));
  }
  return ToError(status);
}

ffi::Error AttendDeviceInitialize(int32_t device) {
  return ToError(PrepareAttention(device));
}

ffi::Error AttendDevice(cudaStream_t stream, ffi::AnyBuffer q, ffi::AnyBuffer rows,
                        ffi::Buffer<ffi::S32> lengths, ffi::Buffer<ffi::S32> where,
                        ffi::Buffer<ffi::S32> ticket, ffi::RemainingArgs parts,
                        ffi::Result<ffi::AnyBuffer> out,
                        ffi::Result<ffi::Buffer<ffi::S32>> ticket_out,
                        ffi::Result<ffi::Buffer<ffi::F32>> workspace, float scale,
                        float soft_cap, int64_t window, int64_t value_dim,
                        int64_t first, int64_t num_cells) {
  AttentionShape shape;
  const AttendOperands operands{q, rows, lengths, where, parts, {first, num_cells}, {}};
  Status status = MakeShape(operands, {scale, soft_cap, window, value_dim}, &shape);
  if (!status.ok()) return ToError(status);
  const int64_t blocks = int64_t(shape.num_seqs) * shape.capacity / kBlock;
  if (int64_t(workspace->element_count()) < WorkspaceFloats(shape, blocks)) {
    return ToError(Status::Invalid("attend's workspace is too small"));
  }
  const AttentionBuffers buffers{q.untyped_data(),
                                 rows.untyped_data(),
                                 lengths.typed_data(),
                                 where.typed_data(),
                                 out->untyped_data(),
                                 nullptr,
                                 nullptr};
  status = LaunchDevice(stream, shape, buffers,
                        operands.device.In(*parts.get<ffi::AnyBuffer>(0)),
                        workspace->typed_data());
  if (status.ok() && ticket_out->untyped_data() != ticket.untyped_data()) {
    status =
        KVJAX_CUDA(cudaMemcpyAsync(ticket_out->untyped_data(), ticket.untyped_data(), 4,
                                   cudaMemcpyDeviceToDevice, stream));
  }
  return ToError(status);
}

}  // namespace
}  // namespace kvjax

namespace ffi = kvjax::ffi;
using CudaStream = ffi::PlatformStream<cudaStream_t>;

// begin's operands, results and attributes, for both of its stages.
#define KVJAX_BEGIN_OPERANDS(binding)                  \
  binding                                              \
      .Arg<ffi::AnyBuffer>()        /* tokens */       \
      .Arg<ffi::Buffer<ffi::S32>>() /* lengths */      \
      .Arg<ffi::Buffer<ffi::U32>>() /* stamp */        \
      .Arg<ffi::AnyBuffer>()        /* tail */         \
      .Ret<ffi::AnyBuffer>()        /* tokens */       \
      .Ret<ffi::Buffer<ffi::S32>>() /* ticket */       \
      .Ret<ffi::Buffer<ffi::U32>>() /* stamp */        \
      .Attr<int64_t>("ring_id")                        \
      .Attr<int64_t>("num_cells")                      \
      .Attr<ffi::Span<const int64_t>>("tail_layers")   \
      .Attr<ffi::Span<const int64_t>>("first_cells")   \
      .Attr<ffi::Span<const int64_t>>("attend_layers") \
      .Attr<ffi::Span<const int64_t>>("attend_windows")

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    kvjax_begin_initialize, kvjax::BeginInitialize,
    KVJAX_BEGIN_OPERANDS(
        ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>().Ctx<ffi::DeviceOrdinal>()));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    kvjax_begin, kvjax::Begin,
    KVJAX_BEGIN_OPERANDS(ffi::Ffi::Bind().Ctx<CudaStream>().Ctx<ffi::DeviceOrdinal>()));

XLA_FFI_DEFINE_HANDLER_SYMBOL(kvjax_append_device, kvjax::AppendDevice,
                              ffi::Ffi::Bind()
                                  .Ctx<CudaStream>()
                                  .Arg<ffi::AnyBuffer>()         // part
                                  .Arg<ffi::AnyBuffer>()         // rows
                                  .Arg<ffi::Buffer<ffi::S32>>()  // where
                                  .Arg<ffi::Buffer<ffi::S32>>()  // ticket
                                  .Ret<ffi::AnyBuffer>()         // part
                                  .Attr<int64_t>("first")
                                  .Attr<int64_t>("num_cells"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(kvjax_append_ring, kvjax::AppendRing,
                              ffi::Ffi::Bind()
                                  .Ctx<CudaStream>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<ffi::AnyBuffer>()         // part
                                  .Arg<ffi::AnyBuffer>()         // rows
                                  .Arg<ffi::Buffer<ffi::S32>>()  // where
                                  .Arg<ffi::Buffer<ffi::S32>>()  // ticket
                                  .Ret<ffi::AnyBuffer>()         // part
                                  .Attr<int64_t>("first")
                                  .Attr<int64_t>("num_cells")
                                  .Attr<int64_t>("ring_id"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(kvjax_attend_ring, kvjax::AttendRing,
                              ffi::Ffi::Bind()
                                  .Ctx<CudaStream>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::ScratchAllocator>()
                                  .Arg<ffi::AnyBuffer>()         // q
                                  .Arg<ffi::AnyBuffer>()         // rows
                                  .Arg<ffi::Buffer<ffi::S32>>()  // lengths
                                  .Arg<ffi::Buffer<ffi::S32>>()  // where
                                  .Arg<ffi::Buffer<ffi::S32>>()  // ticket
                                  .RemainingArgs()               // device part, tail
                                  .Ret<ffi::AnyBuffer>()         // out
                                  .Ret<ffi::Buffer<ffi::S32>>()  // ticket
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    kvjax_attend_device_initialize, kvjax::AttendDeviceInitialize,
    ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>().Ctx<ffi::DeviceOrdinal>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(kvjax_attend_device, kvjax::AttendDevice,
                              ffi::Ffi::Bind()
                                  .Ctx<CudaStream>()
                                  .Arg<ffi::AnyBuffer>()         // q
                                  .Arg<ffi::AnyBuffer>()         // rows
                                  .Arg<ffi::Buffer<ffi::S32>>()  // lengths
                                  .Arg<ffi::Buffer<ffi::S32>>()  // where
                                  .Arg<ffi::Buffer<ffi::S32>>()  // ticket
                                  .RemainingArgs()               // device part
                                  .Ret<ffi::AnyBuffer>()         // out
                                  .Ret<ffi::Buffer<ffi::S32>>()  // ticket
                                  .Ret<ffi::Buffer<ffi::F32>>()  // workspace
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("value_dim")
                                  .Attr<int64_t>("device_first")
                                  .Attr<int64_t>("device_num_cells"),
                              {ffi::Traits::kCmdBufferCompatible});

#pragma GCC visibility pop

// Opens the ring of one GPU; see RingSettings. False if one is open.
KVJAX_EXPORT bool kvjax_ring_open(int64_t ring_id, int64_t device, int64_t depth,
                                  int64_t slot_bytes, int64_t num_slots,
                                  int64_t headroom_bytes, const char* decline) {
  const kvjax::RingSettings settings{depth, slot_bytes, num_slots, headroom_bytes,
                                     decline};
  return kvjax::OpenRing(ring_id, device, settings, kvjax::MakeTransport(device));
}
