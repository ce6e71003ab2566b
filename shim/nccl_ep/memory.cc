// SPDX-License-Identifier: Apache-2.0
#include "shim/nccl_ep/memory.h"

#include <cstdlib>

namespace moeccl::shim::ep {

Place::Place(const char* function, bool shares_device, cudaStream_t stream,
             std::initializer_list<const Tensor*> tensors)
    : function_(function), shares_device_(shares_device), stream_(stream) {
  bool any = false;
  for (const Tensor* t : tensors) {
    if (!t->given || t->data == nullptr) continue;
    any = true;
    on_device_ |= device::names(t->data);
  }
  if (!any) on_device_ = hooks()->serves_cuda() != 0;
}

// As for NCCL's collectives: NULL is the legacy default stream, except for ranks that are threads on one device, which
// share that stream and must not wait there for each other.
moecclStream_t Place::moeccl_stream() const {
  constexpr uintptr_t kLegacy = 1;  // CU_STREAM_LEGACY
  if (!on_device_) return nullptr;
  if (stream_ != nullptr) return reinterpret_cast<moecclStream_t>(stream_);
  return shares_device_ ? nullptr : reinterpret_cast<moecclStream_t>(kLegacy);
}

ncclResult_t Place::wait() const {
  if (device::captures(stream_))
    return fail(
        ncclInvalidUsage,
        std::string(function_) +
            ": the stream is being captured, and this call reads choices, weights or counts on the host: call it "
            "outside of the graph (MoECCL's own moecclRoutingUpdateOnStream can be captured)");
  if (device::may_be_stream(stream_))
    return stream_ == nullptr && !device::present() ? ncclSuccess
                                                    : done(device::synchronize(stream_), "wait for the stream");
  return from_moeccl(moecclStreamSynchronize(reinterpret_cast<moecclStream_t>(stream_)));
}

ncclResult_t Place::done(bool ok, const char* what) const {
  if (ok) return ncclSuccess;
  return fail(ncclUnhandledCudaError,
              std::string(function_) + ": CUDA could not " + what + ": check the tensors' memory and the stream");
}

ncclResult_t Place::read(void* to, const void* from, size_t bytes) const {
  if (bytes == 0) return ncclSuccess;
  if (device::owns(from)) return done(device::read(to, from, bytes, stream_), "read a tensor");
  std::memcpy(to, from, bytes);
  return ncclSuccess;
}

ncclResult_t Place::put(void* to, const void* from, size_t bytes) const {
  if (bytes == 0) return ncclSuccess;
  if (device::owns(to)) return done(device::put(to, from, bytes, stream_), "write a tensor");
  std::memcpy(to, from, bytes);
  return ncclSuccess;
}

ncclResult_t Place::copy(void* to, const void* from, size_t bytes) const {
  if (bytes == 0) return ncclSuccess;
  if (on_device_) return done(device::copy(to, from, bytes, stream_), "copy rows");
  std::memcpy(to, from, bytes);
  return ncclSuccess;
}

ncclResult_t Place::fill(void* to, unsigned char value, size_t bytes) const {
  if (bytes == 0) return ncclSuccess;
  if (device::names(to)) return done(device::fill(to, value, bytes, stream_), "fill rows");
  std::memset(to, value, bytes);
  return ncclSuccess;
}

ncclResult_t Place::put_counts(const Tensor& to, const std::vector<int64_t>& counts) const {
  if (to.type == ncclInt64) return put(to.data, counts.data(), counts.size() * sizeof(int64_t));
  const std::vector<int32_t> narrow(counts.begin(), counts.end());
  return put(to.data, narrow.data(), narrow.size() * sizeof(int32_t));
}

ncclResult_t Scratch::take(const char* function, const Place& at, size_t bytes, void** out) {
  bytes = std::max<size_t>(bytes, 1);
  const bool captures = at.on_device() && device::captures(at.stream());
  if (bytes > bytes_ || at.on_device() != on_device_) {
    if (captures)
      return fail(ncclInvalidUsage, std::string(function) + ": the stream is being captured, and the handle needs " +
                                        std::to_string(bytes) +
                                        " bytes for rows in between, more than it has: make such a call before the "
                                        "capture");
    release(at.stream());
    on_device_ = at.on_device();
    if (!on_device_) {
      data_ = std::malloc(bytes);
    } else if (alloc_.alloc_fn != nullptr) {
      if (alloc_.alloc_fn(&data_, bytes, alloc_.context) != 0) data_ = nullptr;
    } else {
      data_ = device::allocate_on(bytes, at.stream());
    }
    if (data_ == nullptr)
      return fail(ncclSystemError, std::string(function) + ": there are no " + std::to_string(bytes) + " bytes of " +
                                       (on_device_ ? "device" : "host") + " memory for rows in between");
    bytes_ = bytes;
  }
  captured_ |= captures;
  *out = data_;
  return ncclSuccess;
}

Scratch::~Scratch() {
  last_use_.wait();  // the streams may be gone, so none of them can order this
  captured_ = false;
  release(nullptr);
  for (void* const memory : of_graphs_) give_back(memory, nullptr);
}

void Scratch::release(cudaStream_t stream) {
  if (data_ == nullptr) return;
  if (captured_)
    of_graphs_.push_back(data_);
  else if (on_device_)
    give_back(data_, stream);
  else
    std::free(data_);
  data_ = nullptr;
  bytes_ = 0;
  captured_ = false;
}

void Scratch::give_back(void* device_memory, cudaStream_t stream) {
  if (alloc_.free_fn == nullptr) {
    (void)device::release_on(device_memory, stream);
    return;
  }
  last_use_.wait();
  (void)alloc_.free_fn(device_memory, alloc_.context);
}

}  // namespace moeccl::shim::ep
