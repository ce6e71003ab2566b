// SPDX-License-Identifier: Apache-2.0
// The residual codec on device memory; its results are byte for byte the host's. The kernels run on a separate stream,
// so that they do not interfere with the proxy that drives operations. The reported loss may differ from the host's in
// the last digits.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "kernels/codec.h"
#include "kernels/cuda/args.h"
#include "src/exec/cuda/stream_engine.h"

namespace moeccl::exec {

// Each call waits for the device. Calls may come from any thread and are serialised. The engine must outlive them.
class CudaCodec {
 public:
  // shape: of every expert. With ratio 1 there is no header: an expert is transferred as it is.
  static Result<std::unique_ptr<CudaCodec>> create(StreamEngine& engine, const kernels::CodecShape& shape);

  // Computes encoded[n][expert_bytes] = experts[n][count] less shared[count], after the work in the default stream.
  // errors: [n] or null.
  Status encode(const void* experts, const void* shared, void* encoded, size_t n, kernels::CodecError* errors);
  // Computes held[n][count] = shared + encoded, after the work in the default stream. Fails only if the device does.
  Status decode(const void* encoded, const void* shared, void* held, size_t n);
  // encoded[n][expert_bytes], of gradients[which[i]][count] with remainders[remainder[i]][count].
  struct Gradients {
    const void* gradients;
    float* remainders;
    const uint32_t *which, *remainder;  // [n], in device memory
    void* encoded;
    uint32_t n;
  };
  // Work on a stream, for which these do not wait. encoded = round(gradients + remainders), coded to zeros; remainders
  // = what that leaves; out[n][count] += encoded. Not for ratio 1.
  Status encode_on(driver::cuda::Stream stream, const Gradients& g) const;
  Status keep_on(driver::cuda::Stream stream, const Gradients& g) const;
  Status add_on(driver::cuda::Stream stream, const void* encoded, void* out, uint32_t n) const;
  driver::cuda::Stream stream() const { return calls_.stream(); }
  // Returns whether decode() can interpret all n.
  Result<bool> valid(const void* encoded, size_t n);
  // Returns kernels::checksum() of shared[count], after the work in the default stream unless shared is complete.
  Result<uint64_t> checksum(const void* shared, bool is_complete = false);

 private:
  CudaCodec(StreamEngine& engine, const kernels::CodecShape& shape);
  bool exact() const { return shape_.ratio <= 1; }
  void after_default_stream();
  void launch(const std::string& kernel, const void* args, size_t blocks);
  std::string typed(const char* kernel) const;
  moeccl::cuda::GradientArgs arguments(const Gradients& g) const;
  void download(size_t bytes);
  Status finish() { return calls_.finish("the codec on the device"); }

  StreamEngine& engine_;
  const driver::cuda::Context context_;  // the destructor has no engine any more if the communicator went first
  const kernels::CodecShape shape_;
  size_t n_blocks_, whole_bytes_, expert_bytes_;
  uint32_t keep_, keep_last_, n_last_;
  moeccl::cuda::CodecHeaderBits header_{};
  std::mutex mutex_;
  driver::cuda::Memory device_, pinned_;  // results on their way to the host
  StreamCalls calls_;                     // of the current call
};

}  // namespace moeccl::exec
