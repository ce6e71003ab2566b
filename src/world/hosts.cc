// SPDX-License-Identifier: Apache-2.0
#include "src/world/hosts.h"

#include <cstdlib>
#include <map>
#include <nlohmann/json.hpp>

#include "src/base/wire.h"
#include "src/bootstrap/handshake.h"
#include "src/driver/process.h"
#include "src/driver/socket.h"

namespace moeccl::comm {
namespace {

constexpr size_t kMaxName = 100;    // of an abstract UNIX socket
constexpr int64_t kNewsMs = 200;    // time to wait for news from the session of all ranks
constexpr int64_t kDeathMs = 2000;  // time for the news that a rank which had its meeting point has ended
// A barrier ends on all ranks at nearly the same time, on busy hosts only roughly. Clocks that a time service keeps
// differ by less than that.
constexpr int64_t kSameClockMs = 1000;

}  // namespace

Hosts::Hosts(std::span<const HostOfRank> all) {
  std::map<uint64_t, uint32_t> numbers;
  for (uint32_t r = 0; r < all.size(); ++r) {
    const uint32_t host = numbers.emplace(all[r].identity, static_cast<uint32_t>(numbers.size())).first->second;
    if (host == members.size()) {
      members.emplace_back();
      identity.push_back(all[r].identity);
      names.push_back(all[r].name);
      network.push_back(all[r].network);
    }
    host_of.push_back(host);
    index_of.push_back(static_cast<uint32_t>(members[host].size()));
    members[host].push_back(r);
  }
}

// Composed as text, because the destructors of nlohmann's arrays and objects allocate, and end the process when memory
// is short. That of a string does not.
std::string Hosts::json() const {
  if (n() == 1) return {};
  std::string all;
  for (uint32_t h = 0; h < n(); ++h) {
    std::string ranges;
    for (size_t first = 0, last = 0; first < members[h].size(); first = last + 1) {
      last = first;
      while (last + 1 < members[h].size() && members[h][last + 1] == members[h][last] + 1) ++last;
      ranges += format("{}[{},{}]", ranges.empty() ? "" : ",", members[h][first], members[h][last]);
    }
    const std::string name = nlohmann::json(names[h]).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    const int64_t ahead = clock_ahead_ms.empty() ? 0 : clock_ahead_ms[h];
    all += format("{}{{\"host_id\":\"{:016x}\",\"name\":{},\"ranks\":[{}]{}}}", all.empty() ? "" : ",", identity[h],
                  name, ranges, ahead == 0 ? "" : format(",\"clock_ahead_ms\":{}", ahead));
  }
  return "[" + all + "]";
}

void Hosts::compare_clocks(std::span<const int64_t> met_ns) {
  clock_ahead_ms.clear();
  int64_t first_ms = 0;
  for (const std::vector<uint32_t>& ranks : members) {
    int64_t earliest_ns = met_ns[ranks[0]];
    for (const uint32_t r : ranks) earliest_ns = std::min(earliest_ns, met_ns[r]);
    const int64_t ms = earliest_ns / 1'000'000;
    if (clock_ahead_ms.empty()) first_ms = ms;
    const int64_t ahead = ms - first_ms;
    clock_ahead_ms.push_back(std::abs(ahead) < kSameClockMs ? 0 : ahead);
  }
}

Result<std::unique_ptr<HostSession>> HostSession::join(bootstrap::Session& session, const Hosts& hosts,
                                                       const bootstrap::Key& key, Deadline deadline) {
  std::unique_ptr<HostSession> made(new HostSession(session, hosts));
  if (hosts.n() == 1 && session.over_unix()) return made;
  const auto rank = static_cast<uint32_t>(session.rank());
  const uint32_t host = hosts.host_of[rank];
  const std::vector<uint32_t>& here = hosts.members[host];
  const bootstrap::Key local_key = bootstrap::derive_key(key, format("moeccl host {}", host));
  Writer name;
  if (here.size() > 1 && here[0] == rank) {
    bootstrap::RootOptions options;
    options.timeout_ms = deadline.left_ms();
    options.key = local_key;
    MOECCL_ASSIGN_OR_RETURN(made->root_, bootstrap::Root::start(options));
    MOECCL_ASSIGN_OR_RETURN(const bootstrap::UniqueId id, bootstrap::decode_unique_id(made->root_->id()));
    name.bytes(id.address.host_bytes());
  }
  MOECCL_ASSIGN_OR_RETURN(const auto names, session.all_gather(name.view(), deadline));
  if (here.size() == 1) return made;
  Reader in(names[here[0]]);
  const std::string where = in.string(kMaxName);
  if (!in.done()) return error(moecclRemoteError, "rank {} sent no meeting point for its host", here[0]);
  bootstrap::UniqueId id;
  id.address = driver::unix_address(where);
  id.key = local_key;
  id.host_hash = driver::host_identity().hash();
  MOECCL_ASSIGN_OR_RETURN(const moecclUniqueId encoded, bootstrap::encode_unique_id(id));
  bootstrap::JoinOptions options;
  options.others_alive = [&session] { return session.news(); };
  options.cancelled = session.cancelled();
  // Called where no rank listens, though this one has just been told the place. Machines that were cloned while they
  // ran, with their memory, have the same boot id and numbers of namespaces.
  options.ask_again = [&]() -> Result<moecclUniqueId> {
    MOECCL_TRY(session.news(kDeathMs));
    return error(moecclRemoteError,
                 "rank {} cannot reach rank {}, though both have the host name {}, the same boot id and the "
                 "same namespaces: if they are on machines that are clones of one, set MOECCL_HOST_ID to a "
                 "name of its own on each machine",
                 rank, here[0], hosts.names[host]);
  };
  Result<std::unique_ptr<bootstrap::Session>> local = bootstrap::Session::join(
      encoded, static_cast<int>(hosts.index_of[rank]), static_cast<int>(here.size()), deadline, options);
  if (!local.ok()) return made->failure(std::move(local).status());
  made->local_ = std::move(*local);
  return made;
}

// The session of all ranks names a lost rank by its communicator rank; this one knows only its number on the host.
Status HostSession::failure(Status why) const {
  MOECCL_TRY(all_.news(kNewsMs));
  return std::move(why).with_context("meeting the ranks of this host");
}

Result<std::vector<std::vector<Fd>>> HostSession::all_gather_fds(std::span<const int> mine,
                                                                 const bootstrap::RankSet& wanted_by,
                                                                 Deadline deadline) {
  if (hosts_.n() == 1 && all_.over_unix()) return all_.all_gather_fds(mine, wanted_by, deadline);
  std::vector<std::vector<Fd>> all(hosts_.host_of.size());
  if (local_ == nullptr) return all;
  const std::vector<uint32_t>& here = hosts_.around(static_cast<uint32_t>(all_.rank()));
  bootstrap::RankSet wanted;
  for (const uint32_t r : here) wanted.push_back(wanted_by[r]);
  auto received = local_->all_gather_fds(mine, wanted, deadline);
  if (!received.ok()) return failure(std::move(received).status());
  for (size_t i = 0; i < here.size(); ++i) all[here[i]] = std::move((*received)[i]);
  return all;
}

int32_t HostSession::pid_of(uint32_t rank) const {
  if (local_ == nullptr) return all_.over_unix() ? all_.peers()[rank].pid : 0;
  return local_->peers()[hosts_.index_of[rank]].pid;
}

void HostSession::close() {
  if (local_ != nullptr) local_->close();
}

}  // namespace moeccl::comm
