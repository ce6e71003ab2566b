// SPDX-License-Identifier: Apache-2.0
#include "src/world/config.h"

#include <algorithm>
#include <bit>

#include "src/base/adopt.h"
#include "src/base/env.h"
#include "src/base/shim_requests.h"
#include "src/driver/cuda.h"

namespace moeccl::comm {
namespace {

constexpr uint64_t kLeastStaging = 64 << 10, kMostStaging = uint64_t{1} << 36;

}  // namespace

Result<Config> Config::from(const moecclConfig_t* given, bool of_part) {
  MOECCL_TRY(env_status());
  const moecclConfig_t defaults = MOECCL_CONFIG_INIT;
  const ShimConfig* const of_shim = ShimConfig::of(given);
  moecclConfig_t plain = of_shim != nullptr ? of_shim->config : defaults;
  plain.size = sizeof(plain);
  const bool as_it_is = given != nullptr && of_shim == nullptr;
  MOECCL_ASSIGN_OR_RETURN(const moecclConfig_t c, adopt(as_it_is ? given : &plain, "config"));
  const auto bad = [](const char* field, int64_t value, const char* wanted) {
    return error(moecclInvalidArgument, "config.{} is {}: give {}", field, value, wanted);
  };
  if (c.timeout_ms < 0) return bad("timeout_ms", c.timeout_ms, "milliseconds, or 0 for the default");
  if (c.init_timeout_ms < 0) return bad("init_timeout_ms", c.init_timeout_ms, "milliseconds, or 0 for the default");
  if (c.deterministic < 0 || c.deterministic > 1) return bad("deterministic", c.deterministic, "0 or 1");
  if (c.priority < 0 || c.priority > MOECCL_HIGHEST_PRIORITY)
    return bad("priority", c.priority, "a moecclPriority_t, or a number up to 8");
  if (c.pace < 0 || c.pace > 1) return bad("pace", c.pace, "0 or 1");
  if (c.cuda_sms < 0) return bad("cuda_sms", c.cuda_sms, "multiprocessors, or 0 for the default");
  Config out;
  out.cuda_sms = static_cast<uint32_t>(c.cuda_sms > 0 ? c.cuda_sms : env().cuda_sms);
  out.timeout_ms = c.timeout_ms > 0 ? c.timeout_ms : env().timeout_ms;
  out.init_timeout_ms = c.init_timeout_ms > 0 ? c.init_timeout_ms : env().init_timeout_ms;
  out.deterministic = c.deterministic == 1;
  out.pace = c.pace == 1;
  out.priority = c.priority;
  if (c.topology != nullptr) {
    out.topology = c.topology;
  } else if (!of_part) {
    out.topology = env().topology;
  }
  MOECCL_ASSIGN_OR_RETURN(out.staging_bytes, staging_of(c.staging_bytes));
  out.plan = env().plan;
  out.cuda_context = driver::cuda::current_context();
  out.graph_mixing = env().cuda_graph_mixing && (of_shim == nullptr || of_shim->without_graph_mixing == 0);
  if (of_shim != nullptr) out.cancelled = of_shim->cancelled;
  if (c.name != nullptr) out.name = std::string(c.name).substr(0, 31);
  if (out.topology.size() > kMaxText) {
    return error(moecclInvalidArgument, "config.topology has {} bytes: at most {} are accepted", out.topology.size(),
                 kMaxText);
  }
  return out;
}

Result<uint64_t> Config::staging_of(uint64_t given) {
  const uint64_t bytes = given > 0 ? given : static_cast<uint64_t>(env().staging_bytes);
  if (bytes == 0 || (bytes >= kLeastStaging && bytes <= kMostStaging)) return bytes;
  return error(moecclInvalidArgument, "staging_bytes is {}: give between {} and {}", bytes, kLeastStaging,
               kMostStaging);
}

Config::Around Config::Around::of(const plan::LevelTree& tree, const plan::Profile& profile) {
  const uint32_t n_far = std::min(tree.n_far_levels, tree.depth());
  Around around{1, tree.n_ranks, plan::long_line(tree, profile)};
  if (n_far == 0) return around;
  const plan::Groups hosts(tree.levels[n_far - 1]);
  around.n_hosts = tree.levels[n_far - 1].n_groups;
  around.most_on_host = 0;
  for (uint32_t h = 0; h < around.n_hosts; ++h) around.most_on_host = std::max(around.most_on_host, hosts.size(h));
  return around;
}

uint64_t Config::staging_on(uint64_t staging, const Around& around) {
  if (staging > 0) return staging;
  const uint64_t usual = std::max<uint64_t>(16, around.n_hosts) << 20;
  const uint64_t wanted = plan::staging_for(around.line, around.most_on_host, usual);
  return std::max(usual, std::min(wanted, std::bit_floor(around.room)));
}

Status Config::not_cancelled() const {
  if (cancelled == nullptr || !cancelled->load(std::memory_order_relaxed)) return {};
  return error(moecclAborted, "the communicator was aborted while it was being made");
}

std::string Config::difference(const Config& o) const {
  if (deterministic != o.deterministic) return format("deterministic ({} and {})", deterministic, o.deterministic);
  if (pace != o.pace) return format("pace ({} and {})", pace, o.pace);
  if (priority != o.priority) return format("priority ({} and {})", priority, o.priority);
  if (graph_mixing != o.graph_mixing)
    return format("MOECCL_CUDA_GRAPH_MIXING ({:d} and {:d})", graph_mixing, o.graph_mixing);
  if (staging_bytes != o.staging_bytes) return format("staging_bytes ({} and {})", staging_bytes, o.staging_bytes);
  if (topology != o.topology) return format("topology (\"{}\" and \"{}\")", topology, o.topology);
  if (plan != o.plan) return format("MOECCL_PLAN (\"{}\" and \"{}\")", plan, o.plan);
  return "";
}

}  // namespace moeccl::comm
