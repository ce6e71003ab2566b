// SPDX-License-Identifier: Apache-2.0
#include "src/exec/cuda/cuda_codec.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "src/base/format.h"
#include "src/exec/cuda/urgent_stream.h"

namespace moeccl::exec {

namespace cuda = driver::cuda;
using namespace moeccl::cuda;

namespace {

constexpr size_t kThreads = 256, kChecksumBlocks = 128;

}  // namespace

CudaCodec::CudaCodec(StreamEngine& engine, const kernels::CodecShape& shape)
    : engine_(engine),
      context_(engine.context()),
      shape_(shape),
      n_blocks_((shape.count + kernels::kCodecBlock - 1) / kernels::kCodecBlock),
      whole_bytes_(shape.count * moecclTypeSize(shape.type)),
      expert_bytes_(shape.ratio <= 1 ? whole_bytes_ : kernels::codec_bytes(shape)),
      keep_(kernels::codec_kept(shape, kernels::kCodecBlock)),
      n_last_(static_cast<uint32_t>(shape.count % kernels::kCodecBlock)) {
  keep_last_ = kernels::codec_kept(shape, n_last_);
  const kernels::CodecHeader header = kernels::codec_header(shape);
  static_assert(sizeof(header) == sizeof(header_));
  std::memcpy(&header_, &header, sizeof(header));
}

Result<std::unique_ptr<CudaCodec>> CudaCodec::create(StreamEngine& engine, const kernels::CodecShape& shape) {
  std::unique_ptr<CudaCodec> c(new CudaCodec(engine, shape));
  const cuda::Current current(engine.context());
  MOECCL_ASSIGN_OR_RETURN(c->calls_, create_urgent_stream(engine.context()));
  const size_t bytes = std::max(c->n_blocks_ * sizeof(moeccl::cuda::CodecError), kChecksumBlocks * sizeof(uint64_t));
  MOECCL_ASSIGN_OR_RETURN(c->device_, cuda::Memory::device(engine.context(), bytes));
  MOECCL_ASSIGN_OR_RETURN(c->pinned_, cuda::Memory::pinned(engine.context(), bytes));
  return c;
}

void CudaCodec::after_default_stream() { calls_.note(cuda::synchronize(nullptr, "the default stream")); }

void CudaCodec::launch(const std::string& kernel, const void* args, size_t blocks) {
  calls_.note(engine_.launch_blocks(stream(), kernel, args, blocks));
}

std::string CudaCodec::typed(const char* kernel) const {
  return format("{}_{}", kernel, static_cast<int>(shape_.type));
}

void CudaCodec::download(size_t bytes) {
  calls_.copy(pinned_.data(), device_.data(), bytes, "the codec's results to the host");
}

Status CudaCodec::encode(const void* experts, const void* shared, void* encoded, size_t n,
                         kernels::CodecError* errors) {
  const std::lock_guard lock(mutex_);
  const cuda::Current current(context_);
  after_default_stream();
  for (size_t e = 0; e < n; ++e) {
    const std::byte* from = static_cast<const std::byte*>(experts) + e * whole_bytes_;
    std::byte* to = static_cast<std::byte*>(encoded) + e * expert_bytes_;
    if (exact()) {
      if (whole_bytes_ > 0) calls_.copy(to, from, whole_bytes_, "an expert");
      if (errors != nullptr) errors[e] = {};
      continue;
    }
    auto* const lost = reinterpret_cast<moeccl::cuda::CodecError*>(device_.data());
    const CodecEncodeArgs args{from, shared, to, lost, shape_.count, keep_, keep_last_, header_};
    launch(typed("moeccl_codec_encode"), &args, n_blocks_);
    if (errors == nullptr) continue;
    download(n_blocks_ * sizeof(moeccl::cuda::CodecError));
    calls_.synchronize("the codec on the device");
    const auto* parts = reinterpret_cast<const moeccl::cuda::CodecError*>(pinned_.data());
    double sum = 0, whole = 0;
    uint32_t dropped = 0;
    for (size_t b = 0; b < n_blocks_; ++b) {
      sum += parts[b].lost;
      whole += parts[b].whole;
      dropped = std::max(dropped, parts[b].dropped);
    }
    errors[e] = {std::bit_cast<float>(dropped), kernels::relative_loss(sum, whole)};
  }
  return finish();
}

Status CudaCodec::decode(const void* encoded, const void* shared, void* held, size_t n) {
  const std::lock_guard lock(mutex_);
  const cuda::Current current(context_);
  after_default_stream();
  for (size_t e = 0; e < n && whole_bytes_ > 0; ++e) {
    const std::byte* from = static_cast<const std::byte*>(encoded) + e * expert_bytes_;
    std::byte* to = static_cast<std::byte*>(held) + e * whole_bytes_;
    if (exact()) {
      calls_.copy(to, from, whole_bytes_, "an expert");
      continue;
    }
    const CodecDecodeArgs args{to, shared, from, shape_.count, keep_, keep_last_};
    launch(typed("moeccl_codec_decode"), &args, n_blocks_);
  }
  return finish();
}

GradientArgs CudaCodec::arguments(const Gradients& g) const {
  return {g.gradients,   g.remainders, g.which, g.remainder, g.encoded, shape_.count,
          expert_bytes_, g.n,          keep_,   keep_last_,  {}};
}

Status CudaCodec::encode_on(cuda::Stream stream, const Gradients& g) const {
  if (g.n * n_blocks_ == 0) return {};
  GradientArgs args = arguments(g);
  args.header = header_;
  return engine_.launch_blocks(stream, typed("moeccl_gradient_encode"), &args, g.n * n_blocks_);
}

Status CudaCodec::keep_on(cuda::Stream stream, const Gradients& g) const {
  if (g.n * n_blocks_ == 0) return {};
  const GradientArgs args = arguments(g);
  return engine_.launch_blocks(stream, typed("moeccl_gradient_keep"), &args, g.n * n_blocks_);
}

Status CudaCodec::add_on(cuda::Stream stream, const void* encoded, void* out, uint32_t n) const {
  if (n * n_blocks_ == 0) return {};
  const CodecAddArgs args{out, encoded, shape_.count, expert_bytes_, n, keep_, keep_last_};
  return engine_.launch_blocks(stream, typed("moeccl_codec_add"), &args, n * n_blocks_);
}

Result<bool> CudaCodec::valid(const void* encoded, size_t n) {
  if (exact() || n == 0) return true;
  const std::lock_guard lock(mutex_);
  const cuda::Current current(context_);
  auto* const bad = reinterpret_cast<uint32_t*>(device_.data());
  calls_.fill(bad, 0, sizeof(*bad), "zeros");
  const CodecCheckArgs args{encoded, bad, n, expert_bytes_, keep_last_, n_last_, header_};
  launch("moeccl_codec_check", &args, n * (sizeof(header_) + keep_last_) / kThreads + 1);
  download(sizeof(*bad));
  MOECCL_TRY(finish());
  return *reinterpret_cast<const uint32_t*>(pinned_.data()) == 0;
}

Result<uint64_t> CudaCodec::checksum(const void* shared, bool is_complete) {
  if (exact() || whole_bytes_ == 0) return 0;
  const std::lock_guard lock(mutex_);
  const cuda::Current current(context_);
  if (!is_complete) after_default_stream();
  // There are as many partial sums as the launch may have blocks; those of blocks that are not launched stay zero.
  calls_.fill(device_.data(), 0, kChecksumBlocks * sizeof(uint64_t), "zeros");
  const ChecksumArgs args{shared, reinterpret_cast<uint64_t*>(device_.data()), whole_bytes_};
  launch("moeccl_checksum", &args, std::min(kChecksumBlocks, whole_bytes_ / (kThreads * 64) + 1));
  download(kChecksumBlocks * sizeof(uint64_t));
  MOECCL_TRY(finish());
  uint64_t sum = 0;
  for (size_t b = 0; b < kChecksumBlocks; ++b) sum += reinterpret_cast<const uint64_t*>(pinned_.data())[b];
  return sum;
}

}  // namespace moeccl::exec
