// One page for a person: what was found here, what limits there are, which transport each pair of ranks would use and
// why not a better one, each problem with its fix. Facts come in as arguments, so that every page can be tested.
#pragma once

#include <string>
#include <vector>

#include "src/driver/limits.h"
#include "topology/discover.h"

namespace moeccl::topology {

enum class Verdict : uint8_t { kGood, kNote, kProblem };

struct Finding {
  Verdict verdict = Verdict::kGood;
  std::string section;  // "found", "limits", "network", "gpus"
  std::string what;
  std::string fix;  // what to do; "" when nothing
};

// What a pair of ranks of one host have in common.
struct PairFacts {
  bool same_process = false;
  bool reads_allowed = false;  // process_vm_readv
  bool gpus = false;           // both sit on GPUs
  bool nvlink = false, peer_access = false, same_gpu = false;
};
struct TransportChoice {
  std::string transport;
  std::string why_not_better;  // "" when there is no better one here
};
// The rule by which src/comm/connect.cc chooses, in words.
TransportChoice choose_transport(const PairFacts& facts);

struct DoctorFacts {
  const Discovery* discovery = nullptr;
  const driver::HostLimits* limits = nullptr;
  uint32_t n_ranks = 0;         // 0: one for each GPU, or each core
  bool reads_disabled = false;  // MOECCL_NO_CMA=1
};
std::vector<Finding> examine(const DoctorFacts& facts);
std::string doctor_page(const DoctorFacts& facts);

}  // namespace moeccl::topology
