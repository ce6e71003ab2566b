// SPDX-License-Identifier: Apache-2.0
// Writes one page for a person: what was found here, what limits there are, which transport each pair of ranks would
// use and why not a better one, and each problem with its fix. Facts are arguments, so that every page can be tested.
#pragma once

#include <string>
#include <vector>

#include "src/driver/limits.h"
#include "topology/discover.h"
#include "topology/pair_path.h"

namespace moeccl::topology {

enum class Verdict : uint8_t { kGood, kNote, kProblem };

struct Finding {
  Verdict verdict = Verdict::kGood;
  std::string section;  // "settings", "found", "limits", "network", "gpus"
  std::string what;
  std::string fix;  // what to do; "" if nothing
};

// What a pair of ranks have in common.
struct PairFacts {
  PathFacts path;
  bool gpus = false;  // both sit on GPUs
  bool nvlink = false, peer_access = false, same_gpu = false;
  std::string network = {};    // between hosts: "tcp over eth0 (25 Gbit/s)"
  std::string gpudirect = {};  // between hosts: how NICs reach CUDA memory ("dma-buf"); "": they do not
};
struct TransportChoice {
  std::string transport;
  std::string why_not_better;  // "" if there is no better one here
};
// Returns path_between() in words.
TransportChoice choose_transport(const PairFacts& facts);

// What this host knows of a network.
struct NetworkFacts {
  std::string name;  // "tcp"
  bool usable = false;
  std::string text;            // "eth0 (25 Gbit/s)", or why it cannot be used
  bool device_memory = false;  // its NICs may reach CUDA memory
  std::string can = {};        // "keeps the order of puts, can encrypt"
};

struct DoctorFacts {
  const Discovery* discovery = nullptr;
  const driver::HostLimits* limits = nullptr;
  uint32_t n_ranks = 0;                     // 0: one for each GPU, or for each core
  bool reads_disabled = false;              // MOECCL_NO_CMA=1
  std::vector<NetworkFacts> networks = {};  // to ranks of other hosts, best first
  std::vector<Status> bad_settings = {};    // what MOECCL_ variables say that no communicator can be made with
};
std::vector<Finding> examine(const DoctorFacts& facts);
std::string doctor_page(const DoctorFacts& facts);

}  // namespace moeccl::topology
