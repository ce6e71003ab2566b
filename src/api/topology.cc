// SPDX-License-Identifier: Apache-2.0
// Entry points of topology.h.
#include "moeccl/topology.h"

#include <algorithm>

#include "src/api/convert.h"
#include "src/base/env.h"
#include "src/bootstrap/bootstrap.h"
#include "src/bootstrap/secret.h"
#include "src/driver/file.h"
#include "src/driver/limits.h"
#include "src/plan/profile_file.h"
#include "src/world/network.h"
#include "topology/discover.h"
#include "topology/doctor.h"
#include "topology/json.h"
#include "topology/svg.h"
#include "topology/synthetic.h"
#include "topology/text.h"
#include "topology/tree.h"
#include "transport/transport.h"

using namespace moeccl;

namespace {

Result<std::string> levels_of(const plan::LevelTree& tree, int format_wanted) {
  if (format_wanted != moecclTopologyLevels && format_wanted != moecclTopologyText)
    return error(moecclInvalidArgument,
                 "a synthetic topology has levels and no machine: only these can be shown (moecclTopologyLevels, "
                 "moecclTopologyText; moeccl topo --levels)");
  return topology::to_synthetic(tree) + "\n";
}

Result<std::string> describe(const std::string& source, int wanted) {
  if (wanted < moecclTopologyText || wanted > moecclTopologyLevels)
    return error(moecclInvalidArgument, "format is {}: give a moecclTopologyFormat_t", wanted);
  MOECCL_ASSIGN_OR_RETURN(const topology::Source given, topology::read_source(source.empty() ? "auto" : source, 0));
  const std::vector<topology::Graph>& hosts = given.hosts;
  if (hosts.empty()) return levels_of(given.tree, wanted);
  switch (wanted) {
    case moecclTopologyJson:
      return topology::to_json(hosts);
    case moecclTopologySvg:
      return topology::to_svg(hosts);
    case moecclTopologyLevels: {
      MOECCL_ASSIGN_OR_RETURN(const plan::LevelTree tree, topology::level_tree(hosts, 0));
      return topology::to_synthetic(tree) + "\n";
    }
    default:
      return topology::to_text(hosts);
  }
}

std::vector<topology::NetworkFacts> networks() {
  std::vector<topology::NetworkFacts> facts;
  for (const transport::Network& n : transport::networks()) {
    const std::string refused = comm::wanted(n) ? n.refused(env().encrypt) : format("MOECCL_NET is \"{}\"", env().net);
    const transport::Probe p = refused.empty() ? n.probe() : transport::Probe{false, {}, refused};
    facts.push_back({n.name, p.usable, p.usable ? p.found : p.why_not, n.can.device_memory, transport::text_of(n.can)});
  }
  return facts;
}

std::vector<Status> bad_settings(const std::vector<topology::NetworkFacts>& networks) {
  std::vector<Status> bad;
  if (!env_status().ok()) bad.push_back(env_status());
  const auto check = [&](const char* variable, const std::string& value, auto&& read) {
    if (value.empty()) return;
    if (Status s = read(value).status(); !s.ok()) bad.push_back(std::move(s).with_context(variable));
  };
  check("MOECCL_TOPOLOGY", env().topology, [](const std::string& text) { return topology::read_source(text, 0); });
  check("MOECCL_PROFILE", env().profile, [](const std::string& path) -> Result<plan::Profile> {
    MOECCL_ASSIGN_OR_RETURN(const std::string text, driver::read_file(path));
    return plan::read_profile(text, path);
  });
  check("MOECCL_SECRET_FILE", env().secret_file, bootstrap::read_secret_file);
  const bool any = std::any_of(networks.begin(), networks.end(), [](const auto& n) { return n.usable; });
  if (!any && !env().net.empty())
    bad.push_back(error(moecclUnsupported,
                        "MOECCL_NET is \"{}\", which this host cannot use, so ranks of several hosts cannot join: the "
                        "last lines say why; unset it to use what all ranks have",
                        env().net));
  return bad;
}

Status doctor(int n_ranks, std::string* page, int* n_bad) {
  if (n_ranks < 0 || n_ranks > bootstrap::kMaxRanks)
    return error(moecclInvalidArgument, "n_ranks is {}: give 0 for the usual number, or 1 to {}", n_ranks,
                 bootstrap::kMaxRanks);
  topology::ProbeSources sources;
  sources.cuda = true;
  MOECCL_ASSIGN_OR_RETURN(const topology::Discovery found, topology::discover(sources));
  const driver::HostLimits limits = driver::host_limits();
  const std::vector<topology::NetworkFacts> away = networks();
  const topology::DoctorFacts facts{&found,       &limits, static_cast<uint32_t>(n_ranks),
                                    env().no_cma, away,    bad_settings(away)};
  *page = topology::doctor_page(facts);
  const auto findings = topology::examine(facts);
  if (n_bad != nullptr)
    *n_bad = static_cast<int>(std::count_if(findings.begin(), findings.end(), [](const topology::Finding& f) {
      return f.verdict == topology::Verdict::kProblem;
    }));
  return {};
}

}  // namespace

moecclResult_t moecclTopologyDescribe(const char* source, moecclTopologyFormat_t wanted, char* text, size_t text_bytes,
                                      size_t* needed) {
  return api::guarded(nullptr, [&]() -> Status {
    return api::give_text(describe(source == nullptr ? "" : source, static_cast<int>(wanted)), text, text_bytes,
                          needed);
  });
}

moecclResult_t moecclDoctor(int n_ranks, char* text, size_t text_bytes, size_t* needed, int* n_bad) {
  return api::guarded(nullptr, [&]() -> Status {
    std::string page;
    MOECCL_TRY(doctor(n_ranks, &page, n_bad));
    api::copy_text(page, text, text_bytes, needed);
    return {};
  });
}
