// SPDX-License-Identifier: Apache-2.0
#include "plugins/tuner/tuner.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "src/base/format.h"
#include "src/base/trusted_library.h"
#include "src/plan/profile_file.h"

namespace moeccl::tuner {
namespace {

// Prices err by about this much (docs/calibration.md): NCCL's choice stays unless another one is expected to take at
// most this part of its time.
constexpr double kWorth = 0.9;
// The same where one of the two has NCCL's cost and the other our price: then two models are compared.
constexpr double kWorthAcrossModels = 0.7;
// NCCL puts entries out of reach by a factor where they would lose precision (rings of fp8 on more than 8 ranks). Such
// an entry is one whose cost exceeds its price, compared with the other entries, by more than models differ.
constexpr double kOutOfReach = 1024, kModelsDiffer = 100;
constexpr int kMostRails = 64;

constexpr const char* kFunctionNames[kFunctions] = {"Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce"};
constexpr const char* kAlgorithmNames[kAlgorithms] = {"Tree",     "Ring", "CollNetDirect", "CollNetChain", "NVLS",
                                                      "NVLSTree", "PAT"};
constexpr const char* kProtocolNames[kProtocols] = {"LL", "LL128", "Simple"};

std::string name_of(int entry) {
  return format("{}/{}", kAlgorithmNames[entry / kProtocols], kProtocolNames[entry % kProtocols]);
}

Result<int> rails() {
  const char* text = trusted_variable("MOECCL_TUNER_RAILS");
  if (text == nullptr || *text == '\0') return 1;
  char* end = nullptr;
  const long n = std::strtol(text, &end, 10);
  if (*end != '\0' || n < 1 || n > kMostRails)
    return error(moecclInvalidArgument, "MOECCL_TUNER_RAILS={} is no number from 1 to {}", text, kMostRails);
  return static_cast<int>(n);
}

Result<std::string> read_file(const char* path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return error(moecclInvalidArgument, "it cannot be opened");
  std::string text(plan::kMaxProfileBytes + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(file.gcount()));
  if (text.size() > plan::kMaxProfileBytes)
    return error(moecclInvalidArgument, "it has more than {} bytes", plan::kMaxProfileBytes);
  return text;
}

struct Known {
  Fabric fabric;
  uint64_t hash = 0;
  bool emulated = false;
};

Result<Known> read_profile(const char* path) {
  MOECCL_ASSIGN_OR_RETURN(const int n_rails, rails());
  MOECCL_ASSIGN_OR_RETURN(const std::string text, read_file(path));
  MOECCL_ASSIGN_OR_RETURN(const plan::Profile profile, plan::read_profile(text, path));
  // The texts that the profile's reader skips, because they are for people.
  const nlohmann::json root = nlohmann::json::parse(text, nullptr, false);
  const auto said = [&](const char* name) {
    const auto at = root.find(name);
    return at != root.end() && at->is_string() ? at->get<std::string>() : std::string();
  };
  Known known;
  MOECCL_ASSIGN_OR_RETURN(known.fabric, fabric_of(profile, said("topology"), n_rails));
  known.hash = profile.hash();
  known.emulated = said("note").find("EMULATED") != std::string::npos;
  return known;
}

bool usable(float cost) { return cost >= 0 && std::isfinite(cost); }

// Returns the cheapest entry, as NCCL finds it; -1 when there is none.
template <class Cost>
int cheapest(int n, Cost cost) {
  int best = -1;
  for (int i = 0; i < n; ++i) {
    if (usable(static_cast<float>(cost(i))) && (best < 0 || cost(i) < cost(best))) best = i;
  }
  return best;
}

}  // namespace

Tuner::Tuner(const Setup& s)
    : log_(s.log),
      shape_{s.n_ranks, s.n_nodes, true},
      nccl_(s.constants != nullptr ? *s.constants : default_constants()) {
  prepare(s);
}

void Tuner::prepare(const Setup& s) {
  const char* path = trusted_variable("MOECCL_PROFILE");
  if (path == nullptr || *path == '\0') {
    return say(kLogInfo, "MOECCL_PROFILE names no profile: NCCL's own costs stay. moeccl calibrate measures one");
  }
  if (s.n_nodes < 2 || s.n_ranks < s.n_nodes) {
    return say(kLogInfo, format("{} ranks on {} hosts: NCCL's own costs stay, as the profile's links lie between hosts",
                                s.n_ranks, s.n_nodes));
  }
  const size_t per_host = (s.n_ranks + s.n_nodes - 1) / s.n_nodes;
  const auto in_domain = static_cast<size_t>(s.domains != nullptr ? std::max(s.domains->most_ranks, 0) : 0);
  if (in_domain > per_host) {
    return say(kLogInfo, format("NVLink domains of {} ranks reach beyond a host of {}: NCCL's own costs stay",
                                in_domain, per_host));
  }
  shape_.nvlink = in_domain != 1 || per_host == 1;
  const Result<Known> known = read_profile(path);
  if (!known.ok()) {
    return say(kLogWarn,
               format("the profile {} is of no use, NCCL's own costs stay: {}", path, known.status().message()));
  }
  crossings_ = known->fabric.crossings(s.n_nodes);
  std::string text = format(
      "{} ranks on {} hosts, priced by the profile {} (hash {:016x}: it must be the same on all ranks), r2 {:.3f}{}:",
      s.n_ranks, s.n_nodes, path, known->hash, known->fabric.least_r2, known->emulated ? ", EMULATED" : "");
  for (const FabricLevel& l : known->fabric.levels)
    text += format(" {} {:.1f} us {:.2f} GB/s", l.name, l.alpha_us, l.bytes_per_us / 1e3);
  say(kLogInfo, text);
}

void Tuner::price(const Ask& ask, const float* table, int n_algorithms, Costs& costs) const {
  double least_ratio = std::numeric_limits<double>::infinity();
  for (int a = 0; a < kAlgorithms; ++a) {
    for (int p = 0; p < kProtocols; ++p) {
      costs[a][p] = kIgnore;
      const float theirs = a < n_algorithms ? table[a * kProtocols + p] : kIgnore;
      if (!usable(theirs)) continue;
      const double ours = price_us(nccl_, shape_, crossings_, ask, a, p);
      const double least = floor_us(shape_, crossings_, ask, a);
      costs[a][p] = ours < 0 ? std::max<double>(theirs, least) : ours;
      least_ratio = std::min(least_ratio, theirs / costs[a][p]);
    }
  }
  for (int i = 0; i < n_algorithms * kProtocols; ++i) {
    double& cost = costs[i / kProtocols][i % kProtocols];
    if (cost > 0 && table[i] / cost > kModelsDiffer * least_ratio) cost *= kOutOfReach;
  }
}

void Tuner::ask(int function, size_t bytes, int n_ops, float* table, int n_algorithms, int n_protocols) {
  if (crossings_.empty() || table == nullptr || bytes == 0 || function < 0 || function >= kFunctions) return;
  if (n_protocols != kProtocols || n_algorithms < 1 || n_algorithms > kAlgorithms) return;
  constexpr size_t kMostBytes = size_t{1} << 62;  // beyond it a double may not go back to an integer
  const Ask asked{function, static_cast<double>(std::min(bytes, kMostBytes)), std::max(n_ops, 1)};
  Costs costs;
  price(asked, table, n_algorithms, costs);
  const int n = n_algorithms * kProtocols;
  const double* flat = &costs[0][0];
  const int theirs = cheapest(n, [&](int i) { return table[i]; });
  const int ours = cheapest(n, [&](int i) { return flat[i]; });
  if (theirs < 0 || ours < 0 || ours == theirs) return;
  const auto priced = [&](int i) {
    return price_us(nccl_, shape_, crossings_, asked, i / kProtocols, i % kProtocols) >= 0;
  };
  const double worth = priced(ours) && priced(theirs) ? kWorth : kWorthAcrossModels;
  if (flat[ours] > worth * flat[theirs]) return;
  for (int i = 0; i < n; ++i) {
    if (usable(table[i]) && usable(static_cast<float>(flat[i]))) table[i] = static_cast<float>(flat[i]);
  }
  say_change(asked, theirs, ours, costs);
}

void Tuner::say(int level, const std::string& text) const {
  if (log_ == nullptr) return;
  log_(level, kLogInit | kLogTuning, "moeccl_tuner", 0, "TUNER/MoECCL: %s", text.c_str());
}

// Logs once for each power of two, because a program makes millions of calls.
void Tuner::say_change(const Ask& ask, int theirs, int ours, const Costs& costs) {
  if (log_ == nullptr) return;
  const uint64_t bit = uint64_t{1} << (std::bit_width(static_cast<uint64_t>(ask.bytes)) - 1);
  if ((said_[ask.function].load(std::memory_order_relaxed) & bit) != 0) return;
  if ((said_[ask.function].fetch_or(bit, std::memory_order_relaxed) & bit) != 0) return;
  const double* flat = &costs[0][0];
  say(kLogInfo,
      format("{} of {:.0f} bytes on {} hosts: {} ({:.1f} us over the measured links) in place of {} ({:.1f} us)",
             kFunctionNames[ask.function], ask.bytes, shape_.n_nodes, name_of(ours), flat[ours], name_of(theirs),
             flat[theirs]));
}

}  // namespace moeccl::tuner
