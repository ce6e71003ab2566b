// SPDX-License-Identifier: Apache-2.0
// What a MoE layer needs from a communicator. It is an interface, so that layers can be tested on hosts without one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>

#include "kernels/table.h"
#include "moeccl/comm.h"
#include "src/base/status.h"
#include "src/driver/cuda.h"
#include "src/exec/operation.h"
#include "src/exec/runner.h"
#include "src/moe/creation.h"
#include "src/plan/levels.h"
#include "src/plan/profile.h"

namespace moeccl::exec {
class StreamEngine;
class PersistentKernel;
}  // namespace moeccl::exec

namespace moeccl::comm {

class Stream;

class MoeHost {
 public:
  virtual ~MoeHost() = default;

  virtual uint32_t rank() const = 0;
  virtual uint32_t n_ranks() const = 0;
  virtual const plan::LevelTree& tree() const = 0;
  // The profile that prices plans; it is the same on all ranks.
  virtual std::shared_ptr<const plan::Profile> profile() const = 0;
  virtual bool paced() const = 0;
  virtual bool deterministic() const = 0;
  virtual uint64_t staging_bytes() const = 0;  // the staging of one operation on a rank

  // Returns a number for a collective call. Ranks that make these calls in the same order get the same number, and no
  // number comes twice.
  virtual uint64_t next_number() = 0;

  // Blocks. all: [n_ranks][bytes].
  virtual Status all_gather(const void* mine, size_t bytes, void* all) = 0;
  // Blocks. send, recv: [n_ranks][bytes].
  virtual Status all_to_all(const void* send, size_t bytes, void* recv) = 0;
  // Blocks. Blocks are contiguous in rank order on both sides, and both sides know the sizes.
  virtual Status all_to_all_v(const void* send, const size_t* send_bytes, void* recv, const size_t* recv_bytes) = 0;

  // The buffers of a dispatch or combine, and whether its lists are in device memory too.
  struct RowBuffers {
    const void *in = nullptr, *out = nullptr;
    exec::Operation::Scales scales = {};
    bool tables = false;
    bool reads = true, writes = true;  // false: the buffer has no rows on this rank

    // Returns the buffers of a dispatch or combine on a rank with n_tokens tokens and n_rows rows.
    static RowBuffers of(moecclOp_t kind, const void* in, const void* out, uint64_t n_tokens, uint64_t n_rows) {
      const bool dispatches = kind == moecclOpDispatch;
      return {in, out, {}, false, (dispatches ? n_tokens : n_rows) > 0, (dispatches ? n_rows : n_tokens) > 0};
    }
  };
  // Where an operation runs. By default in the host's memory, without streams.
  struct Place {
    exec::Runner* runner = nullptr;
    Stream* stream = nullptr;
    bool on_kernel() const { return runner != nullptr && runner->kernel() != nullptr; }
  };
  virtual Result<Place> place(const RowBuffers& buffers, Stream* stream) = 0;
  // Runs a dispatch or combine. The caller has filled in everything except what the communicator knows, and keeps alive
  // all that the operation points to until it has run. With a stream, the call returns at once. Sets *captured when the
  // operation became part of a graph.
  virtual Status run(std::unique_ptr<exec::Operation> op, const Place& place, bool* captured = nullptr) = 0;

  // Ends the operation that the peers of a rank wait for, when the rank has failed before its own.
  virtual void break_off(const Status& why) = 0;

  // Returns the engine that computes routings of choices in device memory; null: the host reads `choices`.
  virtual exec::StreamEngine* engine_for(const void* choices) = 0;
  // Returns the persistent kernel; null: there is none.
  virtual exec::PersistentKernel* kernel() = 0;
  virtual bool is_device_memory(const void* pointer) const = 0;
  // Returns an error if a pointer is to CUDA memory that neither the host nor an engine can read.
  virtual Status check_reach(std::initializer_list<const void*> pointers) const = 0;
  // A CUDA stream on which kernels can be launched directly. Other streams get an error that says why.
  struct OnStream {
    driver::cuda::Stream stream = nullptr;
    bool captured = false;
    const exec::StreamEngine* engine = nullptr;
  };
  virtual Result<OnStream> on_stream(Stream* stream) = 0;
  // Gathers in the stream's order, on the persistent kernel. recv: [n_ranks][bytes]. Both buffers are in device memory.
  virtual Status all_gather_on(const void* send, void* recv, size_t bytes, Stream* stream) = 0;
  // Returns an error when the stream is being captured. Called before operations that need the host in the middle.
  virtual Status needs_host(Stream* stream) = 0;
  // Returns the failure that has ended the communicator, if there is one.
  virtual Status usable() = 0;
  // Waits until this rank has nothing in flight.
  virtual void wait_idle() = 0;

  // A buffer that a call reads or writes, or null. The error of on_device() names it.
  struct Buffer {
    const char* name = "";
    const void* at = nullptr;
  };
  // Returns whether the device's kernels work on these buffers of the call `what`; otherwise the host's do. Buffers of
  // different kinds of memory are an error.
  virtual Result<bool> on_device(const char* what, std::initializer_list<Buffer> buffers) const = 0;
  // Calls `body` with the kernels of the device or of the host; they have run when this returns.
  using WithKernels = std::function<void(const kernels::KernelTable& table)>;
  virtual Status with_kernels(bool on_device, const WithKernels& body) = 0;
};

// gather_answers() over a host.
template <class Answer>
Result<std::vector<Answer>> answers_of(MoeHost& host, const Answer& mine, const Status& own, const std::string& what) {
  const auto all_gather = [&](const void* from, size_t bytes, void* to) { return host.all_gather(from, bytes, to); };
  return gather_answers(host.n_ranks(), all_gather, mine, own, what);
}

}  // namespace moeccl::comm
