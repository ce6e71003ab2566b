// SPDX-License-Identifier: Apache-2.0
#include "src/bootstrap/launcher.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <set>
#include <span>
#include <string_view>
#include <vector>

#include "src/base/env.h"
#include "src/base/hex.h"
#include "src/base/log.h"
#include "src/base/name_list.h"
#include "src/base/text.h"
#include "src/bootstrap/bootstrap.h"
#include "src/bootstrap/handout.h"
#include "src/bootstrap/handshake.h"
#include "src/bootstrap/patience.h"
#include "src/bootstrap/secret.h"
#include "src/bootstrap/slurm.h"
#include "src/bootstrap/unique_id.h"
#include "src/driver/interface.h"
#include "src/driver/process.h"
#include "src/driver/socket.h"
#include "src/driver/thread.h"

namespace moeccl::bootstrap {
namespace {

constexpr uint16_t kDefaultMasterPort = 29500;  // torchrun's default

// The variables in which each launcher passes its values. A null name means that it does not pass the value.
struct Dialect {
  const char* launcher;
  const char* rank;
  const char* n_ranks[2];  // the first that is set counts
  const char* local_rank;
  const char* n_local;
  const char* n_hosts[2];
  const char* job[3];           // all, joined
  const char* contact[6] = {};  // the first that is set counts
  const char* restarts = nullptr;
};
constexpr Dialect kDialects[] = {
    {"torchrun",
     "RANK",
     {"WORLD_SIZE", nullptr},
     "LOCAL_RANK",
     "LOCAL_WORLD_SIZE",
     {"GROUP_WORLD_SIZE", nullptr},
     {"TORCHELASTIC_RUN_ID", nullptr},
     {},
     "TORCHELASTIC_RESTART_COUNT"},
    {"Open MPI",
     "OMPI_COMM_WORLD_RANK",
     {"OMPI_COMM_WORLD_SIZE", nullptr},
     "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE",
     {nullptr, nullptr},
     {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"},
     // The job's number comes from host name and process number, which repeat between containers.
     {"OMPI_MCA_orte_hnp_uri", "PMIX_SERVER_URI41", "PMIX_SERVER_URI4", "PMIX_SERVER_URI3", "PMIX_SERVER_URI21",
      "PMIX_SERVER_URI2"}},
    {"hydra",
     "PMI_RANK",
     {"PMI_SIZE", nullptr},
     "MPI_LOCALRANKID",
     "MPI_LOCALNRANKS",
     {nullptr, nullptr},
     {"PMI_JOBID", "HYDRA_JOBID"}},
    {"Slurm",
     "SLURM_PROCID",
     {"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"},
     "SLURM_LOCALID",
     nullptr,
     {"SLURM_STEP_NUM_NODES", "SLURM_NNODES"},
     {"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"}},  // a job that is queued again keeps its number
};

bool is_of(const Dialect& dialect, std::string_view launcher) { return dialect.launcher == launcher; }

const char* first_set(const EnvironmentReader& read, std::span<const char* const> names) {
  for (const char* name : names) {
    if (name != nullptr && read(name) != nullptr) return name;
  }
  return nullptr;
}

// Leaves *value unchanged if the variable is not set.
Status read_number(const EnvironmentReader& read, const char* name, int low, int high, int* value) {
  const char* text = name != nullptr ? read(name) : nullptr;
  if (text == nullptr) return {};
  const auto parsed = parse_number<int>(text, high);
  if (!parsed.has_value() || *parsed < low) {
    return error(moecclInvalidArgument, "{}: \"{}\" is not accepted; give {} to {}", name,
                 std::string_view(text).substr(0, 64), low, high);
  }
  *value = *parsed;
  return {};
}

Result<LauncherInfo> read_dialect(const EnvironmentReader& read, const Dialect& dialect) {
  LauncherInfo info;
  info.launcher = dialect.launcher;
  MOECCL_TRY(read_number(read, first_set(read, dialect.n_ranks), 1, kMaxRanks, &info.n_ranks));
  MOECCL_TRY(read_number(read, dialect.rank, 0, info.n_ranks - 1, &info.rank));
  MOECCL_TRY(read_number(read, dialect.local_rank, 0, info.n_ranks - 1, &info.local_rank));
  MOECCL_TRY(read_number(read, dialect.n_local, 1, info.n_ranks, &info.n_local));
  MOECCL_TRY(read_number(read, first_set(read, dialect.n_hosts), 1, kMaxRanks, &info.n_hosts));
  int port = 0;
  MOECCL_TRY(read_number(read, "MASTER_PORT", 1, 65534, &port));
  info.master_port = static_cast<uint16_t>(port);
  if (const char* address = read("MASTER_ADDR")) info.master_addr = address;
  if (const char* name = first_set(read, dialect.contact)) info.contact = read(name);
  const auto value_of = [&read](const char* name) { return name != nullptr ? read(name) : nullptr; };
  for (const char* name : dialect.job) {
    const char* value = value_of(name);
    if (value == nullptr) continue;
    if (!info.job.empty()) info.job += '.';
    info.job += value;
  }
  if (const char* count = value_of(dialect.restarts)) info.restarts = count;
  if (is_of(dialect, "Slurm")) read_slurm_step(read, info);
  // A program that sets RANK and WORLD_SIZE from srun's variables need not say more.
  if (is_of(dialect, "torchrun") && info.n_local == 0 && info.n_hosts == 0 && started_by_srun(read, dialect.n_ranks[0]))
    MOECCL_TRY(read_number(read, "SLURM_STEP_NUM_NODES", 1, kMaxRanks, &info.n_hosts));
  return info;
}

bool speaks(const EnvironmentReader& read, const Dialect& dialect) {
  if (read(dialect.rank) == nullptr || first_set(read, dialect.n_ranks) == nullptr) return false;
  // srun --mpi=pmi2 sets these of hydra's too, but not where a rank is among those of its host.
  return !is_of(dialect, "hydra") || read(dialect.local_rank) != nullptr ||
         !started_by_srun(read, dialect.n_ranks[0], dialect.rank);
}

// Returns what another launcher says against `info`, which is from RANK and WORLD_SIZE; "" for nothing.
std::string contradiction_of(const EnvironmentReader& read, const LauncherInfo& info) {
  for (const Dialect& dialect : std::span(kDialects).subspan(1)) {
    if (!speaks(read, dialect)) continue;
    // An sbatch script, in which a user may start ranks by hand, is no step, though it has a rank and a number of
    // tasks.
    if (is_of(dialect, "Slurm") && read(dialect.n_ranks[0]) == nullptr) continue;
    const Result<LauncherInfo> other = read_dialect(read, dialect);
    if (!other.ok()) return "";
    // Each process of the other launcher may have started several of these ranks.
    const int each = info.n_ranks / other->n_ranks;
    if (each * other->n_ranks == info.n_ranks && info.rank / each == other->rank) return "";
    // An agent on each host may number its ranks as it likes. It says where they meet, and does not start single ones.
    if (info.n_ranks > 1 && !info.master_addr.empty()) return "";
    return format(
        "RANK is {} and WORLD_SIZE is {}, but {} started this process as rank {} of {} ({} and {}): unset RANK and "
        "WORLD_SIZE if they are left over; if they are right, set TORCHELASTIC_RUN_ID to a name for the job",
        info.rank, info.n_ranks, dialect.launcher, other->rank, other->n_ranks, dialect.rank,
        first_set(read, dialect.n_ranks));
  }
  return "";
}

// A name that is not known here is that of another host.
Result<bool> is_this_host(const std::string& host, Deadline deadline) {
  if (host == driver::host_identity().hostname) return true;
  const auto addresses = driver::resolve_all(host, 0, deadline);
  if (addresses.status().code() == moecclTimeout) return Status(addresses.status()).with_context("MASTER_ADDR");
  return addresses.ok() && std::any_of(addresses->begin(), addresses->end(), driver::is_local_address);
}

Result<bool> meets_on_one_host(const LauncherInfo& info, Deadline deadline) {
  // A launcher with a loopback address runs everything on this machine, whatever it calls a host.
  if (info.one_host_known() || is_loopback_name(info.master_addr)) return true;
  if (info.several_hosts_known()) return false;
  // The number of hosts is unknown. With a secret, the user is prepared for several; otherwise one is the usual case.
  if (has_secret() || info.master_addr.empty()) return !has_secret();
  return is_this_host(info.master_addr, deadline);
}

// Without a job name, the parent's pid identifies the job, because ranks of one launcher are children of one process.
bool known_by_parent(const LauncherInfo& info) { return info.job.empty() && info.master_addr.empty(); }

// Containers start with the same small process numbers, and often with the same host name.
bool known_by_pid(const LauncherInfo& info) {
  return known_by_parent(info) || (info.launcher == "Open MPI" && info.contact.empty());
}

// Returns what makes the job's name unique on this host, where containers may share the network or a folder.
std::string place_of(const LauncherInfo& info) {
  const driver::HostIdentity here = driver::host_identity();
  if (known_by_pid(info)) return format("pids {} {}", here.boot_id, here.pid_namespace);
  // A loopback address and its port belong to one network namespace. torchrun calls every job "none" by default.
  if (is_loopback_name(info.master_addr)) return format("network {}", here.network());
  return "";
}

// The name is hashed, so that its length does not depend on the job's name. It is not secret, because the listener
// checks the caller's user.
std::string handout_name(const LauncherInfo& info) {
  const std::string job = known_by_parent(info) ? format("parent {}", ::getppid()) : info.job;
  const std::string text = format("{} {} {} {} {} {}:{} {} {}", ::geteuid(), info.launcher, job, info.contact,
                                  place_of(info), info.master_addr, info.master_port, info.n_ranks, info.restarts);
  const Key hash = derive_key(std::as_bytes(std::span(text.data(), text.size())), "moeccl handout");
  return "moeccl-env-" + hex(std::span(hash).first(16));
}

std::string hint_on_one_host(const LauncherInfo& info) {
  if (known_by_parent(info)) {
    return ". Ranks whose parents are different processes meet only with the same MASTER_ADDR. Where they share a "
           "network, as containers with --network=host do, set it to localhost; containers with networks of their own "
           "count as hosts: set it to the address of rank 0's container, and MOECCL_SECRET to a secret, on all ranks";
  }
  if (is_loopback_name(info.master_addr) && !info.one_host_known()) {
    return format(
        ". MASTER_ADDR is \"{}\", so each rank looks for rank 0 on its own host. If the ranks run on several hosts, or "
        "in containers with networks of their own, set MASTER_ADDR to the address of rank 0's host or container, and "
        "MOECCL_SECRET to a secret, on all ranks",
        info.master_addr);
  }
  return "";
}

Result<moecclUniqueId> meet_on_one_host(const LauncherInfo& info, Deadline deadline) {
  const std::string name = handout_name(info);
  if (info.rank == 0) {
    RootOptions options;
    options.timeout_ms = deadline.left_ms();
    options.handout_name = name;
    options.handout_to_these_pids = known_by_pid(info);
    return Root::start_detached(options, deadline);
  }
  for (;;) {
    Result<moecclUniqueId> id = ask_for_next_handout(name, info.rank, deadline, known_by_pid(info));
    if (id.ok()) return id;
    if (deadline.passed()) {
      return error(moecclTimeout, "rank {} found no rank 0 of the {} job: {}{}", info.rank, info.launcher,
                   id.status().message(), hint_on_one_host(info));
    }
    driver::sleep_ns(kRetryMs * 1'000'000);
  }
}

std::set<std::string> names_of_networks(const std::vector<driver::Interface>& interfaces) {
  std::set<std::string> names;
  for (const driver::Interface& i : interfaces)
    if (!i.loopback) names.insert(i.name);
  return names;
}

bool has_several_networks() {
  const auto interfaces = driver::interfaces();
  return interfaces.ok() && names_of_networks(*interfaces).size() > 1;
}

// Returns the only interface that may lead to other hosts, else null. MOECCL_SOCKET_IFNAME decides between several.
const driver::Interface* only_network(const std::vector<driver::Interface>& interfaces) {
  const NameList list(names_of_networks(interfaces).size() > 1 ? env().socket_ifname : "");
  const driver::Interface* only = nullptr;
  for (const driver::Interface& i : interfaces) {
    if (i.loopback || !list.chooses(i.name)) continue;
    if (only != nullptr && i.name != only->name) return nullptr;
    if (only == nullptr) only = &i;
  }
  return only;
}

// Returns the address and then the others of its interface: the other hosts may know only that of the other family.
std::vector<driver::SocketAddress> all_of_interface(const driver::SocketAddress& address) {
  std::vector<driver::SocketAddress> all = {address};
  const auto interfaces = driver::interfaces();
  if (!interfaces.ok()) return all;
  const auto with = std::find_if(interfaces->begin(), interfaces->end(),
                                 [&](const auto& i) { return i.address.host() == address.host(); });
  for (const driver::Interface& i : *interfaces) {
    if (with == interfaces->end() || i.name != with->name || i.address.host() == address.host()) continue;
    all.push_back(i.address);
  }
  return all;
}

// Link-local addresses of IPv6 mean nothing without an interface, whose name may differ between hosts.
bool is_for_this_host_only(const driver::SocketAddress& a) {
  return a.is_loopback() || a.is_any() || a.is_link_local();
}

// Returns all but the first. An id has no room for many, and a rank that does not reach the first may lack its family.
std::vector<driver::SocketAddress> one_of_each_family_first(const std::vector<driver::SocketAddress>& all) {
  std::vector<driver::SocketAddress> others(all.begin() + 1, all.end());
  std::stable_partition(others.begin(), others.end(), [&all](const driver::SocketAddress& a) {
    return a.storage.ss_family != all.front().storage.ss_family;
  });
  return others;
}

// An address or "host:port" that is refused now stays refused; a name may be made with its host.
bool may_be_known_later(const std::string& host) {
  constexpr const char* kOfNames = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._";
  return host.find_first_not_of(kOfNames) == std::string::npos &&
         host.find_first_not_of("0123456789.") != std::string::npos;
}

const std::string& host_of_rank_0(const LauncherInfo& info) {
  return info.master_addr.empty() ? info.first_node : info.master_addr;
}
const char* said_by(const LauncherInfo& info) {
  return info.master_addr.empty() ? "Slurm's first node (without MASTER_ADDR)" : "MASTER_ADDR";
}

// A name of Kubernetes is known only when rank 0's pod runs, and for some seconds a name service keeps that it was not.
Result<UniqueId> wait_for_place_of_rank_0(const LauncherInfo& info, uint16_t port, Deadline deadline) {
  constexpr int64_t kMostPauseMs = 1000;  // many ranks ask one name service
  const std::string& host = host_of_rank_0(info);
  Patience patience;
  for (int64_t pause_ms = kRetryMs;; pause_ms = std::min(2 * pause_ms, kMostPauseMs)) {
    Result<UniqueId> place = place_of_rank_0(said_by(info), host, port, deadline);
    const Code code = place.status().code();
    if (code != moecclSystemError && code != moecclTimeout) return place;
    const std::string& why = place.status().message();
    const bool later = code == moecclTimeout || may_be_known_later(host);
    if (later) driver::sleep_ns(std::min(pause_ms, deadline.left_ms()) * 1'000'000);
    if (!later || deadline.passed()) {
      return error(later ? moecclTimeout : moecclInvalidArgument,
                   "rank {} found no rank 0: {}: set MASTER_ADDR to the name or the IP address of rank 0's host",
                   info.rank, why);
    }
    if (patience.ends())
      log(LogLevel::kWarn, "rank {} keeps trying to find rank 0 by {}: {}", info.rank, said_by(info), why);
  }
}

Result<moecclUniqueId> meet_between_hosts(const LauncherInfo& info, Deadline deadline) {
  if (!has_secret()) {
    return error(moecclInvalidUsage,
                 "the {} job runs on several hosts: set MOECCL_SECRET to the same secret of at least 16 characters on "
                 "all ranks (it admits them), or MOECCL_SECRET_FILE to a file that holds it, or pass a unique id{}",
                 info.launcher,
                 info.launcher == "torchrun" && info.n_local == 0
                     ? "; if all ranks run on this host, set LOCAL_WORLD_SIZE to their number"
                     : "");
  }
  if (host_of_rank_0(info).empty()) {
    return error(moecclInvalidUsage,
                 "the {} job runs on several hosts, and its launcher does not say which of them is rank 0's: set "
                 "MASTER_ADDR to the address of rank 0's host on all ranks",
                 info.launcher);
  }
  const uint16_t port = static_cast<uint16_t>((info.master_port != 0 ? info.master_port : kDefaultMasterPort) + 1);
  MOECCL_ASSIGN_OR_RETURN(UniqueId id, wait_for_place_of_rank_0(info, port, deadline));
  MOECCL_ASSIGN_OR_RETURN(const Key secret, key_of_secret(info.job));
  id.key = derive_key(secret, format("moeccl env {} {}", info.job, info.n_ranks));
  if (info.rank == 0) {
    if (!driver::is_local_address(id.address)) {
      return error(
          moecclInvalidArgument,
          "{}: \"{}\" is {}, which is no address of {}, where rank 0 runs: set MASTER_ADDR on all ranks to the "
          "address of that host",
          said_by(info), host_of_rank_0(info), id.address.host(), driver::host_identity().hostname);
    }
    MOECCL_ASSIGN_OR_RETURN(const moecclUniqueId started, Root::start_detached(root_at(id, deadline), deadline));
    MOECCL_ASSIGN_OR_RETURN(id, decode_unique_id(started));
  }
  id.derived = true;
  return encode_unique_id(id);
}

}  // namespace

Result<LauncherInfo> detect_launcher(const EnvironmentReader& read) {
  for (const Dialect& dialect : kDialects) {
    if (!speaks(read, dialect)) continue;
    MOECCL_ASSIGN_OR_RETURN(LauncherInfo info, read_dialect(read, dialect));
    // torchrun, which may run under another launcher, always names its job.
    if (&dialect == kDialects && info.job.empty()) info.contradiction = contradiction_of(read, info);
    return info;
  }
  const bool has_rank = read("RANK") != nullptr;
  if (has_rank != (read("WORLD_SIZE") != nullptr)) {
    return error(moecclInvalidUsage,
                 "{} is set and {} is not: set RANK to this process's rank and WORLD_SIZE to the number "
                 "of ranks, or unset it and use torchrun, mpirun or srun",
                 has_rank ? "RANK" : "WORLD_SIZE", has_rank ? "WORLD_SIZE" : "RANK");
  }
  return error(moecclInvalidUsage,
               "no launcher started this process: set RANK and WORLD_SIZE, or use torchrun, mpirun or srun");
}

Result<LauncherInfo> detect_launcher() {
  return detect_launcher([](const char* name) -> const char* { return std::getenv(name); });
}

bool is_loopback_name(const std::string& host) {
  return host.starts_with("127.") || host == "localhost" || host.starts_with("localhost.") || host == "ip6-localhost" ||
         host == "::1" || host == "[::1]";
}

Result<UniqueId> place_of_rank_0(const char* said_by, const std::string& host, uint16_t port, Deadline deadline) {
  MOECCL_ASSIGN_OR_RETURN(std::vector<driver::SocketAddress> all, driver::resolve_all(host, port, deadline));
  const driver::SocketAddress here = all.front();
  // Many systems give a host's own name a loopback address (127.0.1.1), so where the name has only such, this is rank
  // 0's host. Other hosts may know it by the address of any of its interfaces.
  if (std::all_of(all.begin(), all.end(), std::mem_fn(&driver::SocketAddress::is_loopback))) {
    const std::string& chosen = env().socket_addr;
    const Result<std::string> own = chosen.empty() ? address_for_other_hosts(LauncherInfo(), deadline) : chosen;
    if (own.ok()) {
      MOECCL_ASSIGN_OR_RETURN(const driver::SocketAddress address, driver::parse_ip_address(*own));
      all = chosen.empty() ? all_of_interface(address) : std::vector{address};
      for (driver::SocketAddress& a : all) a.set_port(port);
      const bool unsure = chosen.empty() && has_several_networks();
      log(unsure ? LogLevel::kWarn : LogLevel::kInfo, "{}: \"{}\" is {} here; the ranks meet at {}{}", said_by, host,
          here.host(), all.front().str(),
          unsure ? format(", which must be what the other hosts know it by: else give that IP address in {}",
                          std::string_view(said_by).starts_with("Slurm") ? "MASTER_ADDR" : said_by)
                 : "");
    }
  }
  std::erase_if(all, is_for_this_host_only);
  if (all.empty()) {
    return error(moecclInvalidArgument,
                 "{}: \"{}\" is {} here, {}which other hosts cannot reach: give {} of rank 0's host", said_by, host,
                 here.host(), here.is_link_local() ? "a link-local address, " : "",
                 here.is_link_local() ? "the name or an address of another kind" : "the IP address");
  }
  // Rank 0 listens at those that are its own. If none is, it says so of the first.
  std::stable_partition(all.begin(), all.end(), driver::is_local_address);
  UniqueId id;
  id.address = all.front();
  id.others = one_of_each_family_first(all);
  return id;
}

RootOptions root_at(const UniqueId& id, Deadline deadline) {
  RootOptions options;
  options.timeout_ms = deadline.left_ms();
  options.socket_addr = id.address.str();
  for (const driver::SocketAddress& other : id.others)
    if (driver::is_local_address(other)) options.other_addrs.push_back(other);
  options.key = id.key;
  return options;
}

Result<std::string> address_for_other_hosts(const LauncherInfo& info, Deadline deadline) {
  const auto failed = [](Status why) {
    return std::move(why).with_context(
        "choosing an interface for the ranks on other hosts (set MOECCL_SOCKET_ADDR to its address)");
  };
  std::vector<driver::SocketAddress> towards;
  if (const std::string& host = host_of_rank_0(info); !host.empty()) {
    auto found = driver::resolve_all(host, 0, deadline);
    if (!found.ok() && !info.master_addr.empty()) return failed(std::move(found).status());
    if (found.ok()) towards = std::move(*found);
  }
  // Many systems give a host's own name a loopback address.
  std::erase_if(towards, is_for_this_host_only);
  const auto own = std::find_if(towards.begin(), towards.end(), driver::is_local_address);
  if (own != towards.end()) return own->host();
  const bool anywhere = towards.empty();
  if (anywhere) {  // then any distant address will do (RFC 5737 and 3849), as nothing is sent
    for (const char* elsewhere : {"192.0.2.1", "2001:db8::1"}) towards.push_back(*driver::parse_ip_address(elsewhere));
  }
  Status why;
  for (const driver::SocketAddress& address : towards) {
    const Result<driver::SocketAddress> source = driver::source_address_towards(address);
    if (source.ok()) return source->host();
    if (why.ok()) why = source.status();
  }
  // A cluster's inner network may have no way out.
  const auto interfaces = driver::interfaces();
  const driver::Interface* only = anywhere && interfaces.ok() ? only_network(*interfaces) : nullptr;
  return only != nullptr ? Result<std::string>(only->address.host()) : failed(std::move(why));
}

Result<moecclUniqueId> meet_from_environment(const LauncherInfo& info, Deadline deadline) {
  if (!info.contradiction.empty()) return error(moecclInvalidUsage, "{}", info.contradiction);
  // All of a job's communicators meet at one place, one after another: rank 0 leaves it when all have come.
  MOECCL_ASSIGN_OR_RETURN(const bool on_one_host, meets_on_one_host(info, deadline));
  return on_one_host ? meet_on_one_host(info, deadline) : meet_between_hosts(info, deadline);
}

}  // namespace moeccl::bootstrap
