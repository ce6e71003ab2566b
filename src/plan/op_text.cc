#include "src/plan/op_text.h"

#include <array>
#include <cstddef>

namespace moeccl::plan {

const char* op_text(moecclOp_t op) {
  static constexpr std::array<const char*, MOECCL_NUM_OPS> kNames = {
      "AllReduce",       "Reduce",           "Broadcast",    "AllGather",    "ReduceScatter",  "AllToAll",
      "AllToAllv",       "Gather",           "Scatter",      "SendRecv",     "Dispatch",       "Combine",
      "ExpertAllReduce", "CollectGradients", "PlaceWeights", "ExpertGather", "TensorAllToAll", "ExpertReduce"};
  return static_cast<size_t>(op) < kNames.size() ? kNames[static_cast<size_t>(op)] : "unknown operation";
}

}  // namespace moeccl::plan
