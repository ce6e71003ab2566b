// SPDX-License-Identifier: Apache-2.0
// What a MoE layer needs of a communicator. An interface, so that layers are tested on hosts without one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "kernels/table.h"
#include "moeccl/comm.h"
#include "src/base/status.h"
#include "src/driver/cuda.h"
#include "src/exec/operation.h"
#include "src/moe/creation.h"
#include "src/plan/levels.h"
#include "src/plan/profile.h"

namespace moeccl::exec {
class StreamEngine;
class PersistentKernel;
}  // namespace moeccl::exec

namespace moeccl::comm {

class MoeHost {
 public:
  virtual ~MoeHost() = default;

  virtual uint32_t rank() const = 0;
  virtual uint32_t n_ranks() const = 0;
  virtual const plan::LevelTree& tree() const = 0;
  // Under which plans are priced; the same on all ranks.
  virtual const plan::Profile& profile() const {
    static const plan::Profile defaults;
    return defaults;
  }
  virtual bool paced() const = 0;
  virtual bool deterministic() const = 0;
  virtual uint64_t staging_bytes() const = 0;  // the budget of one operation on a rank

  // For collective calls: the same on all ranks that make these in the same order, and never the same again.
  virtual uint64_t next_number() { return 0; }

  // Blocking. all: [n_ranks][bytes].
  virtual Status all_gather(const void* mine, size_t bytes, void* all) = 0;
  // Blocking. Blocks are contiguous in rank order on both sides; the sizes are known on both.
  virtual Status all_to_all_v(const void* send, const size_t* send_bytes, void* recv, const size_t* recv_bytes) = 0;

  // Runs a dispatch or combine: everything but what the communicator knows is filled in, and all that it points to
  // lives until it has run. With a stream returns at once. *captured is set when it became part of a graph.
  virtual Status run(std::unique_ptr<exec::Operation> op, moecclStream_t stream, bool* captured = nullptr) = 0;

  // Where routings of choices in device memory are computed; null: the host reads `choices`.
  virtual exec::StreamEngine* engine_for(const void* choices) {
    (void)choices;
    return nullptr;
  }
  // The persistent kernel; null: there is none, or it cannot hold `staging_bytes` for one operation.
  virtual exec::PersistentKernel* kernel(uint64_t staging_bytes) {
    (void)staging_bytes;
    return nullptr;
  }
  virtual bool is_device_memory(const void* pointer) const {
    (void)pointer;
    return false;
  }
  // A CUDA stream that takes kernels as they are; others are refused with a sentence.
  struct OnStream {
    driver::cuda::Stream stream = nullptr;
    bool captured = false;
    const exec::StreamEngine* engine = nullptr;
  };
  virtual Result<OnStream> on_stream(moecclStream_t stream) {
    (void)stream;
    return error(moecclUnsupported, "there is no CUDA memory here");
  }
  // In the stream's order, on the persistent kernel; recv: [n_ranks][bytes]. Both in device memory.
  virtual Status all_gather_on(const void* send, void* recv, size_t bytes, moecclStream_t stream) {
    (void)send, (void)recv, (void)bytes, (void)stream;
    return error(moecclUnsupported, "there is no CUDA memory here");
  }
  // Says why not when the stream is being captured: for what needs the host in the middle.
  virtual Status needs_host(moecclStream_t stream) {
    (void)stream;
    return {};
  }
  // Waits until nothing of this rank is under way.
  virtual void wait_idle() {}

  // Calls body with the kernels for the memory that `buffer` lies in; they have run when it returns.
  using WithKernels = std::function<void(const kernels::KernelTable& table, bool on_device)>;
  virtual Status with_kernels(const void* buffer, const WithKernels& body) {
    (void)buffer;
    body(kernels::best(), false);
    return {};
  }
};

// gather_answers() over a host.
template <class Answer>
Result<std::vector<Answer>> answers_of(MoeHost& host, const Answer& mine, const Status& own, const std::string& what) {
  const auto all_gather = [&](const void* from, size_t bytes, void* to) { return host.all_gather(from, bytes, to); };
  return gather_answers(host.n_ranks(), all_gather, mine, own, what);
}

}  // namespace moeccl::comm
