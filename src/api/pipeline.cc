// SPDX-License-Identifier: Apache-2.0
// Entry points of pipeline.h, except for the exchange itself, which is in collectives.cc.
#include "moeccl/pipeline.h"

#include <algorithm>

#include "src/api/convert.h"
#include "src/base/adopt.h"
#include "src/comm/collective.h"

using namespace moeccl;
using comm::Communicator;

moecclResult_t moecclTensorGroups(moecclComm_t handle, moecclTensorGroups_t* groups) {
  return api::with_comm<api::kLocal>(handle, [&](Communicator& c) -> Status {
    MOECCL_TRY(check_out(groups, "groups"));
    const std::vector<uint32_t> of = c.tree().tensor_groups();
    const uint32_t mine = of[c.rank()];
    moecclTensorGroups_t g{};
    g.n_groups = static_cast<int32_t>(c.tree().n_tensor_groups());
    g.group = static_cast<int32_t>(mine);
    g.index = static_cast<int32_t>(std::count(of.begin(), of.begin() + c.rank(), mine));
    g.n_ranks = static_cast<int32_t>(std::count(of.begin(), of.end(), mine));
    give(g, groups);
    return {};
  });
}

moecclResult_t moecclPlanTimeline(moecclComm_t handle, moecclOp_t op, size_t count, moecclDataType_t type,
                                  moecclLaneSpan_t* spans, size_t max_spans, size_t* n_spans) {
  return api::with_comm<api::kLocal>(handle, [&](Communicator& c) -> Status {
    if (n_spans == nullptr) return api::null_argument("n_spans", "the address of a size_t");
    if (spans == nullptr && max_spans > 0) return api::null_argument("spans", "an array of max_spans entries");
    if (op != moecclOpTensorAllToAll)
      return error(moecclInvalidArgument, "op is {}: lanes are recorded for moecclOpTensorAllToAll",
                   static_cast<int>(op));
    const size_t bytes = moecclTypeSize(type);
    if (bytes == 0) return error(moecclInvalidArgument, "type is {}: give a moecclDataType_t", static_cast<int>(type));
    MOECCL_TRY(comm::check_count(c.tree(), op, count, bytes));
    comm::Trials::Report trial;
    MOECCL_ASSIGN_OR_RETURN(const auto cached,
                            c.selector().runs_now({op, 0, count, static_cast<uint32_t>(bytes), false, false}, &trial));
    const std::vector<exec::LaneSpan> all = cached->measured.lanes.get();
    *n_spans = all.size();
    for (size_t i = 0; i < std::min(max_spans, all.size()); ++i)
      spans[i] = {static_cast<moecclLaneKind_t>(all[i].lane), all[i].chunk, static_cast<double>(all[i].start_ns) / 1e3,
                  static_cast<double>(all[i].end_ns) / 1e3};
    return {};
  });
}
