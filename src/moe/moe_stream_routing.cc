// SPDX-License-Identifier: Apache-2.0
// A routing's update in the order of a CUDA stream, and what the device knows of a routing.
#include <algorithm>
#include <cstring>

#include "src/base/adopt.h"
#include "src/exec/cuda/persistent_kernel.h"
#include "src/moe/moe_layer.h"

namespace moeccl::comm {

using moeccl::cuda::TableCounts;

namespace {

// The layout of what moecclRoutingDeviceInfo_t points to: TableCounts, then the experts' offsets and counts.
constexpr size_t offsets_at() { return sizeof(TableCounts); }
constexpr size_t counts_at(size_t n_experts) { return offsets_at() + (n_experts + 1) * sizeof(int64_t); }

}  // namespace

std::vector<std::byte> MoeRouting::info_for_device() const {
  const size_t n = layer_.placement().n_local(layer_.host().rank());
  std::vector<std::byte> info(counts_at(n) + n * sizeof(int32_t));
  const TableCounts head{own_.n_tokens, tables_.n_rows(), tables_.n_unique()};
  std::memcpy(info.data(), &head, sizeof(head));
  if (layer_.config().shape.expert_major)
    std::memcpy(info.data() + offsets_at(), tables_.expert_offsets.data(), (n + 1) * sizeof(int64_t));
  if (n > 0) std::memcpy(info.data() + counts_at(n), tables_.expert_counts.data(), n * sizeof(int32_t));
  return info;
}

Status MoeRouting::device_info(moecclRoutingDeviceInfo_t* out) const {
  MOECCL_TRY(check_out(out, "info"));
  MOECCL_TRY(usable("routing device info"));
  MOECCL_TRY(has_device_tables());
  const std::byte* at = device_tables_->device_info();
  const size_t n = layer_.placement().n_local(layer_.host().rank());
  const auto* head = reinterpret_cast<const TableCounts*>(at);
  moecclRoutingDeviceInfo_t info{};
  info.most_rows = layer_.most_rows();
  info.n_local_experts = static_cast<int32_t>(n);
  info.n_tokens = &head->n_tokens;
  info.n_rows = &head->n_rows;
  info.n_unique = &head->n_unique;
  info.expert_counts = reinterpret_cast<const int32_t*>(at + counts_at(n));
  if (layer_.config().shape.expert_major) info.expert_offsets = reinterpret_cast<const int64_t*>(at + offsets_at());
  give(info, out);
  return {};
}

Status MoeRouting::has_device_tables() const {
  if (device_tables_ != nullptr) return {};
  return error(moecclUnsupported,
               "this communicator has no persistent kernel on CUDA memory, and so no tables there: moecclRoutingUpdate "
               "and moecclRoutingGetInfo work on the host");
}

Status MoeRouting::on_host(const char* what) const {
  MOECCL_TRY(usable(what));
  if (!on_device_) return {};
  return error(moecclInvalidUsage,
               "{}: the routing's last update was on a stream, so its arrays are on the device alone: read "
               "moecclRoutingGetDeviceInfo, or update it with moecclRoutingUpdate",
               what);
}

Status MoeRouting::check_stream_choices(const exec::StreamChoices& c) const {
  MOECCL_TRY(check_arguments(c.index, c.n_tokens));
  const MoeHost& host = layer_.host();
  const auto on_device = [&](const char* name, const void* p) -> Status {
    if (p == nullptr || host.is_device_memory(p)) return {};
    return error(moecclInvalidArgument,
                 "update on a stream: {} is not CUDA memory: give device memory, or call moecclRoutingUpdate", name);
  };
  MOECCL_TRY(on_device("topk_index", c.index));
  MOECCL_TRY(on_device("topk_weight", c.weight));
  MOECCL_TRY(on_device("n_tokens_device", c.counted));
  if (captured_ && (c.weight != nullptr) != captured_weighted_)
    return error(moecclInvalidUsage,
                 "the routing is part of a graph, captured {} weights, and is updated {}: give topk_weight as it was "
                 "then, or capture with another routing",
                 captured_weighted_ ? "with" : "without", captured_weighted_ ? "without" : "with some");
  return {};
}

// Makes room for updates with the plan of the last update by the host. All ranks call this together.
Status MoeRouting::prepare_stream_updates(driver::cuda::Context context, bool captured) {
  if (cuda_tables_ != nullptr && cuda_tables_->candidate() == chosen_) return {};
  if (captured)
    return error(
        moecclInvalidUsage,
        "the first update on a stream after moecclRoutingCreate or moecclRoutingUpdate makes room for the plan "
        "that was chosen there, which a capture cannot: call it once before the capture");
  MoeHost& host = layer_.host();
  const MoeConfig& config = layer_.config();
  const MoeCandidate& plan = *layer_.candidates()[chosen_];
  host.wait_idle();  // an allocation may wait for the device, where a peer's kernel may wait for this rank
  const Status own = [&]() -> Status {
    const exec::TablePlan::Layer setting{&plan.paths,     &plan.rank,    &config.placement, config.domains.get(),
                                         &layer_.order(), &config.shape, plan.kernel_rows,  0};
    layer_.give_back(std::move(cuda_tables_));
    cuda_tables_ = layer_.take_cuda_tables(chosen_);
    if (cuda_tables_ != nullptr) return {};
    const uint64_t bytes =
        exec::TablePlan(setting).bytes() + memory_bytes() + layer_.device_bytes(false) + plan.staging_bytes(config);
    if (config.memory_cap > 0 && bytes > config.memory_cap)
      return error(moecclOutOfMemory, "updates on a stream need {} bytes, memory_cap_bytes allows {}", bytes,
                   config.memory_cap);
    MOECCL_ASSIGN_OR_RETURN(cuda_tables_, exec::CudaTables::create(context, setting, chosen_));
    return {};
  }();
  Status all = all_ready(own, "make room for updates on a stream");
  // All ranks begin the next try together, too.
  if (!all.ok()) layer_.give_back(std::move(cuda_tables_));
  return all;
}

Status MoeRouting::update_on_stream(const exec::StreamChoices& choices, Stream* stream) {
  wait_for_readers();
  MOECCL_TRY(usable("update on a stream"));
  if (layer_.map() != nullptr)
    return error(
        moecclUnsupported,
        "update on a stream: a layer with expert swap reads its choices on the host: call moecclRoutingUpdate");
  if (layer_.config().shape.by_choice)
    return error(
        moecclUnsupported,
        "update on a stream: kernels do not put sums in the order of choices (algorithm \"flat:ordered\"): call "
        "moecclRoutingUpdate");
  MOECCL_TRY(has_device_tables());
  MoeHost& host = layer_.host();
  MOECCL_TRY(check_stream_choices(choices));
  MOECCL_ASSIGN_OR_RETURN(const MoeHost::OnStream on, host.on_stream(stream));
  MOECCL_TRY(prepare_stream_updates(on.engine->context(), on.captured));
  ++version_;
  ready_ = false;
  step_ = {};
  const size_t n = layer_.placement().n_local(host.rank());
  std::byte* info = const_cast<std::byte*>(device_tables_->device_info());
  exec::CudaTables::Target target;
  target.head = const_cast<moeccl::cuda::WalkTables*>(device_tables_->device());
  target.counts = reinterpret_cast<TableCounts*>(info);
  target.expert_offsets = reinterpret_cast<int64_t*>(info + offsets_at());
  target.expert_counts = reinterpret_cast<int32_t*>(info + counts_at(n));
  // Peers meet this rank in the AllGather and in what follows, whatever happens here.
  const auto or_break_off = [&](Status status) {
    if (!status.ok() && !on.captured) host.break_off(status);
    return status;
  };
  MOECCL_TRY(or_break_off(cuda_tables_->pack(*on.engine, on.stream, choices)));
  number_ = host.next_number();
  MOECCL_TRY(host.all_gather_on(cuda_tables_->send(), cuda_tables_->recv(), cuda_tables_->block_bytes(), stream));
  weighted_ = choices.weight != nullptr;
  MOECCL_TRY(or_break_off(cuda_tables_->make(*on.engine, on.stream, on.captured, weighted_, target)));
  if (on.captured) captured_ = true, captured_weighted_ = weighted_;
  measured_dispatch_.ns = measured_combine_.ns = 0;
  on_device_ = ready_ = true;
  return {};
}

}  // namespace moeccl::comm
