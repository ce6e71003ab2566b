// SPDX-License-Identifier: Apache-2.0
// Presents a communicator as the host of MoE layers.
#pragma once

#include <functional>
#include <memory>
#include <mutex>

#include "src/comm/communicator.h"
#include "src/comm/stream.h"
#include "src/moe/moe_host.h"

namespace moeccl::comm {

class CommunicatorHost final : public MoeHost {
 public:
  explicit CommunicatorHost(Communicator& comm) : comm_(comm) {}

  Communicator& communicator() const { return comm_; }
  uint32_t rank() const override { return comm_.rank(); }
  uint32_t n_ranks() const override { return comm_.n_ranks(); }
  const plan::LevelTree& tree() const override { return comm_.tree(); }
  // On CUDA memory, rows move at a device's rates over the communicator's links.
  std::shared_ptr<const plan::Profile> profile() const override;
  bool paced() const override { return comm_.paced(); }
  bool deterministic() const override { return comm_.config().deterministic; }
  uint64_t staging_bytes() const override { return comm_.operation_staging_bytes(); }
  uint64_t next_number() override { return comm_.next_number(); }
  Status all_gather(const void* mine, size_t bytes, void* all) override;
  Status all_to_all(const void* send, size_t bytes, void* recv) override;
  Status all_to_all_v(const void* send, const size_t* send_bytes, void* recv, const size_t* recv_bytes) override;
  Result<Place> place(const RowBuffers& buffers, Stream* stream) override;
  Status run(std::unique_ptr<exec::Operation> op, const Place& place, bool* captured) override;
  void break_off(const Status& why) override;
  exec::StreamEngine* engine_for(const void* choices) override;
  exec::PersistentKernel* kernel() override;
  bool is_device_memory(const void* pointer) const override { return comm_.is_device_memory(pointer); }
  Status check_reach(std::initializer_list<const void*> pointers) const override { return comm_.check_reach(pointers); }
  Result<OnStream> on_stream(Stream* stream) override;
  Status all_gather_on(const void* send, void* recv, size_t bytes, Stream* stream) override;
  Status needs_host(Stream* stream) override;
  Status usable() override { return comm_.usable(); }
  void wait_idle() override { comm_.wait_idle(); }
  Result<bool> on_device(const char* what, std::initializer_list<Buffer> buffers) const override;
  Status with_kernels(bool on_device, const WithKernels& body) override;

 private:
  Communicator& comm_;
  // If all ranks of the communicator have CUDA memory: what profile() has made, and from which profile.
  mutable std::mutex mutex_;
  mutable std::shared_ptr<const plan::Profile> profile_of_host_, profile_of_device_;
};

}  // namespace moeccl::comm
