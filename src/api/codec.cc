// SPDX-License-Identifier: Apache-2.0
// Entry points of codec.h.
#include "moeccl/codec.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/codec.h"
#include "kernels/cuda/args.h"
#include "src/api/convert.h"
#include "src/api/issue.h"
#include "src/base/adopt.h"
#include "src/comm/collective.h"
#include "src/moe/migrate/expert_use.h"

using namespace moeccl;

namespace {

constexpr double kDefaultRatio = 50;  // the paper's default

Result<kernels::CodecShape> shape_of(const moecclCodec_t* given) {
  MOECCL_ASSIGN_OR_RETURN(const moecclCodec_t codec, adopt(given, "codec"));
  if (!kernels::codec_supports(codec.type))
    return error(moecclInvalidArgument, "codec.type is {}: give moecclFloat32 or moecclBfloat16",
                 static_cast<int>(codec.type));
  if (codec.ratio != 0 && !(codec.ratio >= 1 && codec.ratio <= 1e6))
    return error(moecclInvalidArgument, "codec.ratio is {}: give 1 (exact) to 1e6, or 0 for {}", codec.ratio,
                 kDefaultRatio);
  if (codec.count == 0) return error(moecclInvalidArgument, "codec.count is 0: give the elements of an expert");
  if (codec.count > SIZE_MAX / 16)
    return error(moecclInvalidArgument, "codec.count is {}: give a size that fits in memory", codec.count);
  return kernels::CodecShape{codec.type, codec.count, codec.ratio == 0 ? kDefaultRatio : codec.ratio};
}

Status needs(const char* name, const void* buffer, uint64_t count) {
  if (buffer != nullptr || count == 0) return {};
  return error(moecclInvalidArgument, "{} is NULL: give {} elements", name, count);
}

Status overlaps(const char* written, const char* other) {
  return error(moecclInvalidArgument, "{} overlaps {}: give it a buffer of its own", written, other);
}

// `update` is empty for a plain encode. Encoding stops when it returns false.
Status encode(const moecclCodec_t* codec, const void* experts, size_t n, const void* shared,
              const kernels::CodecUpdate& update, void* encoded, size_t bytes, moecclCodecError_t* lost) {
  MOECCL_ASSIGN_OR_RETURN(const kernels::CodecShape shape, shape_of(codec));
  MOECCL_TRY(needs(update ? "experts" : "expert", experts, n * shape.count));
  if (shape.ratio > 1) MOECCL_TRY(needs("shared", shared, shape.count));
  if (encoded == nullptr) return api::null_argument("encoded", "moecclCodecBytes() bytes");
  if (bytes / n < kernels::codec_bytes(shape))
    return error(moecclInvalidArgument, "bytes is {}: {} {}, see moecclCodecBytes", bytes,
                 n == 1 ? "this expert takes" : "these experts take", n * kernels::codec_bytes(shape));
  const uint64_t expert_bytes = shape.count * moecclTypeSize(shape.type), room = n * kernels::codec_bytes(shape);
  if (comm::overlap(encoded, room, experts, n * expert_bytes))
    return overlaps("encoded", update ? "experts" : "expert");
  if (shape.ratio > 1 && comm::overlap(encoded, room, shared, expert_bytes)) return overlaps("encoded", "shared");
  std::vector<kernels::CodecError> errors(n);
  const kernels::CodecExperts all{experts, shared, encoded, errors.data(), static_cast<uint32_t>(n)};
  if (!kernels::codec_encode(kernels::best_codec(), shape, all, update)) return {};
  for (size_t e = 0; e < n && lost != nullptr; ++e) lost[e] = {errors[e].max_dropped, errors[e].relative};
  return {};
}

// decode(bytes of an encoded expert) returns the result of kernels::codec_decode.
template <class Decode>
Status decode(const kernels::CodecShape& shape, const void* encoded, size_t bytes, const void* shared,
              Decode&& decode) {
  if (shape.ratio > 1) MOECCL_TRY(needs("shared", shared, shape.count));
  if (encoded == nullptr) return api::null_argument("encoded", "what moecclCodecEncode wrote");
  if (bytes < kernels::codec_bytes(shape))
    return error(moecclInvalidArgument, "bytes is {}: this codec's experts take {}", bytes,
                 kernels::codec_bytes(shape));
  if (decode(kernels::codec_bytes(shape))) return {};
  return error(moecclInvalidArgument,
               "encoded is not an expert of {} elements, type {} and ratio {}: encode and decode with the same codec",
               shape.count, static_cast<int>(shape.type), shape.ratio);
}

// Forms the sum of this rank's experts, divided by n_total: on CUDA memory in `shared`, in the stream's order, and
// otherwise at once in *own, because earlier work on the stream may still use `shared`.
Status mean_of_own(comm::Communicator& comm, moecclStream_t stream, const void* experts, size_t n_local, size_t n_total,
                   void* shared, size_t count, moecclDataType_t type, std::shared_ptr<std::byte[]>* own) {
  if (!kernels::codec_supports(type))
    return error(moecclInvalidArgument, "type is {}: give moecclFloat32 or moecclBfloat16", static_cast<int>(type));
  if (n_total == 0 || n_local > n_total || n_total > UINT32_MAX)
    return error(moecclInvalidArgument, "n_total is {} with {} experts here: give the experts of all ranks", n_total,
                 n_local);
  if (!comm::fits_in_memory(count, moecclTypeSize(type), std::max<size_t>(n_local, 1)))
    return error(moecclInvalidArgument, "count is {}: give a size that fits in memory", count);
  MOECCL_TRY(needs("shared", shared, count));
  MOECCL_TRY(needs("experts", experts, n_local * count));
  MOECCL_ASSIGN_OR_RETURN(const exec::Runner* runner, comm.place(n_local * count > 0 ? experts : nullptr, shared));
  const bool on_device = runner->on_device();
  if (count == 0) return {};
  MOECCL_TRY(comm.usable());
  const size_t bytes = count * moecclTypeSize(type);
  if (on_device && n_local > moeccl::cuda::kMaxSources)
    return error(moecclUnsupported, "n_local is {}: at most {} experts of a rank are possible on CUDA memory", n_local,
                 moeccl::cuda::kMaxSources);
  const auto sum = [=](const kernels::KernelTable& table, void* to) {
    std::vector<const void*> sources;
    for (size_t e = 0; e < n_local; ++e) sources.push_back(static_cast<const std::byte*>(experts) + e * bytes);
    kernels::ReduceArgs args;
    args.dst = to;
    args.srcs = sources.data();
    args.count = count;
    args.n_srcs = static_cast<uint32_t>(n_local);
    args.divisor = static_cast<uint32_t>(n_total);
    table.reduce[type][static_cast<size_t>(kernels::ReduceOp::kSum)](args);
  };
  if (on_device && n_local > 0)
    return api::issue_on_device(comm, stream, [=](const kernels::KernelTable& table) { sum(table, shared); });
  if (on_device) {
    return api::issue_on_device(comm, stream, [&comm, shared, bytes](const kernels::KernelTable&) {
      comm.cuda()->engine().clear(shared, bytes);
    });
  }
  *own = std::make_shared_for_overwrite<std::byte[]>(bytes);
  if (n_local > 0) {
    sum(kernels::best(), own->get());
  } else {
    std::memset(own->get(), 0, bytes);
  }
  return {};
}

}  // namespace

moecclResult_t moecclCodecBytes(const moecclCodec_t* codec, size_t* bytes) {
  return api::guarded(nullptr, [&]() -> Status {
    if (bytes == nullptr) return api::null_argument("bytes", "the address of a size_t");
    MOECCL_ASSIGN_OR_RETURN(const kernels::CodecShape shape, shape_of(codec));
    *bytes = kernels::codec_bytes(shape);
    return {};
  });
}

moecclResult_t moecclCodecEncode(const moecclCodec_t* codec, const void* expert, const void* shared, void* encoded,
                                 size_t bytes, moecclCodecError_t* error) {
  return api::guarded(nullptr, [&] { return encode(codec, expert, 1, shared, {}, encoded, bytes, error); });
}

moecclResult_t moecclCodecEncodeFused(const moecclCodec_t* codec, const void* experts, size_t n, const void* shared,
                                      moecclExpertUpdateFn_t update, void* context, void* encoded, size_t bytes,
                                      moecclCodecError_t* errors) {
  return api::guarded(nullptr, [&]() -> Status {
    MOECCL_TRY(comm::check_update(update, "moecclCodecEncode"));
    if (n == 0 || n > INT32_MAX)
      return error(moecclInvalidArgument, "n is {}: give the number of experts, 1 to {}", n, INT32_MAX);
    comm::ExpertUpdate step(update, context);
    MOECCL_TRY(encode(codec, experts, n, shared, step.function(), encoded, bytes, errors));
    return step.status("finish the step and call moecclCodecEncode");
  });
}

moecclResult_t moecclCodecDecode(const moecclCodec_t* codec, const void* encoded, size_t bytes, const void* shared,
                                 void* out) {
  return api::guarded(nullptr, [&]() -> Status {
    MOECCL_ASSIGN_OR_RETURN(const kernels::CodecShape shape, shape_of(codec));
    MOECCL_TRY(needs("out", out, shape.count));
    const uint64_t out_bytes = shape.count * moecclTypeSize(shape.type);
    if (comm::overlap(out, out_bytes, encoded, kernels::codec_bytes(shape))) return overlaps("out", "encoded");
    if (shape.ratio > 1 && comm::overlap(out, out_bytes, shared, out_bytes)) return overlaps("out", "shared");
    return decode(shape, encoded, bytes, shared,
                  [&](uint64_t whole) { return kernels::codec_decode(shape, encoded, whole, shared, out); });
  });
}

moecclResult_t moecclCodecDecodeFused(const moecclCodec_t* codec, const void* encoded, size_t bytes, const void* shared,
                                      const moecclExpertUse_t* use) {
  return api::guarded(nullptr, [&]() -> Status {
    MOECCL_ASSIGN_OR_RETURN(const kernels::CodecShape shape, shape_of(codec));
    MOECCL_ASSIGN_OR_RETURN(comm::ExpertUse computation, comm::ExpertUse::create(use, shape.count));
    MOECCL_TRY(decode(shape, encoded, bytes, shared, [&](uint64_t whole) {
      return kernels::codec_decode(shape, encoded, whole, shared, computation.range(), computation.function());
    }));
    return computation.status();
  });
}

moecclResult_t moecclSharedExpert(const void* experts, size_t n_local, size_t n_total, void* shared, size_t count,
                                  moecclDataType_t type, moecclComm_t comm, moecclStream_t stream) {
  return api::collective(comm, [&](comm::Communicator& c) -> Status {
    std::shared_ptr<std::byte[]> own;
    MOECCL_TRY(mean_of_own(c, stream, experts, n_local, n_total, shared, count, type, &own));
    const comm::CollectiveCall sum{.op = moecclOpAllReduce,
                                   .send = own != nullptr ? own.get() : shared,
                                   .recv = shared,
                                   .count = count,
                                   .type = type};
    return api::issue(c, stream, nullptr, [&](exec::Operation& op) {
      MOECCL_TRY(comm::prepare_collective(c, sum, op));
      op.own_input = std::move(own);
      return Status();
    });
  });
}
