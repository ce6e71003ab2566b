// SPDX-License-Identifier: Apache-2.0
// The rendezvous. n ranks meet at a Root, each through a Session. They prove that they hold the id's key, and exchange
// small blobs and file descriptors until they can reach each other directly. If a rank dies, fails, is missing or joins
// twice, all others fail within a second, with a sentence that names it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "moeccl/comm.h"
#include "src/base/clock.h"
#include "src/base/fd.h"
#include "src/base/status.h"
#include "src/bootstrap/patience.h"
#include "src/bootstrap/unique_id.h"
#include "src/driver/socket.h"

namespace moeccl::bootstrap {

inline constexpr size_t kMaxBlobBytes = size_t{1} << 20;
// The limits of Session::all_to_all(): for the rows of one rank, and for those of all, which the root holds once.
inline constexpr size_t kMaxRowsBytes = size_t{16} << 20;
inline constexpr size_t kMaxAllRowsBytes = size_t{4} << 30;
inline constexpr size_t kMaxFdsPerRank = 4;
inline constexpr int kMaxRanks = 65535;          // a plan counts the parts of a block in 16 bits
inline constexpr size_t kMaxOtherAddresses = 6;  // as many of IPv4 as fit into an id

struct RootOptions {
  int64_t timeout_ms = 60'000;  // the time for all ranks to join
  // "ip" or "ip:port" of an interface of this host. If empty, a UNIX socket with a random abstract name.
  std::string socket_addr;
  // Further addresses of this host to listen at, with the same port; at most kMaxOtherAddresses. One that is in
  // use, or that the system does not give, is left out with a warning.
  std::vector<driver::SocketAddress> other_addrs;
  // UNIX only: a further name under which every process of this user gets the id, without a key, until all ranks have
  // joined. This is for launchers that give ranks only a number (handout.h). Empty for none.
  std::string handout_name;
  // The name identifies the job by a process's number, so processes of other pid namespaces, where such a number means
  // another process, get no id.
  bool handout_to_these_pids = false;
  // The abstract name to use instead of a random one when socket_addr is empty.
  std::string unix_name;
  // Ranks of an existing group meet again, and some of them may be gone. All have joined when every missing rank is
  // gone in the eyes of all ranks that have joined (JoinOptions::gone). The ranks that have joined get new numbers in
  // their old order.
  bool survivors = false;
  // A key of 32 bytes to use instead of a random one; empty for random. For ranks that derive it from a shared secret.
  std::span<const std::byte> key;
};

// The meeting point of exactly one group. Its one thread listens until all ranks have joined and then serves their
// rounds. It ends by itself when all ranks have left, when all have been told of a failure, or when the time is over.
class Root {
 public:
  static Result<std::unique_ptr<Root>> start(const RootOptions& options);
  // Starts a root that ends by itself, and returns its id; options.timeout_ms counts from this call. While its place is
  // taken, as it is for a moment by the root of this job's previous communicator, it tries again until `until`;
  // `cancelled`, which may be empty, ends that. A root of this process at which rank 0 has failed leaves the place.
  static Result<moecclUniqueId> start_detached(const RootOptions& options, Deadline until,
                                               const std::function<Status()>& cancelled = {});
  // Ends the thread at once. Ranks that still need it get an error.
  ~Root();
  // Lets the root end by itself, without an owner.
  static void detach(std::unique_ptr<Root> root);
  // Called when rank 0 has given up before the detached root of this process that has the id has met it.
  static void without_rank_0(const UniqueId& id);

  const moecclUniqueId& id() const;

 private:
  struct Shared;
  class Detached;
  explicit Root(std::shared_ptr<Shared> shared);
  std::shared_ptr<Shared> shared_;  // shared with the thread, which outlives a detached Root
};

// Starts the root for moecclGetUniqueId and detaches it. It is at MOECCL_SOCKET_ADDR if that is set, at the interface
// towards MASTER_ADDR if the launcher says that there are several hosts, and otherwise at a UNIX socket.
Result<moecclUniqueId> make_unique_id();
// Starts it at an interface's address, "ip", when some ranks are known to be on other hosts; if empty, as above. It
// waits for `timeout_ms`; 0: for MOECCL_INIT_TIMEOUT_MS.
Result<moecclUniqueId> make_unique_id(const std::string& address, int64_t timeout_ms = 0);

// A subset of a group's ranks.
using RankSet = std::vector<bool>;  // [n_ranks]

// Facts about a rank that the root learned when the rank joined.
struct Peer {
  int32_t pid = 0;   // from SO_PEERCRED, thus not claimed by the rank; 0 over TCP or from a foreign pid namespace
  uint32_t uid = 0;  // likewise from SO_PEERCRED; 0 over TCP, see over_unix
  bool over_unix = false;
  bool with_root = false;  // it runs in the root's process
};

struct JoinOptions {
  // Keep trying while there is no listener yet, or only that of a meeting at which this rank has failed before.
  bool wait_for_root = false;
  // Called when the root that the id names has gone before it has met this rank, for ids that rank 0's process hands
  // out anew for each of its roots: returns the next one's. May be empty.
  std::function<Result<moecclUniqueId>()> ask_again = {};
  // Called periodically until all ranks have joined: checks that the ranks that the root does not know yet can still
  // come. A failure becomes the session's, and the other ranks are told. May be empty.
  std::function<Status()> others_alive;
  // At a meeting of survivors: returns the ranks that, in this rank's view, cannot come any more. Called periodically.
  std::function<RankSet()> gone;
  // Called periodically as long as the session waits, also for the root's answer and later: a failure ends it, as
  // others_alive does.
  std::function<Status()> cancelled = {};
  int64_t lost_after_ms = kLostMs;  // gives up when no root has answered for so long
};

// A rank's end of the rendezvous. Used by one thread at a time. After a failure every further call returns the same
// failure. All ranks must make the same calls in the same order; a difference is an error that names two of them.
class Session {
 public:
  // Blocks until all n_ranks have joined. InvalidArgument: bad id, rank or count. Timeout: names the missing ranks, or
  // the place where no root answers.
  // Mismatch: the ranks disagree on n_ranks, or a rank joined twice (names both). RemoteError: a rank or the root died.
  // Unsupported: another protocol version (names both).
  static Result<std::unique_ptr<Session>> join(const moecclUniqueId& id, int rank, int n_ranks, Deadline deadline,
                                               const JoinOptions& options = {});
  // Leaves. Without a preceding close(), the others are told that this rank gave up.
  ~Session();

  int rank() const;  // at a meeting of survivors, its new number
  // Returns the ranks that have met, by the numbers with which they joined, in ascending order.
  std::span<const uint32_t> members() const;
  // Returns this host's address on the way by which it has joined.
  Result<driver::SocketAddress> local_address() const;
  const std::function<Status()>& cancelled() const;  // as joined with
  bool over_unix() const;                            // file descriptors can be exchanged only if true
  std::span<const Peer> peers() const;               // [n_ranks]

  // Returns each rank's blob of at most kMaxBlobBytes, in rank order.
  Result<std::vector<std::vector<std::byte>>> all_gather(std::span<const std::byte> mine, Deadline deadline);

  // Sends each rank its row, [n_ranks]; returns the row that each rank sent here, in rank order. For what only one rank
  // needs to know: with all_gather, every rank would get the rows of all.
  Result<std::vector<std::vector<std::byte>>> all_to_all(std::span<const std::vector<std::byte>> rows,
                                                         Deadline deadline);

  // Sends duplicates of at most kMaxFdsPerRank descriptors to the ranks in `wanted_by` except itself; an empty set or
  // all false means to no rank. Returns, for each rank, the descriptors that it sent here: [n_ranks][]. The caller
  // keeps its own descriptors open. Ranks of one process share descriptors anyway, so only one of them should send and
  // one of them want them: n thread ranks times n peers would exhaust a process's limit.
  Result<std::vector<std::vector<Fd>>> all_gather_fds(std::span<const int> mine, const RankSet& wanted_by,
                                                      Deadline deadline);

  Status barrier(Deadline deadline);

  // For use between rounds. news_fd() becomes readable as soon as the group has failed, for callers that wait for its
  // ranks elsewhere. news() then returns the reason, and success before that. It waits up to `wait_ms` for news.
  int news_fd() const;
  Status news(int64_t wait_ms = 0);

  // Declares that this rank is done with the rendezvous while the others go on. Does not wait for them.
  void close();
  // Declares that this rank has failed. All others fail too, with "rank R: " and this sentence. Closes the session.
  void abandon(const Status& why);

 private:
  struct Impl;
  explicit Session(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace moeccl::bootstrap
