// SPDX-License-Identifier: Apache-2.0
// The compressed return of gradients (moeccl/gradient.h) on device memory, byte for byte as on the host: what a rank
// does before and after the exchange. All of it is work on a stream, for which no call waits.
#pragma once

#include <memory>
#include <vector>

#include "src/driver/cuda.h"
#include "src/exec/cuda/cuda_codec.h"

namespace moeccl::exec {

class CudaGradients {
 public:
  struct Shape {
    kernels::CodecShape codec;
    // For each expert that another rank owns, in the order in which they are sent, its index among the held experts
    // and among the remainders.
    std::vector<uint32_t> foreign, remainder;
    std::vector<uint32_t> own;    // the index of each own one among the held experts
    std::vector<size_t> arrives;  // where the gradients of each rank that sends some begin, in the order of ranks
    size_t sent_bytes = 0, arrived_bytes = 0;
  };
  // Allocates for each layer. The engine must outlive all calls, but not the result.
  static Result<std::unique_ptr<CudaGradients>> create(StreamEngine& engine, Shape shape, size_t n_layers);
  // Waits for finish() on all streams.
  ~CudaGradients();

  // For the calls that block the host.
  driver::cuda::Stream stream() const { return codec_->stream(); }
  Status synchronize() const;

  // sent() = the encoded sums of gradients and remainders.
  Status encode(size_t layer, const void* held, driver::cuda::Stream stream) const;
  // After the exchange from sent() into arrived(). own = own gradients plus arrived ones; remainders() = what was not
  // sent. `captured`: the work goes into a graph, whose replays the destructor does not see.
  Status finish(size_t layer, const void* held, void* own, driver::cuda::Stream stream, bool captured) const;
  // Sets the remainders to 0, and waits for it.
  Status reset(size_t layer) const;

  void* sent(size_t layer) const { return layers_[layer].sent.data(); }
  void* arrived(size_t layer) const { return layers_[layer].arrived.data(); }
  float* remainders(size_t layer) const { return reinterpret_cast<float*>(layers_[layer].remainders.data()); }
  uint64_t memory_bytes() const;

 private:
  struct Layer {
    driver::cuda::Memory remainders, sent, arrived;
    driver::cuda::EventOwner finished;
  };
  CudaGradients(StreamEngine& engine, Shape shape)
      : engine_(engine), context_(engine.context()), shape_(std::move(shape)) {}
  CudaCodec::Gradients gradients(size_t layer, const void* held) const;
  size_t remainder_bytes() const { return shape_.foreign.size() * shape_.codec.count * sizeof(float); }

  StreamEngine& engine_;
  const driver::cuda::Context context_;
  const Shape shape_;
  std::unique_ptr<CudaCodec> codec_;
  driver::cuda::Memory lists_;  // shape_.foreign and shape_.remainder
  std::vector<Layer> layers_;
};

}  // namespace moeccl::exec
