// SPDX-License-Identifier: Apache-2.0
#include "src/calibrate/calibrate.h"

#include <filesystem>
#include <fstream>

#include "kernels/table.h"
#include "src/base/env.h"
#include "src/base/hash.h"
#include "src/base/log.h"
#include "src/base/trusted_library.h"
#include "src/calibrate/measure.h"
#include "src/comm/collective.h"
#include "src/comm/split.h"
#include "src/driver/file.h"
#include "src/plan/profile_file.h"
#include "topology/synthetic.h"

namespace moeccl::comm {

namespace {

// Returns what /proc/cpuinfo calls this machine's first processor. On aarch64 that is several numbers, of which the
// revision is the last.
std::string processor_name() {
  std::ifstream file("/proc/cpuinfo");
  std::string name;
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name") || line.starts_with("CPU ")) name += line;
    if (line.starts_with("model name") || line.starts_with("CPU revision")) break;
  }
  return name;
}

// Times hold for the machine that they were measured on; a home folder may be shared by several kinds.
uint64_t hash_of_machine(const Communicator& comm) {
  uint64_t hash = hash_combine(comm.tree().hash(), comm.paced() ? 1 : 0);
  hash = hash_string(processor_name(), hash);
  hash = hash_string(env().kernels.empty() ? kernels::best().name : env().kernels, hash);
  for (const plan::Level& level : comm.tree().levels)
    hash = hash_string(level.network.substr(0, level.network.find_first_of(" ;,(")), hash);
  return hash;
}

std::string cache_path(const Communicator& comm) {
  std::string folder;
  if (const char* xdg = trusted_variable("XDG_CACHE_HOME"); xdg != nullptr && *xdg == '/') {
    folder = xdg;
  } else if (const char* home = trusted_variable("HOME"); home != nullptr && *home == '/') {
    folder = std::string(home) + "/.cache";
  } else {
    return "";
  }
  return format("{}/moeccl/{:016x}-{}x{}.json", folder, hash_of_machine(comm), comm.n_ranks(),
                comm.selector().profile()->cores);
}

// Returns rank 0's text on all ranks.
Result<std::string> from_rank_0(Communicator& comm, const std::string& text) {
  uint64_t size = text.size();
  std::vector<uint64_t> sizes(comm.n_ranks());
  MOECCL_TRY(all_gather_bytes(comm, &size, sizeof(size), sizes.data()));
  if (sizes[0] > plan::kMaxProfileBytes)
    return error(moecclRemoteError, "rank 0 announces a profile of {} bytes: at most {} are possible", sizes[0],
                 plan::kMaxProfileBytes);
  std::string all(sizes[0], '\0');
  if (sizes[0] == 0) return all;
  MOECCL_TRY(run_collective(
      comm,
      {.op = moecclOpBroadcast, .send = text.data(), .recv = all.data(), .count = sizes[0], .type = moecclUint8}));
  return all;
}

}  // namespace

Result<plan::Profile> calibrate(Communicator& comm, const CalibrateOptions& options) {
  MOECCL_TRY(comm.usable());
  plan::Profile profile = *comm.selector().profile();
  profile.plans.clear();
  profile.levels.clear();
  profile.n_ranks = comm.n_ranks();
  profile.tree_hash = comm.tree().hash();
  profile.source = "a profile that was measured on this communicator";
  Stopwatch watch(comm, options);
  watch.limit(0.25);
  MOECCL_TRY(measure_links(comm, watch, profile));
  watch.limit(0.3);
  MOECCL_TRY(measure_memory(comm, watch, profile));
  watch.limit(1);
  MOECCL_TRY(measure_plans(comm, watch, options, profile));
  return profile;
}

Status use_profile(Communicator& comm, const plan::Profile& profile, Status why) {
  struct Word {
    uint64_t hash;
    uint64_t failed;
  };
  const Word mine{profile.hash(), why.ok() ? 0u : 1u};
  std::vector<Word> all(comm.n_ranks());
  MOECCL_TRY(all_gather_bytes(comm, &mine, sizeof(mine), all.data()));
  MOECCL_TRY(std::move(why));
  for (uint32_t r = 0; r < comm.n_ranks(); ++r)
    if (all[r].failed != 0) return error(moecclRemoteError, "rank {} has no profile: see its own error", r);
  for (uint32_t r = 0; r < comm.n_ranks(); ++r) {
    if (all[r].hash != all[0].hash)
      return error(
          moecclMismatch,
          "rank 0 and rank {} were given different profiles ({:016x} and {:016x}): give all ranks the same file", r,
          all[0].hash, all[r].hash);
  }
  comm.selector().set_profile(profile);
  if (comm.rank() == 0 && !profile.source.empty()) log(LogLevel::kInfo, "plans are priced by {}", profile.source);
  return {};
}

Status load_profile(Communicator& comm, const std::string& path, bool grown, std::string text) {
  const auto read = [&]() -> Result<plan::Profile> {
    if (text.empty()) {
      MOECCL_ASSIGN_OR_RETURN(text, driver::read_file(path));
    }
    MOECCL_ASSIGN_OR_RETURN(plan::Profile profile, plan::read_profile(text, path));
    profile.source = format("the profile {}", path);
    Status fits = plan::profile_fits(profile, comm.tree());
    if (fits.ok()) return profile;
    if (!grown) return fits;
    log(comm.rank() == 0 ? LogLevel::kWarn : LogLevel::kInfo, "{} is not followed here: {}", profile.source,
        fits.message());
    return *comm.selector().profile();
  };
  Result<plan::Profile> profile = read();
  return use_profile(comm, profile.ok() ? *profile : plan::Profile(), profile.status());
}

Status save_profile(const Communicator& comm, const std::string& path) {
  const std::string text = plan::write_profile(
      *comm.selector().profile(), comm.paced() ? "EMULATED: links are paced" : "", topology::to_synthetic(comm.tree()));
  return driver::replace_file(path, text);
}

Status save_profile_in_cache(const Communicator& comm) {
  const std::string path = cache_path(comm);
  if (path.empty())
    return error(moecclSystemError, "no folder for the cached profile: set XDG_CACHE_HOME or HOME to an absolute path");
  std::error_code failure;  // save_profile reports it
  std::filesystem::create_directories(std::filesystem::path(path).parent_path(), failure);
  return save_profile(comm, path);
}

Status profile_at_init(Communicator& comm, bool grown) {
  if (!env().profile.empty()) {
    const Status loaded = load_profile(comm, env().profile, grown, comm.take_profile_text());
    const bool own = loaded.code() == moecclInvalidArgument || loaded.code() == moecclSystemError;
    return own ? error(loaded.code(), "MOECCL_PROFILE: {}", loaded.message()) : loaded;
  }
  if (env().calibrate_ms <= 0 || comm.n_ranks() < 2) return {};
  const std::string path = cache_path(comm);
  std::string text;
  if (comm.rank() == 0 && !path.empty()) {
    if (Result<std::string> read = driver::read_file(path); read.ok()) text = *read;
  }
  MOECCL_ASSIGN_OR_RETURN(text, from_rank_0(comm, text));
  if (!text.empty()) {
    Result<plan::Profile> cached = plan::read_profile(text, path);
    if (cached.ok() && cached->n_ranks == comm.n_ranks() && cached->tree_hash == comm.tree().hash()) {
      cached->source = format("the profile {}", path);
      return use_profile(comm, *cached, {});
    }
    log(LogLevel::kWarn, "the cached profile is not used: {}",
        cached.ok() ? "another topology" : cached.status().message());
  }
  CalibrateOptions options;
  options.budget_ms = static_cast<double>(env().calibrate_ms);
  Result<plan::Profile> profile = calibrate(comm, options);
  // All ranks saw the same times, so all of them lacked time. A busy machine must not keep a job from starting.
  if (profile.status().code() == moecclInvalidArgument) {
    log(comm.rank() == 0 ? LogLevel::kWarn : LogLevel::kInfo,
        "MOECCL_CALIBRATE: {}; the communicator goes on without a profile", profile.status().message());
    return {};
  }
  if (!profile.ok()) return std::move(profile).status();
  MOECCL_TRY(use_profile(comm, *profile, {}));
  if (comm.rank() != 0 || path.empty()) return {};
  if (const Status s = save_profile_in_cache(comm); !s.ok()) log(LogLevel::kWarn, "profile cache: {}", s.message());
  return {};
}

}  // namespace moeccl::comm
