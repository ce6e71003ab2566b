// SPDX-License-Identifier: Apache-2.0
#include "shim/nccl/meeting.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

namespace moeccl::shim {
namespace {

ncclResult_t by_message(Comm& parent, const std::vector<int>& ranks, moecclUniqueId* id) {
  if (parent.rank != ranks.front()) {
    return from_moeccl(moecclRecv(id, sizeof *id, moecclUint8, ranks.front(), parent.ours, nullptr));
  }
  ncclResult_t result = from_moeccl(moecclGroupStart());
  for (size_t i = 1; i < ranks.size() && result == ncclSuccess; ++i) {
    result = from_moeccl(moecclSend(id, sizeof *id, moecclUint8, ranks[i], parent.ours, nullptr));
  }
  const ncclResult_t ended = from_moeccl(moecclGroupEnd());
  return result != ncclSuccess ? result : ended;
}

// FNV-1a, 64 bits. What keeps strangers out is the seed in it, and that only the owner's processes may follow the link.
uint64_t hash(const std::string& text, uint64_t start) {
  uint64_t h = 0xcbf29ce484222325u ^ start;
  for (const char c : text) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return h;
}

// The same on all ranks of the list, another one each time that they meet.
std::string name_of(Comm& parent, const std::vector<int>& ranks) {
  std::string list;
  for (const int r : ranks) list += std::to_string(r) + ",";
  int nth = 0;
  {
    const std::lock_guard lock(parent.mutex);
    nth = parent.meetings[list]++;
  }
  const std::string all = std::string(parent.seed.begin(), parent.seed.end()) + list + std::to_string(nth);
  char name[48];
  std::snprintf(name, sizeof name, "moeccl-shim-%016llx%016llx", static_cast<unsigned long long>(hash(all, 0)),
                static_cast<unsigned long long>(hash(all, 0x9e3779b97f4a7c15u)));
  return std::string(access("/dev/shm", W_OK) == 0 ? "/dev/shm/" : "/tmp/") + name;
}

// The id is in memory of this process alone, and the name in the file system is a link to it: when the process ends, in
// whatever way, the id's key is gone with it.
ncclResult_t show(const std::string& name, const moecclUniqueId& id, int* memory) {
  *memory = memfd_create("moeccl-shim-meeting", MFD_CLOEXEC);
  const bool whole =
      *memory >= 0 && fchmod(*memory, 0600) == 0 && write(*memory, &id, sizeof id) == static_cast<ssize_t>(sizeof id);
  const std::string target = "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(*memory);
  if (whole && symlink(target.c_str(), name.c_str()) == 0) return ncclSuccess;
  const std::string why = std::strerror(errno);
  if (*memory >= 0) close(std::exchange(*memory, -1));
  return fail(ncclSystemError, "cannot show " + name + " to the other survivors: " + why);
}

enum class Found { kNothing, kId, kOfTheDead };
Found look(const std::string& name, moecclUniqueId* id) {
  struct stat s;
  if (lstat(name.c_str(), &s) != 0 || !S_ISLNK(s.st_mode) || s.st_uid != geteuid()) return Found::kNothing;
  const int fd = open(name.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return errno == ENOENT ? Found::kOfTheDead : Found::kNothing;
  const bool good = fstat(fd, &s) == 0 && s.st_uid == geteuid() && (s.st_mode & 077) == 0 &&
                    pread(fd, id, sizeof *id, 0) == static_cast<ssize_t>(sizeof *id);
  close(fd);
  return good ? Found::kId : Found::kNothing;
}

ncclResult_t await(const std::string& name, int leader, moecclUniqueId* id) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(settings().init_timeout_ms);
  for (Found found; (found = look(name, id)) != Found::kId;) {
    if (found == Found::kOfTheDead && look(name, id) == Found::kOfTheDead) {  // not taken away in between
      unlink(name.c_str());
      return fail(ncclRemoteError, "rank " + std::to_string(leader) +
                                       " of the old communicator has died in the meeting of the survivors");
    }
    if (std::chrono::steady_clock::now() > end) {
      return fail(ncclRemoteError, "rank " + std::to_string(leader) +
                                       " of the old communicator did not come to the meeting of the survivors within " +
                                       std::to_string(settings().init_timeout_ms) +
                                       " ms: is it alive, on this host, and does it exclude the same ranks?");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return ncclSuccess;
}

}  // namespace

Meeting::~Meeting() {
  if (memory_ < 0) return;
  unlink(shown_.c_str());
  close(memory_);
}

ncclResult_t Meeting::agree(Comm& parent, const std::vector<int>& ranks, bool parent_works, moecclUniqueId* id) {
  const bool leads = parent.rank == ranks.front();
  if (leads) {
    const ncclResult_t result = from_moeccl(moecclGetUniqueId(id));
    if (result != ncclSuccess) return result;
  }
  if (ranks.size() == 1) return ncclSuccess;
  if (parent_works) return by_message(parent, ranks, id);
  shown_ = name_of(parent, ranks);
  return leads ? show(shown_, *id, &memory_) : await(shown_, ranks.front(), id);
}

}  // namespace moeccl::shim
