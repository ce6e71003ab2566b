// SPDX-License-Identifier: Apache-2.0
#include "transport/cuda_ipc/cuda_link.h"

#include <utility>

#include "src/driver/cuda/idle.h"

namespace moeccl::transport::cuda_ipc {

namespace cuda = driver::cuda;

Opened& Opened::operator=(Opened&& other) noexcept {
  std::swap(context_, other.context_);
  std::swap(data_, other.data_);
  std::swap(virtual_, other.virtual_);
  return *this;
}

Opened Opened::of(cuda::VirtualMemory memory) {
  Opened o;
  o.virtual_ = std::move(memory);
  return o;
}

Opened::~Opened() {
  if (data_ == nullptr) return;
  // The owner of the memory may free it next.
  cuda::soon_idle(context_,
                  [data = data_] { (void)cuda::driver()->cuIpcCloseMemHandle(reinterpret_cast<cuda::Pointer>(data)); });
}

Result<Opened> Opened::open(cuda::Context context, const cuda::IpcHandle& handle) {
  constexpr unsigned kLazyPeerAccess = 1;
  const cuda::Current current(context);
  cuda::Pointer p = 0;
  MOECCL_TRY(cuda::check(cuda::driver()->cuIpcOpenMemHandle_v2(&p, handle, kLazyPeerAccess),
                         "opening a peer's device memory"));
  Opened o;
  o.context_ = context;
  o.data_ = reinterpret_cast<std::byte*>(p);
  return o;
}

Result<cuda::IpcHandle> export_memory(cuda::Context context, const std::byte* data) {
  const cuda::Current current(context);
  cuda::IpcHandle handle{};
  MOECCL_TRY(cuda::check(cuda::driver()->cuIpcGetMemHandle(&handle, reinterpret_cast<cuda::Pointer>(data)),
                         "exporting device memory to other processes"));
  return handle;
}

CudaLink::CudaLink(std::unique_ptr<Link> words, CudaPeer peer) : words_(std::move(words)), peer_(std::move(peer)) {
  peer_words_ = {&words_->board(), {&words_->block(0), &words_->block(1)}};
  // The view has no outboxes, because those are for the host.
  view_.staging = peer_.staging;
  view_.messages = words_->view().staging;
  view_.same_process = peer_.direct;
  view_.signals = words_->view().signals;
}

Result<PutState> CudaLink::put(uint64_t offset, const void* src, size_t bytes) {
  MOECCL_TRY(cuda::check(cuda::driver()->cuMemcpyAsync(reinterpret_cast<cuda::Pointer>(peer_.staging + offset),
                                                       reinterpret_cast<cuda::Pointer>(src), bytes, peer_.stream),
                         "a copy into a peer's staging"));
  return PutState::kDone;
}

Status CudaLink::signal(uint32_t sig, uint32_t number, uint32_t tag) {
  // The stream's store is preceded by a system-wide fence. It pairs with the acquire load of `word` in
  // Execution::wait() on the peer's proxy, which launches the reader of the data only then.
  const SignalLine* line = &view_.signals[sig];
  return cuda::check(cuda::driver()->cuStreamWriteValue64_v2(peer_.stream, reinterpret_cast<cuda::Pointer>(&line->word),
                                                             static_cast<uint64_t>(tag) << 32 | number, 0),
                     "a signal from the stream");
}

}  // namespace moeccl::transport::cuda_ipc
