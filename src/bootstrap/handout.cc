// SPDX-License-Identifier: Apache-2.0
#include "src/bootstrap/handout.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string_view>
#include <system_error>

#include "src/base/log.h"
#include "src/bootstrap/failed_meetings.h"
#include "src/bootstrap/unique_id.h"
#include "src/driver/process.h"
#include "src/driver/socket.h"

namespace moeccl::bootstrap {
namespace {

constexpr int64_t kAnswerMs = 2000;  // rank 0's root answers at once
constexpr int64_t kLookMs = 200;     // for finding out whether anything listens on this host
// The age of files that are looked at. No process that is about to listen has made one so long ago.
constexpr int64_t kOldNs = 86'400'000'000'000;
constexpr std::string_view kPrefix = "moeccl-";  // of all names of handouts

// Returns true if no other user can write in the folder or put a link in its place.
bool of_this_user_alone(const std::string& folder) {
  struct stat info = {};
  return ::lstat(folder.c_str(), &info) == 0 && S_ISDIR(info.st_mode) && info.st_uid == ::geteuid() &&
         (info.st_mode & 077) == 0;
}

// Returns "" if there is no folder, or if the path is too long for a socket.
std::string file_of(const std::string& name) {
  const std::string folder = private_folder();
  const std::string path = folder + "/" + name;
  return folder.empty() || path.size() > driver::kMaxSocketPath ? "" : path;
}

// A child that was made behind the C library's back (a bare clone()) keeps the sockets of a process that has ended.
// Nothing accepts the connections that are made to them. Returns RemoteError for those.
Status still_runs(const driver::PeerCredentials& listener, const driver::SocketAddress& address) {
  if (listener.pid <= 0 || listener.pid == ::getpid()) return {};
  const auto process = driver::ProcessWatch::open(listener.pid, {});
  const Status runs = process.ok() ? (*process)->check() : process.status();
  if (runs.code() != moecclRemoteError) return {};
  return error(moecclRemoteError, "a child of rank 0's process holds {}: {}", address.str(), runs.message());
}

struct Listener {
  uid_t user = 0;
  bool has_ended = false;  // see still_runs()
};

// Returns a failure if there is no listener.
Result<Listener> listener_at(const driver::SocketAddress& address) {
  MOECCL_ASSIGN_OR_RETURN(const Fd fd, driver::connect_to(address, Deadline::after_ms(kLookMs)));
  MOECCL_ASSIGN_OR_RETURN(const driver::PeerCredentials peer, driver::peer_credentials(fd.get()));
  return Listener{peer.uid, !still_runs(peer, address).ok()};
}

Result<Fd> listen_at_file(const std::string& path) {
  const driver::SocketAddress address = driver::unix_file_address(path);
  Result<Fd> fd = driver::listen_at(address);
  if (fd.ok() || fd.status().code() != moecclInvalidUsage) return fd;
  if (const Result<Listener> there = listener_at(address); there.ok() && !there->has_ended) return fd;
  ::unlink(path.c_str());  // left behind by a process that was killed
  return driver::listen_at(address);
}

// A process that ends before its root leaves the root's file behind, whose name may never be used again.
void remove_leftovers(const std::string& folder) {
  std::error_code failed;
  for (std::filesystem::directory_iterator at(folder, failed), end; !failed && at != end; at.increment(failed)) {
    const std::string path = at->path().string();
    struct stat info = {};
    if (!at->path().filename().string().starts_with(kPrefix) || path.size() > driver::kMaxSocketPath ||
        ::lstat(path.c_str(), &info) != 0 || !S_ISSOCK(info.st_mode) ||
        unix_ns() - int64_t{info.st_mtim.tv_sec} * 1'000'000'000 < kOldNs) {
      continue;
    }
    bool nobody_listens = false;
    (void)driver::connect_to(driver::unix_file_address(path), Deadline::after_ms(0),
                             {.nobody_listens = &nobody_listens});
    if (nobody_listens) ::unlink(path.c_str());
  }
}

Result<moecclUniqueId> ask_at(const driver::SocketAddress& address, Deadline deadline, bool from_these_pids) {
  const Deadline until = Deadline::earlier(deadline, Deadline::after_ms(kAnswerMs));
  MOECCL_ASSIGN_OR_RETURN(const Fd fd, driver::connect_to(address, until));
  MOECCL_ASSIGN_OR_RETURN(const driver::PeerCredentials peer, driver::peer_credentials(fd.get()));
  if (peer.uid != ::geteuid()) {
    return error(moecclInvalidUsage, "user {} listens at {} in the place of rank 0", peer.uid, address.str());
  }
  if (from_these_pids && peer.pid == 0) {
    return error(moecclInvalidUsage, "a process of another container listens at {}", address.str());
  }
  MOECCL_TRY(still_runs(peer, address));
  moecclUniqueId id;
  MOECCL_TRY(driver::recv_exact(fd.get(), std::as_writable_bytes(std::span(id.internal)), until));
  return id;
}

}  // namespace

HandoutListener::~HandoutListener() {
  // Before the socket closes: a process that finds the file without a listener removes it and creates its own there.
  if (!path_.empty()) ::unlink(path_.c_str());
}

std::string private_folder() {
  const char* given = ::secure_getenv("XDG_RUNTIME_DIR");
  if (given != nullptr && given[0] == '/' && of_this_user_alone(given)) return given;
  if (const std::string run = format("/run/user/{}", ::geteuid()); of_this_user_alone(run)) return run;
  const std::string made = format("/tmp/moeccl-{}", ::geteuid());
  (void)::mkdir(made.c_str(), 0700);
  return of_this_user_alone(made) ? made : "";
}

Result<std::vector<HandoutListener>> listen_for_handouts(const std::string& name) {
  std::vector<HandoutListener> made;
  if (const std::string path = file_of(name); !path.empty()) {
    remove_leftovers(private_folder());
    Result<Fd> fd = listen_at_file(path);
    if (!fd.ok() && fd.status().code() == moecclInvalidUsage) return std::move(fd).status();
    if (fd.ok()) made.emplace_back(std::move(*fd), path);
    if (!fd.ok()) log(LogLevel::kInfo, "bootstrap: {}", fd.status().message());
  }
  const driver::SocketAddress address = driver::unix_address(name);
  Result<Fd> fd = driver::listen_at(address);
  if (fd.ok()) {
    made.emplace_back(std::move(*fd), "");
    return made;
  }
  if (fd.status().code() == moecclInvalidUsage) {
    const Result<Listener> there = listener_at(address);
    if (!there.ok() || (there->user == ::geteuid() && !there->has_ended)) return std::move(fd).status();
    log(LogLevel::kWarn, "bootstrap: {} {}, a name of this user's job",
        there->has_ended ? "a process that has ended left a child that holds"
                         : format("user {} listens at", there->user),
        address.str());
  }
  if (made.empty()) {
    return error(moecclSystemError,
                 "{}, and there is no folder of this user alone instead: set XDG_RUNTIME_DIR to one (mode 0700)",
                 fd.status().message());
  }
  return made;
}

Result<moecclUniqueId> ask_for_handout(const std::string& name, Deadline deadline, bool from_these_pids) {
  Status last;
  if (const std::string path = file_of(name); !path.empty()) {
    Result<moecclUniqueId> id = ask_at(driver::unix_file_address(path), deadline, from_these_pids);
    if (id.ok()) return id;
    last = std::move(id).status();
  }
  Result<moecclUniqueId> id = ask_at(driver::unix_address(name), deadline, from_these_pids);
  if (!id.ok() && !last.ok()) return std::move(id).status().with_context(last.message());
  return id;
}

Result<moecclUniqueId> ask_for_next_handout(const std::string& name, int rank, Deadline deadline,
                                            bool from_these_pids) {
  MOECCL_ASSIGN_OR_RETURN(const moecclUniqueId given, ask_for_handout(name, deadline, from_these_pids));
  MOECCL_ASSIGN_OR_RETURN(const UniqueId id, decode_unique_id(given));
  if (!FailedMeetings::has(meeting_number(id.key, 0), rank)) return given;
  return error(moecclRemoteError, "the last meeting has failed, and rank 0 has not come again");
}

}  // namespace moeccl::bootstrap
