// SPDX-License-Identifier: Apache-2.0
#include "src/exec/cuda/cuda_gradients.h"

#include <algorithm>

#include "src/driver/thread.h"

namespace moeccl::exec {

namespace cuda = driver::cuda;

Result<std::unique_ptr<CudaGradients>> CudaGradients::create(StreamEngine& engine, Shape shape, size_t n_layers) {
  std::unique_ptr<CudaGradients> g(new CudaGradients(engine, std::move(shape)));
  const cuda::Context context = engine.context();
  const cuda::Current current(context);
  const auto allocate = [&](size_t bytes) { return cuda::Memory::device(context, std::max<size_t>(bytes, 1)); };
  MOECCL_ASSIGN_OR_RETURN(g->codec_, CudaCodec::create(engine, g->shape_.codec));
  const size_t n = g->shape_.foreign.size(), list_bytes = 2 * n * sizeof(uint32_t);
  MOECCL_ASSIGN_OR_RETURN(g->lists_, allocate(list_bytes));
  MOECCL_ASSIGN_OR_RETURN(const cuda::Memory staged, cuda::Memory::pinned(context, std::max<size_t>(list_bytes, 1)));
  auto* const lists = reinterpret_cast<uint32_t*>(staged.data());
  std::copy(g->shape_.foreign.begin(), g->shape_.foreign.end(), lists);
  std::copy(g->shape_.remainder.begin(), g->shape_.remainder.end(), lists + n);
  if (n > 0)
    MOECCL_TRY(cuda::copy(g->lists_.data(), lists, list_bytes, g->stream(), "the lists of gradients to the device"));
  MOECCL_TRY(g->synchronize());
  g->layers_.resize(n_layers);
  for (size_t l = 0; l < n_layers; ++l) {
    Layer& layer = g->layers_[l];
    MOECCL_ASSIGN_OR_RETURN(layer.remainders, allocate(g->remainder_bytes()));
    MOECCL_ASSIGN_OR_RETURN(layer.sent, allocate(g->shape_.sent_bytes));
    MOECCL_ASSIGN_OR_RETURN(layer.arrived, allocate(g->shape_.arrived_bytes));
    MOECCL_ASSIGN_OR_RETURN(layer.finished, cuda::make_event());
    MOECCL_TRY(g->reset(l));
  }
  return g;
}

CudaGradients::~CudaGradients() {
  const cuda::Current current(context_);
  for (const Layer& layer : layers_) {
    if (layer.finished == nullptr) continue;
    while (cuda::driver()->cuEventQuery(layer.finished.get()) == cuda::kNotReady) driver::sleep_ns(20'000);
  }
}

Status CudaGradients::synchronize() const { return engine_.wait_for(stream(), "the work on gradients"); }

CudaCodec::Gradients CudaGradients::gradients(size_t layer, const void* held) const {
  const size_t n = shape_.foreign.size();
  const auto* lists = reinterpret_cast<const uint32_t*>(lists_.data());
  return {held, remainders(layer), lists, lists + n, sent(layer), static_cast<uint32_t>(n)};
}

Status CudaGradients::encode(size_t layer, const void* held, cuda::Stream stream) const {
  const cuda::Current current(context_);
  return codec_->encode_on(stream, gradients(layer, held));
}

Status CudaGradients::finish(size_t layer, const void* held, void* own, cuda::Stream stream, bool captured) const {
  const cuda::Current current(context_);
  const size_t bytes = shape_.codec.count * moecclTypeSize(shape_.codec.type);
  for (size_t e = 0; e < shape_.own.size() && bytes > 0; ++e) {
    const auto* from = static_cast<const std::byte*>(held) + shape_.own[e] * bytes;
    auto* to = static_cast<std::byte*>(own) + e * bytes;
    MOECCL_TRY(cuda::copy(to, from, bytes, stream, "a gradient"));
  }
  for (const size_t first : shape_.arrives)
    MOECCL_TRY(codec_->add_on(stream, static_cast<const std::byte*>(arrived(layer)) + first, own,
                              static_cast<uint32_t>(shape_.own.size())));
  MOECCL_TRY(codec_->keep_on(stream, gradients(layer, held)));
  if (captured) return {};
  return cuda::check(cuda::driver()->cuEventRecord(layers_[layer].finished.get(), stream), "gradients on a stream");
}

Status CudaGradients::reset(size_t layer) const {
  const cuda::Current current(context_);
  if (remainder_bytes() == 0) return {};
  MOECCL_TRY(cuda::fill(remainders(layer), 0, remainder_bytes(), stream(), "remainders to 0"));
  return synchronize();
}

uint64_t CudaGradients::memory_bytes() const {
  uint64_t bytes = lists_.bytes();
  for (const Layer& layer : layers_) bytes += layer.remainders.bytes() + layer.sent.bytes() + layer.arrived.bytes();
  return bytes;
}

}  // namespace moeccl::exec
