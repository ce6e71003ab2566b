// SPDX-License-Identifier: Apache-2.0
// The rendezvous: n ranks meet at a Root, each through a Session, prove that they hold the id's key, and exchange small
// blobs and file descriptors until they can reach each other themselves. A rank that dies, fails, is missing or doubled
// makes all others fail within a second, with a sentence that names it.
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

namespace moeccl::bootstrap {

inline constexpr size_t kMaxBlobBytes = size_t{1} << 20;
inline constexpr size_t kMaxFdsPerRank = 4;
inline constexpr int kMaxRanks = 65536;

struct RootOptions {
  int64_t timeout_ms = 60'000;  // for all ranks to join
  // "ip" or "ip:port" of an interface of this host. Empty: a UNIX socket with a random abstract name.
  std::string socket_addr;
  // UNIX only: a further name where every process of this user gets the id until all ranks have joined, without a key:
  // for launchers that give ranks nothing but a number (handout.h). Empty: none.
  std::string handout_name;
  // The abstract name instead of a random one, where socket_addr is empty.
  std::string unix_name;
  // Ranks of a group that was there before meet again, and some of them may be gone: all have joined when every one
  // that has not is gone in the eyes of all that have (JoinOptions::gone). Those are numbered anew, in their old order.
  bool survivors = false;
  // The key instead of a random one, 32 bytes; empty: random. For ranks that derive it from a secret they share.
  std::span<const std::byte> key;
};

// The meeting point of exactly one group: one thread that listens until all ranks have joined, then serves their
// rounds, and ends by itself when all have left, after a failure was told to all, or when the time is over.
class Root {
 public:
  static Result<std::unique_ptr<Root>> start(const RootOptions& options);
  // Ends the thread at once; ranks that still need it get an error.
  ~Root();
  // Lets it end by itself, with no owner. For GetUniqueId, which has no handle to keep it in.
  static void detach(std::unique_ptr<Root> root);

  const moecclUniqueId& id() const;

 private:
  struct Shared;
  explicit Root(std::shared_ptr<Shared> shared);
  std::shared_ptr<Shared> shared_;  // shared with the thread, which outlives a detached Root
};

// The root for moecclGetUniqueId: MOECCL_SOCKET_ADDR if set; the interface towards MASTER_ADDR if the launcher says
// that there are several hosts; else a UNIX socket. Detached.
Result<moecclUniqueId> make_unique_id();
// The same at an interface's address, "ip", for ranks of which some are known to be on other hosts; empty: as above.
Result<moecclUniqueId> make_unique_id(const std::string& address);

// Some ranks of a group.
using RankSet = std::vector<bool>;  // [n_ranks]

// What the root saw of a rank when it joined.
struct Peer {
  int32_t pid = 0;   // SO_PEERCRED: not the rank's word but the kernel's; 0 over TCP or from a foreign pid namespace
  uint32_t uid = 0;  // likewise; 0 over TCP, see over_unix
  bool over_unix = false;
  bool with_root = false;  // it lives in the root's process
};

struct JoinOptions {
  bool wait_for_root = false;  // keep trying while nobody listens yet
  // Asked every now and then until all have joined: whether those that the root does not know yet can still come. Its
  // failure becomes the session's, and the others are told. May be empty.
  std::function<Status()> others_alive;
  // At a meeting of survivors: the ranks that cannot come any more, as this one sees it; asked every now and then.
  std::function<RankSet()> gone;
};

// A rank's end. Used by one thread at a time. After a failure every further call returns the same failure.
// All ranks make the same calls in the same order; a difference is an error that names two of them.
class Session {
 public:
  // Blocks until all n_ranks have joined. InvalidArgument: bad id, rank or count; Timeout: names the missing ranks;
  // Mismatch: the ranks disagree on n_ranks, or a rank came twice (names both); RemoteError: a rank or the root died;
  // Unsupported: another protocol version (names both).
  static Result<std::unique_ptr<Session>> join(const moecclUniqueId& id, int rank, int n_ranks, Deadline deadline,
                                               const JoinOptions& options = {});
  // Leaves; without close() before it, the others are told that this rank gave up.
  ~Session();

  int rank() const;  // at a meeting of survivors its new number
  // The ranks that have met, by the numbers with which they joined, ascending.
  std::span<const uint32_t> members() const;
  bool over_unix() const;               // only then can file descriptors be exchanged
  std::span<const Peer> peers() const;  // [n_ranks]

  // Each rank's blob of at most kMaxBlobBytes, in rank order.
  Result<std::vector<std::vector<std::byte>>> all_gather(std::span<const std::byte> mine, Deadline deadline);

  // Sends duplicates of at most kMaxFdsPerRank descriptors to the ranks in `wanted_by` (itself excluded; empty or all
  // false: nobody) and returns, for each rank, the descriptors that it sent here: [n_ranks][]. The caller keeps its own
  // open. Ranks of one process share descriptors anyway: let one of them send and one of them want, since n thread
  // ranks times n peers exhaust a process's limit.
  Result<std::vector<std::vector<Fd>>> all_gather_fds(std::span<const int> mine, const RankSet& wanted_by,
                                                      Deadline deadline);

  Status barrier(Deadline deadline);

  // Between rounds. Readable as soon as the group has failed, for those that wait for its ranks elsewhere; news() is
  // the reason then, and success before. It waits for the news for so long.
  int news_fd() const;
  Status news(int64_t wait_ms = 0);

  // This rank is done with the rendezvous; the others go on. Does not wait for them.
  void close();
  // This rank failed: all others fail too, with "rank R: " and this sentence. Closes.
  void abandon(const Status& why);

 private:
  struct Impl;
  explicit Session(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace moeccl::bootstrap
