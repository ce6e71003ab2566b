#include "src/comm/moe_channel.h"

#include <memory>
#include <vector>

#include "src/comm/collective.h"
#include "src/comm/group.h"
#include "src/comm/split.h"

namespace moeccl::comm {
Status MoeChannel::all_gather(const void* mine, size_t bytes, void* all) {
  return all_gather_bytes(comm_, mine, bytes, all);
}

Status MoeChannel::all_to_all_v(const void* send, const size_t* send_bytes, void* recv, const size_t* recv_bytes) {
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

Status MoeChannel::run(const Run& run, moecclStream_t stream_handle, double* measured_us) {
  MOECCL_TRY(comm_.usable());
  Stream* stream = nullptr;
  MOECCL_TRY(find_stream_(stream_handle, &stream));
  if (Group::of_this_thread().open()) {
    return error(
        moecclInvalidUsage,
        "dispatch and combine cannot be part of a group: call them outside moecclGroupStart and moecclGroupEnd");
  }
  auto op = std::make_shared<exec::Operation>();
  op->signature.op = run.op;
  op->signature.type = run.type;
  op->signature.plan = run.plan_hash;
  op->choice = {run.program, run.binding.chunking, run.algorithm, run.plan_hash};
  op->binding = run.binding;
  op->input = run.in;
  op->output = run.out;
  op->element_bytes = run.binding.element_bytes;
  op->grouped = run.grouped;
  op->priority = comm_.priority_of(run.op);
  op->scales = {run.scales.in, run.scales.out, run.scales.bytes};
  Communicator* comm = &comm_;
  MOECCL_TRY(comm->place(run.in, run.out, &op->cuda));
  if (run.scales.bytes > 0) {
    bool scales_on_device = false;
    const bool any = run.in != nullptr || run.out != nullptr;
    MOECCL_TRY(comm->place(run.scales.in, run.scales.out, &scales_on_device));
    if (any && (run.scales.in != nullptr || run.scales.out != nullptr) && scales_on_device != op->cuda) {
      return error(moecclInvalidArgument, "rows are {} memory and their scales {} memory: give both of one kind",
                   op->cuda ? "CUDA" : "host", scales_on_device ? "CUDA" : "host");
    }
  }
  if (stream != nullptr) MOECCL_TRY(stream->ready());
  const uint64_t ticket = comm->take_ticket();
  if (stream == nullptr) return comm->run_in_turn(ticket, *op, measured_us);
  return stream->enqueue([comm, ticket, op, measured_us] { return comm->run_in_turn(ticket, *op, measured_us); });
}

exec::StreamEngine* MoeChannel::engine_for(const void* choices) {
  return comm_.is_device_memory(choices) ? &comm_.cuda()->engine() : nullptr;
}

Status MoeChannel::with_kernels(const void* buffer, const WithKernels& body) {
  if (!comm_.is_device_memory(buffer)) return MoeHost::with_kernels(buffer, body);
  // In its turn: the engine is the proxy's while an operation runs.
  return comm_.run_on_device(comm_.take_ticket(), [&](const kernels::KernelTable& table) { body(table, true); });
}

}  // namespace moeccl::comm
