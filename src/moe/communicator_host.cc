// SPDX-License-Identifier: Apache-2.0
#include "src/moe/communicator_host.h"

#include <memory>
#include <utility>
#include <vector>

#include "src/comm/collective.h"
#include "src/comm/cuda_stream.h"
#include "src/comm/group.h"
#include "src/comm/split.h"
#include "src/plan/hardware.h"

namespace moeccl::comm {

std::shared_ptr<const plan::Profile> CommunicatorHost::profile() const {
  std::shared_ptr<const plan::Profile> host = comm_.selector().profile();
  if (comm_.cuda() == nullptr) return host;
  const std::lock_guard lock(mutex_);
  if (host == profile_of_host_) return profile_of_device_;
  // Dispatch and combine run on the persistent kernel where the communicator has one.
  plan::Profile profile = (comm_.kernel() != nullptr ? plan::kernel_hardware() : plan::stream_hardware()).profile;
  profile.links = host->links;
  profile.all_to_all = host->all_to_all;
  profile.host_level = host->host_level;
  profile.links_source = host->source;
  profile_of_host_ = std::move(host);
  return profile_of_device_ = std::make_shared<const plan::Profile>(std::move(profile));
}

Status CommunicatorHost::all_gather(const void* mine, size_t bytes, void* all) {
  return all_gather_bytes(comm_, mine, bytes, all);
}

Status CommunicatorHost::all_to_all(const void* send, size_t bytes, void* recv) {
  const Communicator::OwnExchange own(comm_);
  return run_collective(comm_,
                        {.op = moecclOpAllToAll, .send = send, .recv = recv, .count = bytes, .type = moecclUint8});
}

Status CommunicatorHost::all_to_all_v(const void* send, const size_t* send_bytes, void* recv,
                                      const size_t* recv_bytes) {
  const Communicator::OwnExchange own(comm_);
  const uint32_t n = comm_.n_ranks();
  std::vector<size_t> send_at(n, 0), recv_at(n, 0);
  for (uint32_t r = 1; r < n; ++r) {
    send_at[r] = send_at[r - 1] + send_bytes[r - 1];
    recv_at[r] = recv_at[r - 1] + recv_bytes[r - 1];
  }
  return run_collective(comm_, {.op = moecclOpAllToAllv,
                                .send = send,
                                .recv = recv,
                                .type = moecclUint8,
                                .send_counts = send_bytes,
                                .send_displs = send_at.data(),
                                .recv_counts = recv_bytes,
                                .recv_displs = recv_at.data()});
}

Result<MoeHost::Place> CommunicatorHost::place(const RowBuffers& buffers, Stream* stream) {
  MOECCL_TRY(comm_.usable());
  MOECCL_TRY(outside_groups("a dispatch or combine"));
  Place at{.stream = stream};
  const void *const in = buffers.reads ? buffers.in : nullptr, *const out = buffers.writes ? buffers.out : nullptr;
  if (in == nullptr && out == nullptr) comm_.hint(buffers.in, buffers.out);
  MOECCL_ASSIGN_OR_RETURN(at.runner, comm_.place(in, out));
  if (const auto& scales = buffers.scales; scales.input != nullptr || scales.output != nullptr) {
    MOECCL_ASSIGN_OR_RETURN(const exec::Runner* theirs, comm_.place(scales.input, scales.output));
    if ((in != nullptr || out != nullptr) && theirs != at.runner) {
      return error(moecclInvalidArgument, "rows are {} memory and their scales {} memory: give both of one kind",
                   at.runner->on_device() ? "CUDA" : "host", theirs->on_device() ? "CUDA" : "host");
    }
  }
  if (buffers.tables && at.runner->on_device()) at.runner = &comm_.cuda()->kernel_side()->runner();
  return at;
}

Status CommunicatorHost::run(std::unique_ptr<exec::Operation> op, const Place& place, bool* captured) {
  Call call{.comm = &comm_, .stream = place.stream};
  op->runner = place.runner;
  op->priority = comm_.priority_of(op->signature.op);
  if (op->rows.in_tables_alone && !op->on_device()) {
    return error(moecclInvalidUsage,
                 "the routing's last update was on a stream, so only CUDA memory can follow it: give buffers there, or "
                 "update it with moecclRoutingUpdate");
  }
  bool in_graph = false;
  if (const CudaStream* cuda = call.stream != nullptr ? call.stream->as_cuda() : nullptr;
      cuda != nullptr && place.on_kernel()) {
    MOECCL_ASSIGN_OR_RETURN(in_graph, cuda->capturing());
  }
  call.operation = std::move(op);
  MOECCL_TRY(issue(std::move(call)));
  if (in_graph && captured != nullptr) *captured = true;
  return {};
}

void CommunicatorHost::break_off(const Status& why) { comm_.break_off(why); }

exec::PersistentKernel* CommunicatorHost::kernel() { return comm_.kernel(); }

Result<MoeHost::OnStream> CommunicatorHost::on_stream(Stream* stream) {
  MOECCL_TRY(comm_.usable());
  CudaStream* cuda = stream != nullptr ? stream->as_cuda() : nullptr;
  if (cuda == nullptr)
    return error(moecclInvalidArgument,
                 "update on a stream: stream is not a CUDA stream: give one, or call moecclRoutingUpdate");
  MOECCL_TRY(outside_groups("an update on a stream"));
  OnStream on;
  on.stream = cuda->stream();
  on.engine = &comm_.cuda()->engine();
  MOECCL_ASSIGN_OR_RETURN(on.captured, cuda->capturing());
  return on;
}

Status CommunicatorHost::all_gather_on(const void* send, void* recv, size_t bytes, Stream* stream) {
  Call call{.comm = &comm_, .stream = stream, .operation = std::make_unique<exec::Operation>()};
  MOECCL_TRY(or_break_off(
      comm_, stream,
      prepare_collective(comm_,
                         {.op = moecclOpAllGather, .send = send, .recv = recv, .count = bytes, .type = moecclUint8},
                         *call.operation)));
  if (call.operation->runner->kernel() == nullptr) {
    return error(
        moecclUnsupported,
        "all ranks' choices are {} bytes, more than MOECCL_CUDA_PERSISTENT_BYTES allows the persistent kernel: "
        "raise it, or call moecclRoutingUpdate",
        bytes * comm_.n_ranks());
  }
  return issue(std::move(call));
}

Status CommunicatorHost::needs_host(Stream* stream) { return stream != nullptr ? stream->ready() : Status(); }

exec::StreamEngine* CommunicatorHost::engine_for(const void* choices) {
  return comm_.is_device_memory(choices) ? &comm_.cuda()->engine() : nullptr;
}

Result<bool> CommunicatorHost::on_device(const char* what, std::initializer_list<Buffer> buffers) const {
  const Buffer *device = nullptr, *ordinary = nullptr;
  for (const Buffer& b : buffers) {
    if (b.at == nullptr) continue;
    if (comm_.cuda() == nullptr) {
      MOECCL_TRY(comm_.check_reach({b.at}).with_context(format("{}: {}", what, b.name)));
      continue;
    }
    const driver::cuda::Pointed at = driver::cuda::pointed(b.at);
    if (at.on_device()) device = &b;
    if (at.type == 0) ordinary = &b;
  }
  if (device != nullptr && ordinary != nullptr)
    return error(moecclInvalidArgument,
                 "{}: {} is CUDA memory and {} is ordinary host memory: give buffers of one kind (page-locked memory "
                 "goes with both)",
                 what, device->name, ordinary->name);
  return device != nullptr;
}

Status CommunicatorHost::with_kernels(bool on_device, const WithKernels& body) {
  if (!on_device) return body(kernels::best()), Status();
  // The kernels run in their turn, because the engine belongs to the proxy while an operation runs.
  return comm_.run_on_device(comm_.take_ticket(), body);
}

}  // namespace moeccl::comm
