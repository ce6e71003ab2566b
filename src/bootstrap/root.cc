// SPDX-License-Identifier: Apache-2.0
// Root creates the id and the listener, and runs a RootServer on a thread of its own.
#include <algorithm>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "src/base/env.h"
#include "src/base/log.h"
#include "src/base/random.h"
#include "src/bootstrap/bootstrap.h"
#include "src/bootstrap/failed_meetings.h"
#include "src/bootstrap/launcher.h"
#include "src/bootstrap/patience.h"
#include "src/bootstrap/root_server.h"
#include "src/driver/fork_page.h"
#include "src/driver/limits.h"
#include "src/driver/port.h"
#include "src/driver/process.h"
#include "src/driver/thread.h"

namespace moeccl::bootstrap {
namespace {

// 96 random bits: no two names are equal, and no process can take the name in advance.
Result<driver::SocketAddress> random_unix_address() {
  uint64_t random[2];
  MOECCL_TRY(random_bytes(random, sizeof(random)));
  return driver::unix_address(format("moeccl-{:016x}{:08x}", random[0], random[1] & 0xffffffff));
}

Result<driver::SocketAddress> own_address(const std::string& text) {
  MOECCL_ASSIGN_OR_RETURN(const driver::SocketAddress address, driver::parse_ip_address(text));
  if (address.is_link_local()) {
    return error(moecclInvalidArgument,
                 "{} is a link-local address, which other hosts cannot reach without an interface: give an address of "
                 "another kind",
                 address.host());
  }
  if (!driver::is_local_address(address)) {
    return error(moecclInvalidArgument, "{} is not an address of this host", address.str());
  }
  return address;
}

constexpr int64_t kOtherMs = 100;
// A root that is to leave its place closes its listeners on its own thread.
constexpr int64_t kLeavesMs = 500;

// Listens at the id's address and at those of `others` that this host has, which become the id's others.
Result<std::vector<Fd>> listen_everywhere(std::span<const driver::SocketAddress> others, UniqueId* id) {
  std::vector<Fd> listeners;
  MOECCL_ASSIGN_OR_RETURN(listeners.emplace_back(), driver::listen_in(&id->address, env().port_range));
  for (driver::SocketAddress address : others.first(std::min(others.size(), kMaxOtherAddresses))) {
    address.set_port(id->address.port());
    Result<Fd> fd = driver::listen_at(address);
    // The root of this job's previous communicator closes its listeners one after the other.
    const Deadline until = Deadline::after_ms(kOtherMs);
    while (!fd.ok() && fd.status().code() == moecclInvalidUsage && !until.passed()) {
      driver::sleep_ns(1'000'000);
      fd = driver::listen_at(address);
    }
    if (!fd.ok()) {
      log(LogLevel::kWarn, "bootstrap: no rank is met at {}: {}", address.str(), fd.status().message());
      continue;
    }
    listeners.push_back(std::move(*fd));
    id->others.push_back(address);
  }
  return listeners;
}

}  // namespace

struct Root::Shared {
  Shared(driver::WakeUp end_it, driver::WakeUp move_it) : end(std::move(end_it)), leave_place(std::move(move_it)) {}
  driver::WakeUp end, leave_place;
  moecclUniqueId id = {};
  uint64_t meeting = 0;
  driver::ForkGuard process;
  std::thread thread;
};

Root::Root(std::shared_ptr<Shared> shared) : shared_(std::move(shared)) {}

Result<std::unique_ptr<Root>> Root::start(const RootOptions& options) {
  driver::raise_file_limit();
  if (!options.key.empty() && options.key.size() != kKeyBytes) {
    return error(moecclInternalError, "a key of {} bytes", options.key.size());
  }
  UniqueId id;
  MOECCL_ASSIGN_OR_RETURN(id.key, random_key());
  if (!options.key.empty()) std::copy(options.key.begin(), options.key.end(), id.key.begin());
  MOECCL_ASSIGN_OR_RETURN(id.address, !options.socket_addr.empty() ? own_address(options.socket_addr)
                                      : !options.unix_name.empty() ? driver::unix_address(options.unix_name)
                                                                   : random_unix_address());
  id.host_hash = driver::host_identity().hash();
  MOECCL_ASSIGN_OR_RETURN(std::vector<Fd> listeners, listen_everywhere(options.other_addrs, &id));
  std::vector<HandoutListener> handouts;
  if (!options.handout_name.empty()) {
    MOECCL_ASSIGN_OR_RETURN(handouts, listen_for_handouts(options.handout_name));
  }

  MOECCL_ASSIGN_OR_RETURN(driver::WakeUp end, driver::WakeUp::create());
  MOECCL_ASSIGN_OR_RETURN(driver::WakeUp leave_place, driver::WakeUp::create());
  auto shared = std::make_shared<Shared>(std::move(end), std::move(leave_place));
  MOECCL_ASSIGN_OR_RETURN(shared->id, encode_unique_id(id));
  MOECCL_ASSIGN_OR_RETURN(const Key payload_seed, random_key());
  uint32_t number = 0;
  if (!options.key.empty()) MOECCL_TRY(random_bytes(&number, sizeof(number)));
  shared->meeting = meeting_number(id.key, number);
  const RootServer::Config config = {id.key,
                                     id.address.is_unix(),
                                     options.timeout_ms,
                                     shared->id,
                                     options.survivors,
                                     payload_seed,
                                     options.handout_to_these_pids,
                                     number};
  MOECCL_ASSIGN_OR_RETURN(std::unique_ptr<RootServer> made,
                          RootServer::create(config, std::move(listeners), std::move(handouts),
                                             {shared->end.fd(), shared->leave_place.fd()}));
  std::shared_ptr<RootServer> server = std::move(made);  // std::function requires its target to be copyable
  auto body = [shared, server]() mutable {
    const Status ran = contained([&] { return server->run(), Status(); });
    // The meeting is over: every rank that waits for it sees its connection close.
    if (!ran.ok()) log(LogLevel::kError, "bootstrap: the meeting point has failed: {}", ran.message());
    server.reset();
  };
  MOECCL_ASSIGN_OR_RETURN(shared->thread, driver::start_thread("moeccl-root", std::move(body)));
  return std::unique_ptr<Root>(new Root(std::move(shared)));
}

Root::~Root() {
  if (!shared_) return;
  if (shared_->process.forked()) {
    // A child of fork() has the memory but not the thread, whose handle can be neither joined nor destroyed.
    new std::shared_ptr<Shared>(std::move(shared_));
    return;
  }
  shared_->end.signal();
  shared_->thread.join();
}

void Root::detach(std::unique_ptr<Root> root) {
  root->shared_->thread.detach();
  root->shared_.reset();
}

// The detached roots of this process, by the places where other ranks find them.
class Root::Detached {
 public:
  static Detached& get() {
    static constinit driver::PerProcess<Detached> all;
    return all.get();
  }
  void add(const std::string& place, const std::shared_ptr<Shared>& root) {
    const std::lock_guard lock(mutex_);
    std::erase_if(roots_, [](const auto& one) { return one.second.expired(); });
    roots_.emplace_back(place, root);
  }
  // Rank 0 has come to the place again. Where it has failed, only the next meeting is of use.
  void clear(const std::string& place) {
    const std::lock_guard lock(mutex_);
    for (const auto& [at, weak] : roots_) {
      const std::shared_ptr<Shared> root = at == place ? weak.lock() : nullptr;
      if (root != nullptr && FailedMeetings::has(root->meeting, 0)) root->leave_place.signal();
    }
  }
  void without_rank_0(const UniqueId& id) {
    const std::lock_guard lock(mutex_);
    for (const auto& [at, weak] : roots_) {
      const std::shared_ptr<Shared> root = weak.lock();
      if (root == nullptr) continue;
      const Result<UniqueId> its = decode_unique_id(root->id);
      if (its.ok() && its->key == id.key && its->address.str() == id.address.str())
        FailedMeetings::add(root->meeting, 0);
    }
  }

 private:
  std::mutex mutex_;
  std::vector<std::pair<std::string, std::weak_ptr<Shared>>> roots_;
};

Result<moecclUniqueId> Root::start_detached(const RootOptions& options, Deadline until,
                                            const std::function<Status()>& cancelled) {
  const Deadline joined = Deadline::after_ms(options.timeout_ms);
  const std::string& place = options.handout_name.empty() ? options.socket_addr : options.handout_name;
  RootOptions now = options;
  for (Patience patience;;) {
    Result<std::unique_ptr<Root>> root = start(now);
    if (root.ok()) {
      const moecclUniqueId id = (*root)->id();
      if (!place.empty()) Detached::get().add(place, (*root)->shared_);
      detach(std::move(*root));
      return id;
    }
    if (root.status().code() != moecclInvalidUsage) return std::move(root).status();
    Detached::get().clear(place);
    const std::string why =
        root.status().message() +
        ": another program or another job is there, or an earlier meeting of this job has not ended; give "
        "each job a place of its own (MASTER_PORT, MOECCL_SOCKET_ADDR)";
    if (until.passed()) return error(moecclInvalidUsage, "{}", why);
    if (patience.ends()) log(LogLevel::kWarn, "rank 0 waits for its meeting place: {}", why);
    if (cancelled) MOECCL_TRY(cancelled());
    now.timeout_ms = joined.left_ms();
    driver::sleep_ns(kRetryMs * 1'000'000);
  }
}

void Root::without_rank_0(const UniqueId& id) { Detached::get().without_rank_0(id); }

const moecclUniqueId& Root::id() const { return shared_->id; }

Result<moecclUniqueId> make_unique_id() { return make_unique_id(""); }

Result<moecclUniqueId> make_unique_id(const std::string& address, int64_t timeout_ms) {
  RootOptions options;
  options.timeout_ms = timeout_ms > 0 ? timeout_ms : env().init_timeout_ms;
  options.socket_addr = address.empty() ? env().socket_addr : address;
  if (options.socket_addr.empty()) {
    Result<LauncherInfo> launcher = detect_launcher();
    if (launcher.ok() && launcher->several_hosts_known()) {
      MOECCL_ASSIGN_OR_RETURN(options.socket_addr,
                              address_for_other_hosts(*launcher, Deadline::after_ms(options.timeout_ms)));
    }
  }
  Result<moecclUniqueId> id = Root::start_detached(options, Deadline::after_ms(kLeavesMs));
  if (id.ok()) return id;
  return std::move(id).status().with_context(env().socket_addr.empty() ? "starting the meeting point"
                                                                       : "MOECCL_SOCKET_ADDR");
}

}  // namespace moeccl::bootstrap
