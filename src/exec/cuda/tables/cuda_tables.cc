// SPDX-License-Identifier: Apache-2.0
#include "src/exec/cuda/tables/cuda_tables.h"

#include <cstring>

#include "src/driver/thread.h"
#include "src/exec/cuda/cuda_routing.h"
#include "src/exec/cuda/urgent_stream.h"

namespace moeccl::exec {

namespace cuda = driver::cuda;
using namespace moeccl::cuda;

namespace {

constexpr size_t kThreads = 256, kWarp = 32;

}  // namespace

Result<std::unique_ptr<CudaTables>> CudaTables::create(cuda::Context context, const TablePlan::Layer& setting,
                                                       size_t candidate) {
  std::unique_ptr<CudaTables> t(new CudaTables(setting, candidate));
  const cuda::Current current(context);
  t->context_ = context;
  const std::vector<std::byte>& constants = t->plan_.constants();
  MOECCL_ASSIGN_OR_RETURN(t->memory_, cuda::Memory::device(context, t->plan_.bytes()));
  MOECCL_ASSIGN_OR_RETURN(const cuda::Memory staged, cuda::Memory::pinned(context, constants.size()));
  std::memcpy(staged.data(), constants.data(), constants.size());
  MOECCL_ASSIGN_OR_RETURN(t->made_, cuda::make_event());
  MOECCL_ASSIGN_OR_RETURN(const cuda::StreamOwner stream, create_urgent_stream(context));
  constexpr const char* kWhat = "a plan's tables to the device";
  MOECCL_TRY(cuda::copy(t->memory_.data(), staged.data(), constants.size(), stream.get(), kWhat));
  MOECCL_TRY(cuda::synchronize(stream.get(), kWhat));
  return t;
}

CudaTables::~CudaTables() {
  if (made_ != nullptr) wait();
}

void CudaTables::wait() const {
  const cuda::Current current(context_);
  while (cuda::driver()->cuEventQuery(made_.get()) == cuda::kNotReady) driver::sleep_ns(20'000);
}

Status CudaTables::pack(const StreamEngine& engine, cuda::Stream stream, const StreamChoices& choices) {
  const cuda::Current current(context_);
  std::byte* base = memory_.data();
  TableOwnKernelArgs own = plan_.own(base);
  own.topk = choices.index;
  own.weight = choices.weight;
  own.n_tokens = choices.counted;
  own.most_tokens = choices.n_tokens;
  const auto n = static_cast<uint32_t>(choices.n_tokens);
  MOECCL_TRY(engine.launch_on(stream, "moeccl_table_take", &own, size_t{n} * own.top_k));
  MOECCL_TRY(launch_route_order(engine, stream, plan_.order(base, n), plan_.lists(base, n), plan_.drop(base)));
  return engine.launch_on(stream, "moeccl_table_pack", &own, n);
}

Status CudaTables::make(const StreamEngine& engine, cuda::Stream stream, bool captured, bool weighted,
                        const Target& target) {
  const cuda::Current current(context_);
  TablesKernelArgs a = plan_.tables(memory_.data());
  a.weighted = weighted ? 1 : 0;
  a.head = target.head;
  a.counts = target.counts;
  a.expert_offsets = target.expert_offsets;
  a.expert_counts = target.expert_counts;
  MOECCL_TRY(engine.launch_on(stream, "moeccl_table_count", &a, size_t{plan_.n_tiles()} * kWarp));
  MOECCL_TRY(engine.launch_on(stream, "moeccl_table_scan", &a, size_t{plan_.n_counters()} * kThreads));
  MOECCL_TRY(engine.launch_on(stream, "moeccl_table_blocks", &a, size_t{a.is.n_sources} * a.is.n_chunks));
  MOECCL_TRY(engine.launch_on(stream, "moeccl_table_fill", &a, size_t{plan_.n_tiles()} * kWarp));
  if (captured) return {};
  return cuda::check(cuda::driver()->cuEventRecord(made_.get(), stream), "a routing's update on a stream");
}

}  // namespace moeccl::exec
