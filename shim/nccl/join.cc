// SPDX-License-Identifier: Apache-2.0
#include "shim/nccl/join.h"

#include <sys/random.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <thread>
#include <utility>

#include "shim/nccl/device.h"
#include "shim/nccl/ours.h"
#include "shim/nccl/real.h"
#include "src/base/nccl_files.h"

namespace moeccl::shim {
namespace {

// A meeting point at which no rank has joined ends after an hour. The first rank that joins makes it wait as long as it
// waits itself.
constexpr int64_t kFirstRankMs = 3'600'000;

// What ranks tell each other first. The layout is fixed, because the ranks may run different builds of the shim.
struct Hello {
  uint32_t version = 3;
  uint8_t wants_nccl = 0;  // this rank's memory is for NCCL
  uint8_t insists = 0;     // because its user said so
  uint8_t has_nccl = 0;    // and it has one
  uint8_t zero = 0;
  unsigned char seed[16] = {};  // rank 0's counts
  Door door;
  uint64_t place = 0;  // the same in ranks that are threads of one process on one device; 0: no device
};
static_assert(sizeof(Hello) == 64);

ncclResult_t find_place(Comm& comm) {
  const ncclResult_t result = from_moeccl(moecclCommUserRank(comm.ours, &comm.rank));
  return result == ncclSuccess ? from_moeccl(moecclCommCount(comm.ours, &comm.n_ranks)) : result;
}

uint64_t place_of(int device) {
  static const uint64_t process = [] {
    uint64_t random = 0;
    return getrandom(&random, sizeof random, 0) == static_cast<ssize_t>(sizeof random) ? random : 0;
  }();
  return device < 0 ? 0 : process + 1 + static_cast<uint64_t>(device);
}

ncclResult_t exchange(Comm& comm, Hello mine, std::vector<Hello>& all) {
  if (getrandom(mine.seed, sizeof mine.seed, 0) != static_cast<ssize_t>(sizeof mine.seed)) {
    return fail(ncclSystemError, "the kernel gives no random bytes (getrandom)");
  }
  mine.door = comm.rma.open(comm.n_ranks, comm.device);
  mine.place = place_of(comm.device);
  all.resize(static_cast<size_t>(comm.n_ranks));
  const ncclResult_t result =
      from_moeccl(moecclAllGather(&mine, all.data(), sizeof mine, moecclUint8, comm.ours, nullptr));
  if (result != ncclSuccess) return result;
  std::vector<Door> doors;
  for (const Hello& h : all) doors.push_back(h.door);
  const auto here = [&](const Hello& h) { return h.place != 0 && h.place == mine.place; };
  comm.shares_device = std::count_if(all.begin(), all.end(), here) > 1;
  comm.rma.meet(comm.rank, std::move(doors));
  std::copy(std::begin(all[0].seed), std::end(all[0].seed), comm.seed.begin());
  return ncclSuccess;
}

// Returns the same on all ranks: a function of what all have said. Sets `failure` when a user insists on what cannot
// be.
bool choose_nccl(const std::vector<Hello>& all, std::string& failure) {
  bool wanted = false, insists = false;
  int without = -1;
  for (size_t r = 0; r < all.size(); ++r) {
    wanted |= all[r].wants_nccl != 0;
    insists |= all[r].insists != 0;
    if (all[r].has_nccl == 0 && without < 0) without = static_cast<int>(r);
  }
  if (!wanted || without < 0) return wanted;
  if (insists) {
    failure = "MOECCL_SHIM_MODE=nccl asks for NCCL, but rank " + std::to_string(without) +
              " finds none: name its file in MOECCL_SHIM_NCCL there";
  }
  return false;
}

// All ranks leave MoECCL and meet in NCCL, under an id that rank 0 makes.
ncclResult_t hand_over(Comm& comm, InitConfig& config) {
  struct {
    ncclUniqueId id{};
    int32_t made = 0;
  } word;
  if (comm.rank == 0) word.made = MOECCL_FORWARD(GetUniqueId, &word.id) == ncclSuccess;
  ncclResult_t result = from_moeccl(moecclBroadcast(&word, &word, sizeof word, moecclUint8, 0, comm.ours, nullptr));
  int32_t here = 0;
  // All ranks must have the id before any of them leaves.
  if (result == ncclSuccess) {
    result = from_moeccl(moecclAllReduce(&here, &here, 1, moecclInt32, moecclSum, comm.ours, nullptr));
  }
  undo(comm);
  if (result != ncclSuccess) return result;
  if (word.made == 0) return fail(ncclSystemError, "rank 0 could not make an id with its NCCL");
  result = MOECCL_FORWARD(CommInitRankConfig, &comm.real, comm.n_ranks, word.id, comm.rank, config.pointer());
  while (result == ncclInProgress) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    {
      const std::lock_guard lock(comm.mutex);
      if (comm.abandoned || comm.cancelled) {
        (void)MOECCL_FORWARD(CommAbort, std::exchange(comm.real, nullptr));
        return fail(ncclInvalidUsage, "the communicator was aborted while it was being made");
      }
    }
    ncclResult_t state = ncclSuccess;
    result = MOECCL_FORWARD(CommGetAsyncError, comm.real, &state);
    if (result == ncclSuccess) result = state;
  }
  return result;
}

void announce(const Comm& comm, const std::string& reason) {
  static std::atomic<bool> said{false};
  if (comm.rank != 0 || said.exchange(true)) return;
  const std::string ranks = std::to_string(comm.n_ranks) + (comm.n_ranks == 1 ? " rank" : " ranks");
  if (comm.real != nullptr) {
    notice("forwards NCCL calls to " + real_nccl()->path + " (" + ranks +
           "): " + (reason.empty() ? "another rank asked for it" : reason));
    return;
  }
  int version = 0;
  (void)moecclGetVersion(&version);
  notice("MoECCL " + std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100) + " has taken over NCCL's communicators, collectives and messages (" + ranks +
         ", " + (moeccl_serves_cuda() ? "host and CUDA" : "host") +
         " memory); MOECCL_SHIM_MODE=nccl forwards them, MOECCL_SHIM_QUIET=1 hides this line");
}

}  // namespace

ncclResult_t InitConfig::from(const char* function, const ncclConfig_t* config, InitConfig* out) {
  static const ncclConfig_t kUndefined = NCCL_CONFIG_INITIALIZER;
  out->given = kUndefined;
  if (config == nullptr) return ncclSuccess;
  if (config->magic != NCCL_CONFIG_MAGIC || config->size < offsetof(ncclConfig_t, cgaClusterSize)) {
    return fail(ncclInvalidArgument,
                std::string(function) + ": config was not initialised: assign NCCL_CONFIG_INITIALIZER to it");
  }
  std::memcpy(&out->given, config, std::min(config->size, sizeof out->given));
  out->given.size = std::min(config->size, sizeof out->given);
  out->set = true;
  if (out->given.blocking != NCCL_CONFIG_UNDEF_INT && out->given.blocking != 0 && out->given.blocking != 1) {
    return fail(ncclInvalidArgument, std::string(function) + ": config.blocking is " +
                                         std::to_string(out->given.blocking) + ": give 0 or 1");
  }
  if (out->given.commName != nullptr) {
    out->name = out->given.commName;
    out->given.commName = nullptr;  // the real library gets its own copy below
  }
  if (out->given.netName != nullptr) out->net_name = out->given.netName;
  return ncclSuccess;
}

bool is_moeccl_id(const ncclUniqueId& id) { return std::memcmp(id.internal, "MOECCLid", 8) == 0; }

bool wants_nccl(std::string* reason) {
  if (settings().mode == Mode::kMoeccl) return false;
  if (settings().mode == Mode::kNccl) {
    *reason = "MOECCL_SHIM_MODE=nccl";
    return true;
  }
  if (moeccl_serves_cuda() || !device::present()) return false;
  *reason = "there is a CUDA device, and this MoECCL serves host memory only: " + why_not_cuda();
  return true;
}

bool encryption_is_asked() {
  const char* encrypt = std::getenv("MOECCL_ENCRYPT");
  return encrypt != nullptr && std::string_view(encrypt) == "1";
}

ncclResult_t refuse_unencrypted(const std::string& reason) {
  if (!encryption_is_asked()) return ncclSuccess;
  return fail(ncclInvalidUsage, "MOECCL_ENCRYPT is 1, but NCCL would serve these ranks (" +
                                    (reason.empty() ? "another rank asked for it" : reason) +
                                    ") and send in the clear: unset one of the two");
}

ncclResult_t make_id(ncclUniqueId* id, bool by_place) {
  ShimIdRequest asks;
  asks.timeout_ms = settings().limits_init ? 0 : kFirstRankMs;
  const char* const place = by_place ? nccl_variable("NCCL_COMM_ID") : nullptr;
  if (place != nullptr && std::strlen(place) >= sizeof asks.place)
    return fail(ncclInvalidArgument, std::string("ncclGetUniqueId: NCCL_COMM_ID is ") + place + ": give host:port");
  if (place != nullptr) std::memcpy(asks.place, place, std::strlen(place));
  auto made = std::bit_cast<moecclUniqueId>(asks);
  moecclResult_t said = moecclCommGetUniqueId(shim_asks_for_id(), &made);
  // A MoECCL of an earlier version, which the program has loaded before, takes the request for a dead communicator.
  if (said == moecclInvalidArgument && asks.place[0] == '\0') said = moecclGetUniqueId(&made);
  const ncclResult_t result = from_moeccl(said);
  if (result == ncclSuccess) std::memcpy(id, &made, sizeof *id);
  if (result != ncclSuccess && asks.place[0] != '\0')
    return fail(result, std::string("ncclGetUniqueId: NCCL_COMM_ID: ") + moecclGetLastError(nullptr));
  return result;
}

ShimConfig config_of(const Comm& comm) {
  ShimConfig of;
  of.config.timeout_ms = settings().limits_operations ? 0 : kNoLimitMs;
  of.config.init_timeout_ms = settings().limits_init ? 0 : kNoLimitMs;
  of.config.name = comm.name.empty() ? nullptr : comm.name.c_str();
  of.cancelled = &comm.cancelled;
  of.without_graph_mixing = comm.graph_mixing ? 0 : 1;
  return of;
}

ncclResult_t adopt(Comm& comm) {
  works_on(comm, comm.ours);
  const ncclResult_t result = find_place(comm);
  std::vector<Hello> all;
  return result == ncclSuccess ? exchange(comm, {}, all) : result;
}

ncclResult_t join(Comm& comm, int n_ranks, const ncclUniqueId& id, int rank, InitConfig config) {
  moecclUniqueId meeting;
  static_assert(sizeof meeting == sizeof id);
  std::memcpy(&meeting, &id, sizeof meeting);
  comm.name = config.name;
  const ShimConfig ours = config_of(comm);
  const ncclResult_t result = from_moeccl(moecclCommInitRankConfig(&comm.ours, n_ranks, meeting, rank, &ours.config));
  return result == ncclSuccess ? settle(comm, std::move(config)) : result;
}

ncclResult_t settle(Comm& comm, InitConfig config) {
  works_on(comm, comm.ours);
  ncclResult_t result = find_place(comm);
  if (result != ncclSuccess) return result;
  // The first call of a process tries its device. It must not be one that comes while a group of MoECCL's is open.
  if (settings().mode == Mode::kMoeccl) (void)moeccl_serves_cuda();
  Hello mine;
  std::string reason, failure;
  mine.wants_nccl = wants_nccl(&reason);
  mine.insists = settings().mode == Mode::kNccl;
  // Opened only where it may be needed, because it is a library of 200 MB.
  if (settings().mode != Mode::kMoeccl && (mine.wants_nccl != 0 || !settings().nccl.empty())) {
    mine.has_nccl = real_nccl() != nullptr;
  }
  std::vector<Hello> all;
  result = exchange(comm, mine, all);
  const bool forwarded = result == ncclSuccess && choose_nccl(all, failure);
  if (std::string why; !failure.empty() && mine.has_nccl == 0 && real_nccl(&why) == nullptr)
    failure += " (this rank: " + why + ")";
  if (!failure.empty()) result = fail(ncclInvalidUsage, failure);
  if (forwarded) result = refuse_unencrypted(reason);
  if (forwarded && result == ncclSuccess) {
    if (!config.name.empty()) config.given.commName = comm.name.c_str();
    if (!config.net_name.empty()) config.given.netName = config.net_name.c_str();
    result = hand_over(comm, config);
  }
  if (result != ncclSuccess) undo(comm);
  if (result == ncclSuccess) announce(comm, reason);
  return result;
}

}  // namespace moeccl::shim
