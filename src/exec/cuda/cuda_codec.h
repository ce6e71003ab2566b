// SPDX-License-Identifier: Apache-2.0
// The residual codec on device memory, byte for byte the host's: kernels on a stream of its own, so that it does not
// meet the proxy that drives operations. What errors say of the loss may differ from the host's in the last digits.
#pragma once

#include <memory>
#include <mutex>

#include "kernels/codec.h"
#include "kernels/cuda/args.h"
#include "src/driver/cuda.h"
#include "src/exec/cuda/stream_engine.h"

namespace moeccl::exec {

// Each call waits for the device; any thread, one call at a time (they wait for each other). The engine outlives it.
class CudaCodec {
 public:
  // shape: of every expert; ratio 1 has no header here, an expert travels as it is.
  static Result<std::unique_ptr<CudaCodec>> create(StreamEngine& engine, const kernels::CodecShape& shape);
  ~CudaCodec();

  // encoded[n][expert_bytes] = experts[n][count] less shared[count]; errors[n] or null. After what the default stream
  // has.
  Status encode(const void* experts, const void* shared, void* encoded, size_t n, kernels::CodecError* errors);
  // held[n][count] = shared + encoded. After what the default stream has. Fails only with the device.
  Status decode(const void* encoded, const void* shared, void* held, size_t n);
  // Whether decode() makes sense of all n.
  Result<bool> valid(const void* encoded, size_t n);
  // kernels::checksum() of shared[count]; after what the default stream has.
  Result<uint64_t> checksum(const void* shared);

 private:
  CudaCodec(StreamEngine& engine, const kernels::CodecShape& shape);
  bool exact() const { return shape_.ratio <= 1; }
  void note(int result, const char* what);
  void after_default_stream();
  void launch(const char* kernel, const void* args, size_t blocks);
  void download(size_t bytes);
  Status finish();

  StreamEngine& engine_;
  const kernels::CodecShape shape_;
  size_t n_blocks_, whole_bytes_, expert_bytes_;
  uint32_t keep_, keep_last_, n_last_;
  moeccl::cuda::CodecHeaderBits header_{};
  std::mutex mutex_;
  driver::cuda::Stream stream_ = nullptr;
  driver::cuda::Memory device_, pinned_;  // results on their way to the host
  Status status_;                         // of the call under way
};

}  // namespace moeccl::exec
